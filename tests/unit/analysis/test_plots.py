"""Charts: something to see, or a sentence that says why not."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import pytest
from tests.fakes import fake_events, fake_sweep, replay

from heats.analysis import plots
from heats.analysis.plots import charts
from heats.config import Direction
from heats.record import SweepRecord
from heats.trial import (
    Objective,
    ParamValue,
    Reported,
    SweepStarted,
    TrialAsked,
    TrialEnded,
    TrialState,
)

if TYPE_CHECKING:
    from collections.abc import Callable

Params = dict[str, ParamValue]


def with_params(change: Callable[[Params], Params], num_trials: int = 12) -> SweepRecord:
    return replay(
        [
            dataclasses.replace(event, params=change(event.params))
            if isinstance(event, TrialAsked)
            else event
            for event in fake_events(num_trials)
        ]
    )


def missing(record: SweepRecord) -> dict[str, str]:
    return {chart.key: chart.why_not for chart in charts(record) if chart.figure is None}


def test_whole_sweep_has_every_chart() -> None:
    drawn = charts(fake_sweep())
    assert [chart.key for chart in drawn if chart.figure is not None] == [
        "history", "curves", "parallel", "importance", "slices", "timeline",
    ]  # fmt: skip


def test_running_sweep_has_every_chart() -> None:
    assert missing(fake_sweep(is_ended=False)) == {}


def test_sweep_without_trials_says_so_everywhere() -> None:
    reasons = missing(fake_sweep(num_trials=0))
    assert len(reasons) == 6
    assert reasons["history"] == "No trial has started yet."
    assert reasons["slices"] == (
        "This needs one complete trial with a finite value; so far there are 0."
    )


def test_one_trial_lacks_only_importance() -> None:
    assert missing(fake_sweep(num_trials=1)) == {
        "importance": "This needs 2 complete trials with a finite value; so far there are 1."
    }


@pytest.mark.parametrize(
    "change",
    [
        lambda params: {"lr": params["lr"]},
        lambda params: {"opt": params["recipe.config.optimizer"], "is_small": params["lr"] < 0.01},
        lambda params: {"clip": None if params["lr"] < 0.01 else 1.0},
        lambda params: {"lr": math.inf if params["lr"] < 0.01 else params["lr"]},
        lambda params: {"depth": 3, "lr": params["lr"]},
        lambda params: {f"a.p{index}": params["lr"] * index for index in range(1, 10)},
    ],
    ids=["one", "categorical", "null", "infinite", "constant", "many"],
)
def test_every_kind_of_parameter_is_drawn(change: Callable[[Params], Params]) -> None:
    assert missing(with_params(change)) == {}


def test_conditional_parameter_is_drawn_where_it_is_held() -> None:
    def change(params: Params) -> Params:
        is_adam = params["recipe.config.optimizer"] == "adam"
        return {"lr": params["lr"], **({"beta": params["lr"]} if is_adam else {})}

    assert missing(with_params(change)) == {}


def test_search_space_without_parameters_says_so() -> None:
    reasons = missing(with_params(lambda _: {}))
    assert reasons.keys() == {"parallel", "importance", "slices"}
    assert reasons["slices"] == "The search space has no parameters."


def test_nan_everywhere_leaves_only_the_timeline() -> None:
    events = [
        dataclasses.replace(event, metrics={"val_loss": math.nan})
        if isinstance(event, Reported)
        else dataclasses.replace(event, value=math.nan)
        if isinstance(event, TrialEnded)
        else event
        for event in fake_events(6)
    ]
    reasons = missing(replay(events))
    assert len(reasons) == 5
    assert reasons["curves"] == "Every reported val_loss is NaN or infinite."


def test_metric_that_is_never_reported_names_those_that_are() -> None:
    start, *rest = fake_events(4)
    assert isinstance(start, SweepStarted)
    start = dataclasses.replace(start, objective=Objective("loss", Direction.minimize))
    reason = missing(replay([start, *rest]))["curves"]
    assert reason == "No report holds 'loss'; reported were: epoch, val_accuracy, val_loss."


def test_importance_with_few_complete_trials_is_that_at_a_resource_most_reached() -> None:
    record = fake_sweep()
    assert 15 == record.counts()[TrialState.COMPLETE]
    figure = plots.parameter_importance(record)
    title = figure.layout.xaxis.title.text
    assert title.startswith("val_loss at epoch 1, ")
    assert int(title.split(", ")[1].split()[0]) > 30
    shares = dict(zip(figure.data[0].y, figure.data[0].x, strict=True))
    assert sum(shares.values()) == pytest.approx(1)


def test_importance_with_many_complete_trials_is_that_of_final_values() -> None:
    events = [
        dataclasses.replace(event, state=TrialState.COMPLETE)
        if isinstance(event, TrialEnded) and event.value is not None
        else event
        for event in fake_events()
    ]
    figure = plots.parameter_importance(replay(events))
    assert figure.layout.xaxis.title.text.startswith("val_loss of complete trials, 40")


def test_equal_values_have_no_importance() -> None:
    events = [
        dataclasses.replace(event, value=1.0) if isinstance(event, TrialEnded) else event
        for event in fake_events(6)
    ]
    assert "same value" in missing(replay(events))["importance"]


def test_chart_that_fails_says_why_and_spares_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: SweepRecord) -> None:
        msg = "no luck"
        raise RuntimeError(msg)

    monkeypatch.setattr(plots, "parameter_importance", broken)
    assert missing(fake_sweep(num_trials=4)) == {"importance": "This chart failed: no luck"}


def test_one_diverged_trial_does_not_flatten_the_chart() -> None:
    events = [
        dataclasses.replace(event, value=1e12)
        if isinstance(event, TrialEnded) and event.trial == 0
        else event
        for event in fake_events(12)
    ]
    history = charts(replay(events))[0].figure
    assert history is not None
    axis = history.layout.yaxis
    assert axis.type == "log" or axis.range[1] < 100
