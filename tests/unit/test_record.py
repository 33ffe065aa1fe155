from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
from tests.fakes import fake_start, fake_sweep

from heats.config import Direction
from heats.record import SweepRecord, config_file
from heats.trial import (
    AttemptLost,
    CheckpointDropped,
    Event,
    Judged,
    Objective,
    Reported,
    RunCreated,
    SweepEnded,
    SweepResumed,
    SystemSampled,
    TrialAsked,
    TrialEnded,
    TrialState,
    TurnStarted,
    Verdict,
)

if TYPE_CHECKING:
    from pathlib import Path

COMPLETE, PRUNED, FAIL = TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL
LOSS = Objective("loss", Direction.minimize)


def asked(number: int = 0) -> TrialAsked:
    return TrialAsked(time_s=1.0, trial=number, params={"lr": 0.1}, overrides=("lr=0.1",))


def reported(index: int, loss: float | None, checkpoint: str | None = None) -> Reported:
    metrics = {} if loss is None else {"loss": loss}
    return Reported(
        time_s=2.0, trial=0, index=index, resource=index, metrics=metrics, checkpoint=checkpoint
    )


def ended(number: int, state: TrialState, value: float | None) -> TrialEnded:
    return TrialEnded(time_s=9.0, trial=number, state=state, value=value)


def after(*events: Event) -> SweepRecord:
    record = SweepRecord(fake_start(objective=LOSS, time_s=0.5))
    for event in events:
        record.apply(event)
    return record


def test_trial_is_what_its_events_say() -> None:
    judged = Judged(time_s=3.0, trial=0, rung=1, resource=1, value=0.5, verdict=Verdict.CONTINUE)
    run = RunCreated(time_s=1.0, trial=0, run_id="r0", artifact_dir="artifacts")
    record = after(
        asked(),
        run,
        TurnStarted(time_s=1.5, trial=0, attempt=0),
        reported(1, 0.5),
        judged,
        AttemptLost(time_s=4.0, trial=0, attempt=0, reason="gone"),
        TurnStarted(time_s=5.0, trial=0, attempt=1),
        SystemSampled(time_s=5.5, trial=0, step=0, metrics={"system/x": 1.0}),
        reported(2, 0.4),
        TrialEnded(time_s=6.0, trial=0, state=FAIL, value=0.4, error="no data", log="log"),
    )
    trial = record.trials[0]
    assert (trial.params, trial.overrides) == ({"lr": 0.1}, ("lr=0.1",))
    assert (trial.run_id, trial.artifact_dir) == ("r0", "artifacts")
    assert (trial.asked_s, trial.started_s, trial.ended_s) == (1.0, 1.5, 6.0)
    assert trial.attempts == 2
    assert trial.reports == [reported(1, 0.5), reported(2, 0.4)]
    assert trial.last == reported(2, 0.4)
    assert trial.judged == [judged]
    assert (trial.state, trial.value, trial.error, trial.log) == (FAIL, 0.4, "no data", "log")
    assert record.last_time_s == 6.0


def test_new_trial_runs_and_has_nothing_yet() -> None:
    trial = after(asked()).trials[0]
    assert trial.state is TrialState.RUNNING
    assert (trial.last, trial.last_checkpoint, trial.best_report(LOSS)) == (None, None, None)


def test_run_without_a_trial_is_the_sweeps() -> None:
    record = after(RunCreated(time_s=1.0, trial=None, run_id="p", artifact_dir="top"))
    assert (record.run_id, record.artifact_dir) == ("p", "top")


def test_best_report_is_finite_and_the_earliest_of_equals() -> None:
    losses = [None, 0.5, math.nan, 0.2, -math.inf, 0.2, 0.3]
    trial = after(asked(), *(reported(i, loss) for i, loss in enumerate(losses, 1))).trials[0]
    assert trial.best_report(LOSS) == reported(4, 0.2)


def test_dropped_checkpoint_is_neither_best_nor_newest() -> None:
    record = after(
        asked(),
        reported(1, 0.1, "a"),
        reported(2, 0.3, "b"),
        reported(3, 0.2, "c"),
        reported(4, 0.4, "d"),
    )
    trial = record.trials[0]
    assert trial.best_checkpoint(LOSS) == reported(1, 0.1, "a")
    assert trial.last_checkpoint == reported(4, 0.4, "d")
    for checkpoint in ("a", "d", "unknown"):
        record.apply(CheckpointDropped(time_s=5.0, trial=0, checkpoint=checkpoint))
    assert trial.best_checkpoint(LOSS) == reported(3, 0.2, "c")
    assert trial.last_checkpoint == reported(3, 0.2, "c")
    assert len(trial.reports) == 4


