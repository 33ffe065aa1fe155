"""A sweep as rows and JSON."""

from __future__ import annotations

import json
import math

from tests.fakes import fake_events, fake_start, fake_sweep, replay

from heats.analysis.tables import (
    json_value,
    ranked,
    sweep_json,
    sweep_state,
    trial_json,
    trials_json,
    why_ended,
)
from heats.trial import Event, Reported, TrialAsked, TrialEnded, TrialState


def test_json_forms_survive_strict_json() -> None:
    record = fake_sweep()
    form = {**sweep_json(record, state="finished"), "trials": trials_json(record)}
    assert json.loads(json.dumps(form, allow_nan=False)) == form


def test_sweep_json_has_the_documented_keys() -> None:
    form = sweep_json(fake_sweep(), state="finished")
    assert list(form) == [
        "name", "state", "reason", "objective", "num_trials", "counts", "best", "started", "ended",
        "wall_s", "experiment", "tracking_uri", "run_id", "argv",
    ]  # fmt: skip
    assert form["counts"] == {"complete": 15, "pruned": 24, "failed": 1, "running": 0}
    assert form["best"]["number"] == 29
    assert form["started"] == "2025-10-09T08:53:20.000+00:00"


def test_non_finite_floats_are_strings_that_float_reads() -> None:
    values = [math.nan, math.inf, -math.inf, 1.5, None, True, "x"]
    assert [json_value(value) for value in values] == [
        "NaN", "Infinity", "-Infinity", 1.5, None, True, "x",
    ]  # fmt: skip
    assert math.isnan(float(json_value(math.nan)))
    assert float(json_value(-math.inf)) == -math.inf


def test_trial_that_diverged_is_valid_json() -> None:
    events: list[Event] = [
        fake_start(),
        TrialAsked(time_s=1.0, trial=0, params={"lr": math.inf}, overrides=("lr=inf",)),
        Reported(time_s=2.0, trial=0, index=1, resource=1, metrics={"val_loss": math.nan}),
        TrialEnded(time_s=3.0, trial=0, state=TrialState.COMPLETE, value=math.nan),
    ]
    record = replay(events)
    form = trial_json(record.trials[0], record.objective)
    assert form["value"] == "NaN"
    assert form["params"] == {"lr": "Infinity"}
    assert form["started"] is None
    assert sweep_json(record, state="interrupted")["best"] is None


def test_secrets_stay_out() -> None:
    start = fake_start(
        argv=("sweep.py", "-m", "api_key=hunter2"),
        tracking_uri="https://me:hunter2@mlflow.example.org",
    )
    form = sweep_json(replay([start]), state="interrupted")
    assert "hunter2" not in json.dumps(form)


def test_state_follows_lock_and_last_event() -> None:
    assert sweep_state(fake_sweep(), is_running=False) == "finished"
    assert sweep_state(fake_sweep(is_ended=False), is_running=True) == "running"
    assert sweep_state(fake_sweep(is_ended=False), is_running=False) == "interrupted"


def test_ranking_puts_complete_first_and_the_best_on_top() -> None:
    record = fake_sweep()
    trials = ranked(record)
    best = record.best()
    assert best is not None
    assert trials[0].number == best.number
    states = [trial.state for trial in trials]
    assert states[:15] == [TrialState.COMPLETE] * 15
    assert states[-1] is TrialState.FAIL


def test_reason_names_the_rung_or_the_error() -> None:
    record = fake_sweep()
    reasons = {n: why_ended(t, record.objective) for n, t in record.trials.items()}
    assert reasons[7] == "RuntimeError: <shape> [4, 3]"
    assert reasons[29] == ""
    assert "at rung" in reasons[8]


def test_events_of_a_running_sweep_give_running_trials() -> None:
    record = replay(fake_events(is_ended=False))
    form = trial_json(record.trials[39], record.objective)
    assert (form["state"], form["resource"], form["rung"]) == ("RUNNING", 5, 3)
