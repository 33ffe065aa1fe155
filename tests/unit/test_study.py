from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING, Any

import optuna
import pytest
from omegaconf import OmegaConf

from heats.config import Direction
from heats.errors import ConfigError, LedgerError
from heats.record import SweepRecord
from heats.space import parse_space
from heats.study import Study
from heats.trial import (
    Objective,
    Proposal,
    Reported,
    SweepStarted,
    TrialAsked,
    TrialEnded,
    TrialState,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from heats.space import SearchSpace

COMPLETE, PRUNED, FAIL = TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL
LOSS = Objective("loss", Direction.minimize)
SPACE = parse_space(
    None,
    [
        "lr=tag(log,interval(1e-5,0.1))",
        "+n=range(1,9,2)",
        "drop=range(0,0.5,0.1)",
        "opt=adam,'sgd, nesterov',null,[1,2]",
    ],
)
GRID = parse_space(None, ["a=1,2,3", "b=x,y"])
RANDOM = {"_target_": "optuna.samplers.RandomSampler"}
TPE = {"_target_": "optuna.samplers.TPESampler", "n_startup_trials": 3}


class Told:
    """A study and the ledger's view of it, driven together as the race drives them."""

    def __init__(self, study: Study, space: SearchSpace, objective: Objective = LOSS) -> None:
        self.study = study
        self.record = SweepRecord(
            SweepStarted(
                time_s=0.0,
                study_name="s",
                argv=(),
                cwd="",
                script=None,
                module=None,
                objective=objective,
                space=space.to_json(),
                fixed=(),
                settings={},
                config_yaml="",
                experiment="e",
                tracking_uri="",
            )
        )

    def ask(self) -> Proposal:
        proposal = self.study.ask()
        self.record.apply(
            TrialAsked(
                time_s=0.0,
                trial=proposal.number,
                params=proposal.params,
                overrides=proposal.overrides,
            )
        )
        return proposal

    def report(self, number: int, resource: int, value: float) -> None:
        self.study.report(number, resource, value)
        name = self.record.objective.name
        self.record.apply(
            Reported(
                time_s=0.0, trial=number, index=resource, resource=resource, metrics={name: value}
            )
        )

    def tell(self, number: int, state: TrialState, value: float | None) -> None:
        self.study.tell(number, state, value)
        self.record.apply(TrialEnded(time_s=0.0, trial=number, state=state, value=value))


def play(told: Told, num_steps: int) -> list[Proposal]:
    """Trials that overlap, and end in every way."""
    proposals = []
    for _ in range(num_steps):
        proposal = told.ask()
        proposals.append(proposal)
        number = proposal.number
        lr = proposal.params["lr"]
        assert isinstance(lr, float)
        for epoch in (1, 2, 3):
            told.report(number, epoch, abs(math.log10(lr) + 3) / epoch)
        done = number - 2  # Two are always running.
        if done >= 0:
            if done % 5 == 1:
                told.tell(done, PRUNED, None)
            elif done % 5 == 3:
                told.tell(done, FAIL, None)
            else:
                last = told.record.trials[done].last
                told.tell(done, COMPLETE, last.metrics["loss"] if last else None)
    return proposals


# --- asking -------------------------------------------------------------------------------------


def test_proposal_has_number_clean_values_and_overrides() -> None:
    study = Study(LOSS, SPACE, RANDOM, 0)
    proposals = [study.ask() for _ in range(40)]
    assert [proposal.number for proposal in proposals] == list(range(40))
    for proposal in proposals:
        params = proposal.params
        assert list(params) == ["lr", "+n", "drop", "opt"]
        assert params["+n"] in (1, 3, 5, 7)
        assert params["drop"] in (0.0, 0.1, 0.2, 0.3, 0.4)
        assert params["opt"] in ("adam", "sgd, nesterov", None, "[1,2]")
        assert proposal.overrides[0] == f"lr={params['lr']!r}"
    opts = {proposal.params["opt"]: proposal.overrides[3] for proposal in proposals}
    assert opts["sgd, nesterov"] == "opt='sgd, nesterov'"
    assert opts[None] == "opt=null"
    assert opts["[1,2]"] == "opt=[1,2]"


@pytest.mark.parametrize("sampler", [RANDOM, TPE, None])
def test_same_seed_gives_the_same_points_and_another_seed_others(sampler: Any) -> None:
    runs = [play(Told(Study(LOSS, SPACE, sampler, seed), SPACE), 12) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    assert len({proposal.overrides for proposal in runs[0]}) == 12


def test_seed_of_the_sampler_node_goes_first() -> None:
    def points(seed: int, node_seed: int | None) -> list[Proposal]:
        study = Study(LOSS, SPACE, {**RANDOM, "seed": node_seed}, seed)
        return [study.ask() for _ in range(3)]

    assert points(1, 7) == points(2, 7)
    assert points(1, None) != points(2, None)


# --- the default, and grids ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "sampler",
    [
        None,
        {"_target_": "heats.study.grid"},
        {"_target_": "optuna.samplers.GridSampler", "_partial_": True},
    ],
)
def test_grid_has_every_point_once_in_hydras_order(sampler: Any) -> None:
    told = Told(Study(LOSS, GRID, sampler, 0), GRID)
    points = []
    while not told.study.is_exhausted:
        proposal = told.ask()
        points.append(proposal.overrides)
        told.tell(proposal.number, (COMPLETE, FAIL)[proposal.number % 2], 1.0)
    assert points == [(f"a={a}", f"b={b}") for a in (1, 2, 3) for b in "xy"]
    with pytest.raises(IndexError):
        told.study.ask()


def test_grid_over_ranges_on_request() -> None:
    space = parse_space(None, ["a=range(1,3)", "b=range(0,1,0.5)"])
    assert not Study(LOSS, space, None, 0).is_exhausted
    study = Study(LOSS, space, {"_target_": "heats.study.grid"}, 0)
    points = [study.ask().params for _ in range(4)]
    assert points == [{"a": a, "b": b} for a in (1, 2) for b in (0.0, 0.5)]
    assert study.is_exhausted


def test_grid_over_an_interval_is_refused() -> None:
    with pytest.raises(ConfigError, match="lr must have finitely many values"):
        Study(LOSS, parse_space(None, ["lr=interval(0,1)"]), {"_target_": "heats.study.grid"}, 0)


def test_space_without_dimensions_is_a_grid_of_one_point() -> None:
    study = Study(LOSS, parse_space(None, ["lr=1"]), None, 0)
    assert study.ask() == Proposal(0, {}, ())
    assert study.is_exhausted


def test_default_is_tpe_where_a_dimension_is_not_a_list() -> None:
    told = Told(Study(LOSS, SPACE, None, 3), SPACE)
    play(told, 60)
    lrs = [trial.params["lr"] for trial in told.study.trials[30:]]
    near = [lr for lr in lrs if abs(math.log10(lr) + 3) < 0.5]
    assert len(near) > len(lrs) / 2  # A quarter by chance.
    assert not told.study.is_exhausted


# --- samplers from config -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "node",
    [
        {"_target_": "optuna.samplers.QMCSampler", "warn_independent_sampling": False},
        {"_target_": "optuna.samplers.NSGAIISampler", "population_size": 4},
        {"_target_": "optuna.samplers.TPESampler", "multivariate": False, "n_startup_trials": 2},
        {
            "_target_": "optuna.samplers.PartialFixedSampler",
            "fixed_params": {"+n": 3},
            "base_sampler": {"_target_": "optuna.samplers.RandomSampler", "seed": 1},
        },
    ],
)
def test_any_optuna_sampler_is_built_from_its_node(node: dict[str, Any]) -> None:
    for config in (node, OmegaConf.create(node)):
        told = Told(Study(LOSS, SPACE, config, 0), SPACE)
        play(told, 8)
        assert len(told.study.trials) == 8


