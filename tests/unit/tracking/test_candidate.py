from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from tests.fakes import fake_events, fake_start, fake_sweep, replay

from heats.config import Direction
from heats.errors import ConfigError, PromotionRefusedError
from heats.record import SweepRecord
from heats.tracking.candidate import candidate_of, choose_trial
from heats.trial import Event, Objective, Reported, TrialEnded, TrialState


def _with_files(record: SweepRecord, number: int, folder: Path) -> SweepRecord:
    """The record with the checkpoints of a trial where they are: in `folder`."""
    trial = record.trials[number]
    found: dict[str, Reported] = {}
    for name, report in trial.checkpoints.items():
        path = folder / Path(name).name
        path.mkdir()
        (path / "weights").write_text("1")
        found[str(path)] = dataclasses.replace(report, checkpoint=str(path))
    trial.checkpoints = found
    return record


def test_best_trial_is_chosen() -> None:
    record = fake_sweep()
    best = record.best()
    assert best is not None
    assert choose_trial(record, None) is best
    assert choose_trial(record, best.number) is best


def test_trial_that_failed_is_refused() -> None:
    with pytest.raises(PromotionRefusedError, match="Trial 7 of digits is failed"):
        choose_trial(fake_sweep(), 7)


def test_unknown_trial_is_bad_input() -> None:
    with pytest.raises(ConfigError, match="no trial 40; it has 40, numbered from 0"):
        choose_trial(fake_sweep(), 40)


def test_sweep_without_a_complete_trial_says_what_it_has() -> None:
    events: list[Event] = []
    for event in fake_events(3):
        is_end = isinstance(event, TrialEnded)
        events.append(
            dataclasses.replace(event, state=TrialState.PRUNED)
            if is_end and isinstance(event, TrialEnded)
            else event
        )
    with pytest.raises(PromotionRefusedError, match="trials: 3 pruned"):
        choose_trial(replay(events), None)


def test_candidate_has_the_value_of_its_own_report(tmp_path: Path) -> None:
    record = fake_sweep()
    trial = choose_trial(record, None)
    _with_files(record, trial.number, tmp_path)
    candidate = candidate_of(record, trial, "run")
    report = trial.best_checkpoint(record.objective)
    assert report is not None
    assert candidate.value == report.metrics["val_loss"]
    assert candidate.checkpoint == report.checkpoint
    assert candidate.tags()["heats.value"] == repr(candidate.value)


def test_candidate_of_a_returned_objective_is_the_last_checkpoint(tmp_path: Path) -> None:
    events = fake_events()
    events[0] = fake_start(objective=Objective(None, Direction.minimize))
    record = replay(events)
    trial = choose_trial(record, None)
    _with_files(record, trial.number, tmp_path)
    candidate = candidate_of(record, trial, "run")
    assert candidate.value == trial.value
    assert trial.last_checkpoint is not None
    assert candidate.checkpoint == trial.last_checkpoint.checkpoint


def test_checkpoint_whose_files_are_gone_is_refused() -> None:
    record = fake_sweep()
    with pytest.raises(PromotionRefusedError, match="is gone: no files in"):
        candidate_of(record, choose_trial(record, None), "run")


def test_trial_whose_checkpoints_were_dropped_names_the_setting() -> None:
    record = fake_sweep()
    trial = choose_trial(record, None)
    trial.checkpoints.clear()
    with pytest.raises(PromotionRefusedError, match=r"checkpoint\.keep_best"):
        candidate_of(record, trial, "run")