def test_best_trial_is_complete_and_the_earliest_of_equals() -> None:
    ends = [(FAIL, 0.01), (PRUNED, 0.02), (COMPLETE, 0.3), (COMPLETE, 0.2), (COMPLETE, 0.2)]
    record = after(*(asked(number) for number in range(6)))
    assert record.best() is None
    for number, (state, value) in enumerate(ends):
        record.apply(ended(number, state, value))
    best = record.best()
    assert best is not None
    assert best.number == 3


def test_best_trial_of_a_score_is_the_largest() -> None:
    record = SweepRecord(fake_start(objective=Objective("score", Direction.maximize)))
    for number, value in enumerate([0.1, 0.9, math.inf, None]):
        record.apply(asked(number))
        record.apply(ended(number, COMPLETE, value))
    best = record.best()
    assert best is not None
    assert best.number == 1


def test_counts_have_every_state() -> None:
    counts = after(asked(0), asked(1), ended(0, PRUNED, None)).counts()
    assert counts == {TrialState.RUNNING: 1, COMPLETE: 0, PRUNED: 1, FAIL: 0}
    assert sum(fake_sweep(40).counts().values()) == 40


def test_resumed_sweep_has_not_ended() -> None:
    end = SweepEnded(time_s=5.0, reason="Ctrl-C", finished=False)
    record = after(end)
    assert record.ended == end
    record.apply(SweepResumed(time_s=6.0, pid=1))
    assert record.ended is None


def test_event_of_a_trial_that_was_never_asked_is_an_error() -> None:
    with pytest.raises(KeyError):
        after(reported(1, 0.5))


def test_times_leave_out_the_pauses_between_drivers_and_the_start_of_workers() -> None:
    sampled = [SystemSampled(time_s=at, trial=0, step=0, metrics={}) for at in (21.0, 25.0, 105.0)]
    record = after(
        asked(),
        TurnStarted(time_s=11.0, trial=0, attempt=0),
        *sampled[:2],
        SweepEnded(time_s=26.0, reason="Ctrl-C", finished=False),
        SweepResumed(time_s=100.5, pid=1),
        TurnStarted(time_s=101.0, trial=0, attempt=1),
        sampled[2],
    )
    trial = record.trials[0]
    assert trial.spans == [(21.0, 25.0), (105.0, 105.0)]
    assert (trial.duration_s(), trial.duration_s(107.0)) == (4.0, 6.0)
    record.apply(TrialEnded(time_s=108.0, trial=0, state=COMPLETE, value=0.1))
    assert (trial.duration_s(), trial.duration_s(999.0)) == (7.0, 7.0)
    assert record.wall_s == (26.0 - 0.5) + (108.0 - 100.5)


def test_trial_that_ended_before_its_driver_could_say_so_lasted_no_longer() -> None:
    record = after(
        asked(),
        TurnStarted(time_s=1.5, trial=0, attempt=0),
        reported(1, 0.5),
        SweepResumed(time_s=100.5, pid=1),
        TrialEnded(time_s=101.0, trial=0, state=PRUNED, value=0.5),
    )
    assert record.trials[0].duration_s() == 0.5


def test_pause_is_no_age_of_a_trial_that_waits_to_go_on() -> None:
    record = after(
        asked(),
        TurnStarted(time_s=1.5, trial=0, attempt=0),
        reported(1, 0.5),
        SweepEnded(time_s=3.0, reason="Ctrl-C", finished=False),
        SweepResumed(time_s=100.5, pid=1),
    )
    assert record.trials[0].duration_s(200.0) == 0.5
    record.apply(TurnStarted(time_s=200.0, trial=0, attempt=1))
    assert record.trials[0].duration_s(203.0) == 3.5
    record.apply(AttemptLost(time_s=204.0, trial=0, attempt=1, reason="gone"))
    assert record.trials[0].duration_s(300.0) == 4.5


def test_config_of_a_trial_is_in_its_job_folder_else_in_the_sweeps_own(tmp_path: Path) -> None:
    sweep_dir, job_dir = tmp_path / "sweep", tmp_path / "multirun" / "3"
    own = sweep_dir / "3" / ".hydra" / "config.yaml"
    assert config_file(sweep_dir, 3, None) == config_file(sweep_dir, 3, str(job_dir)) == own
    elsewhere = job_dir / ".hydra" / "config.yaml"
    elsewhere.parent.mkdir(parents=True)
    elsewhere.touch()
    assert config_file(sweep_dir, 3, str(job_dir)) == elsewhere