def test_sampler_object_is_taken_as_it_is() -> None:
    study = Study(LOSS, SPACE, optuna.samplers.RandomSampler(seed=1), 0)
    assert study.ask().number == 0


@pytest.mark.parametrize(
    ("sampler", "told"),
    [
        ("tpe", "it has no _target_"),
        ({"seed": 1}, "it has no _target_"),
        ({"_target_": "optuna.samplers.TPESampller"}, "TPESampller"),
        ({"_target_": "optuna.samplers.TPESampler", "nosuch": 1}, "nosuch"),
        ({"_target_": "optuna.samplers.CmaEsSampler", "nosuch": 1}, "nosuch"),
        ({"_target_": "fractions.Fraction"}, "it gives a Fraction"),
        (
            {"_target_": "optuna.samplers.GridSampler", "search_space": {"x": [1]}},
            "leave out its search_space",
        ),
    ],
)
def test_what_is_no_sampler_is_refused(sampler: Any, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Study(LOSS, SPACE, sampler, 0)
    assert told in str(caught.value)
    assert "hydra/sweeper/sampler=tpe" in str(caught.value)


# --- telling ------------------------------------------------------------------------------------


def test_complete_trial_has_its_value_and_curve() -> None:
    told = Told(Study(LOSS, SPACE, None, 0), SPACE)
    told.ask()
    for resource, value in ((1, 3.0), (4, 1.0), (9, 2.0)):
        told.report(0, resource, value)
    told.tell(0, COMPLETE, 1.0)
    (trial,) = told.study.trials
    assert (trial.state, trial.value) == (optuna.trial.TrialState.COMPLETE, 1.0)
    assert trial.intermediate_values == {1: 3.0, 4: 1.0, 9: 2.0}


def test_stopped_trial_is_pruned_with_its_whole_curve() -> None:
    told = Told(Study(LOSS, SPACE, None, 0), SPACE)
    told.ask()
    for resource in range(1, 2001):
        told.report(0, resource, 1.0 / resource)
    told.tell(0, PRUNED, 1.0 / 2000)
    (trial,) = told.study.trials
    assert (trial.state, trial.value) == (optuna.trial.TrialState.PRUNED, 1.0 / 2000)
    assert len(trial.intermediate_values) == 2000


def test_report_repeated_after_a_restart_replaces_the_first() -> None:
    told = Told(Study(LOSS, SPACE, None, 0), SPACE)
    told.ask()
    told.report(0, 1, 3.0)
    told.report(0, 1, 2.0)
    told.tell(0, PRUNED, None)
    assert told.study.trials[0].intermediate_values == {1: 2.0}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("state", [COMPLETE, PRUNED, FAIL])
def test_value_that_is_not_finite_never_reaches_optuna(bad: float, state: TrialState) -> None:
    told = Told(Study(LOSS, SPACE, None, 0), SPACE)
    told.ask()
    told.report(0, 1, 3.0)
    told.report(0, 2, bad)
    told.tell(0, state, bad)
    again = Study(LOSS, SPACE, None, 0)
    again.restore(told.record)
    for study in (told.study, again):
        (trial,) = study.trials
        assert (trial.state, trial.values) == (optuna.trial.TrialState.FAIL, None)
        assert trial.intermediate_values == {1: 3.0}


def test_trial_without_a_value_is_fail() -> None:
    study = Study(LOSS, SPACE, None, 0)
    study.ask()
    study.tell(0, COMPLETE, None)
    assert study.trials[0].state is optuna.trial.TrialState.FAIL


def test_trial_cannot_end_twice() -> None:
    study = Study(LOSS, SPACE, None, 0)
    study.ask()
    study.tell(0, FAIL, None)
    with pytest.raises(KeyError):
        study.tell(0, COMPLETE, 1.0)


# --- resume -------------------------------------------------------------------------------------


def seen(trial: optuna.trial.FrozenTrial) -> tuple[Any, ...]:
    return (
        trial.number,
        trial.state,
        trial.values,
        trial.params,
        trial.distributions,
        trial.intermediate_values if trial.state.is_finished() else None,
    )


@pytest.mark.parametrize("sampler", [RANDOM, TPE, None])
@pytest.mark.parametrize("cut", [0, 1, 7, 23])
@pytest.mark.parametrize("direction", list(Direction))
def test_restored_study_goes_on_as_if_it_had_not_stopped(
    sampler: Any, cut: int, direction: Direction
) -> None:
    objective = Objective("loss", direction)
    uninterrupted = Told(Study(objective, SPACE, sampler, 5), SPACE, objective)
    play(uninterrupted, cut)
    restored = Told(Study(objective, SPACE, sampler, 5), SPACE, objective)
    restored.study.restore(uninterrupted.record)
    assert list(map(seen, restored.study.trials)) == list(map(seen, uninterrupted.study.trials))
    restored.record.trials.update(uninterrupted.record.trials)
    fresh = Told(Study(objective, SPACE, sampler, 5), SPACE, objective)
    assert play(restored, 12) == play(fresh, cut + 12)[cut:]


def test_running_trial_goes_on_after_a_restore() -> None:
    before = Told(Study(LOSS, SPACE, None, 0), SPACE)
    before.ask()
    before.report(0, 1, 3.0)
    after = Study(LOSS, SPACE, None, 0)
    after.restore(before.record)
    after.report(0, 2, 2.0)
    after.tell(0, PRUNED, None)
    (trial,) = after.trials
    assert trial.intermediate_values == {1: 3.0, 2: 2.0}
    assert trial.value == 2.0


def test_restored_grid_goes_on_at_the_next_point() -> None:
    before = Told(Study(LOSS, GRID, None, 0), GRID)
    for _ in range(4):
        before.ask()
    after = Study(LOSS, GRID, None, 0)
    after.restore(before.record)
    assert [after.ask().overrides for _ in range(2)] == [("a=3", "b=x"), ("a=3", "b=y")]
    assert after.is_exhausted


def test_ledger_with_a_gap_in_its_numbers_is_refused() -> None:
    before = Told(Study(LOSS, SPACE, None, 0), SPACE)
    for _ in range(3):
        before.ask()
    del before.record.trials[1]
    with pytest.raises(LedgerError, match="no trial 1 before trial 2"):
        Study(LOSS, SPACE, None, 0).restore(before.record)


def test_ledger_of_another_space_is_refused() -> None:
    before = Told(Study(LOSS, SPACE, None, 0), SPACE)
    before.ask()
    with pytest.raises(ConfigError, match="Start a new study"):
        Study(LOSS, GRID, None, 0).restore(before.record)


def test_sampler_with_a_state_of_its_own_says_that_it_starts_anew(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = Told(Study(LOSS, SPACE, None, 0), SPACE)
    before.ask()
    Study(LOSS, SPACE, {"_target_": "optuna.samplers.NSGAIISampler"}, 0).restore(before.record)
    assert "starts anew" in caplog.text


# --- cost and noise -----------------------------------------------------------------------------


def fastest(step: Callable[[], None]) -> float:
    durations = []
    for _ in range(20):
        started = time.perf_counter()
        step()
        durations.append(time.perf_counter() - started)
    return min(durations)


def test_random_trial_costs_little_however_many_there_are() -> None:
    study = Study(LOSS, SPACE, RANDOM, 0)

    def trial() -> None:
        number = study.ask().number
        for resource in (1, 2, 3):
            study.report(number, resource, 1.0)
        study.tell(number, COMPLETE, 1.0)

    for _ in range(1000):
        trial()
    assert fastest(trial) < 0.005


def test_optuna_is_silent(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO):
        play(Told(Study(LOSS, SPACE, None, 0), SPACE), 12)
    assert caplog.text == ""
    assert capfd.readouterr().err == ""
