"""A sweep as an Optuna study."""

from __future__ import annotations

import dataclasses
import math

import optuna
import pytest
from tests.fakes import fake_events, fake_sweep, replay

from heats.analysis.study import study_from_record
from heats.trial import TrialAsked, TrialEnded, TrialState


def test_study_has_every_trial_with_its_curve_and_times() -> None:
    record = fake_sweep()
    study = study_from_record(record)
    best = record.best()
    assert best is not None
    assert len(study.trials) == 40
    assert study.best_trial.number == best.number
    assert study.best_value == best.value
    states = [trial.state.name for trial in study.trials]
    assert states == [record.trials[number].state.value for number in range(40)]
    frozen = study.trials[best.number]
    assert list(frozen.intermediate_values) == list(range(1, 28))
    assert frozen.duration is not None
    assert best.ended_s is not None
    assert best.started_s is not None
    assert frozen.duration.total_seconds() == pytest.approx(best.ended_s - best.started_s)


def test_declared_distributions_are_kept() -> None:
    distributions = study_from_record(fake_sweep()).trials[0].distributions
    lr = distributions["lr"]
    assert isinstance(lr, optuna.distributions.FloatDistribution)
    assert lr.log
    assert lr.high == 1.0


def test_values_outside_of_the_declared_distribution_are_taken_as_they_are() -> None:
    events = [
        dataclasses.replace(event, params={**event.params, "lr": 7.0, "batch_size": 128})
        if isinstance(event, TrialAsked)
        else event
        for event in fake_events()
    ]
    study = study_from_record(replay(events))
    assert study.best_params["lr"] == 7.0
    assert study.best_params["batch_size"] == 128


def test_pruned_trial_is_pruned_with_its_last_value() -> None:
    record = fake_sweep()
    study = study_from_record(record)
    pruned = next(t for t in study.trials if t.state is optuna.trial.TrialState.PRUNED)
    assert pruned.value == list(pruned.intermediate_values.values())[-1]


def test_complete_trial_without_finite_value_becomes_fail() -> None:
    events = [
        dataclasses.replace(event, state=TrialState.COMPLETE, value=math.nan)
        if isinstance(event, TrialEnded) and event.trial == 0
        else event
        for event in fake_events()
    ]
    assert study_from_record(replay(events)).trials[0].state is optuna.trial.TrialState.FAIL


def test_chosen_trials_keep_their_sweep_numbers_as_attribute() -> None:
    record = fake_sweep()
    study = study_from_record(record, [record.trials[9], record.trials[3]], names={"lr": "rate"})
    assert [trial.user_attrs["trial_number"] for trial in study.trials] == [3, 9]
    assert "rate" in study.trials[0].params


def test_new_study_is_not_announced(capsys: pytest.CaptureFixture[str]) -> None:
    study_from_record(fake_sweep(num_trials=1))
    assert capsys.readouterr().err == ""
