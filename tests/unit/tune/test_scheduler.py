from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from ray.tune.schedulers import TrialScheduler
from tests.fakes import FakeCoordinator, fake_spec

from heats.lane.trainable import OUTCOME, REPORTS
from heats.trial import Ending, Outcome, Report, Verdict
from heats.tune.scheduler import VerdictScheduler

if TYPE_CHECKING:
    from pathlib import Path

REPORT = Report(0.0, {"loss": 0.5})
RETURNED = Outcome(Ending.RETURNED, returned=0.5)
TUNE: Any = None


def trial(number: int = 3, *, error_file: Path | None = None) -> Any:
    return SimpleNamespace(config={"spec": fake_spec(number)}, error_file=error_file)


def test_reports_are_recorded_and_the_trial_goes_on() -> None:
    coordinator = FakeCoordinator([])
    told = VerdictScheduler(coordinator).on_trial_result(
        TUNE, trial(), {REPORTS: [REPORT], OUTCOME: None}
    )
    assert told == TrialScheduler.CONTINUE
    assert coordinator.recorded == [(3, [REPORT])]
    assert coordinator.ended == []


@pytest.mark.parametrize("verdict", list(Verdict))
def test_end_is_told_after_its_last_reports_whatever_the_verdict(verdict: Verdict) -> None:
    coordinator = FakeCoordinator([], verdict=verdict)
    told = VerdictScheduler(coordinator).on_trial_result(
        TUNE, trial(), {REPORTS: [REPORT], OUTCOME: RETURNED}
    )
    assert told == TrialScheduler.STOP
    assert coordinator.recorded == [(3, [REPORT])]
    assert coordinator.ended == [(3, RETURNED)]


def test_trial_that_is_to_stop_has_ended() -> None:
    coordinator = FakeCoordinator([], verdict=Verdict.STOP)
    told = VerdictScheduler(coordinator).on_trial_result(
        TUNE, trial(), {REPORTS: [REPORT], OUTCOME: None}
    )
    assert told == TrialScheduler.STOP
    assert coordinator.ended == [(3, Outcome(Ending.STOPPED))]


@pytest.mark.parametrize("text", ["Traceback ...\nActorDiedError: out of memory\n", "", None])
def test_trial_whose_process_died_is_lost_with_the_reason(tmp_path: Path, text: str | None) -> None:
    path = None
    if text is not None:
        path = tmp_path / "error.txt"
        path.write_text(text, encoding="utf-8")
    coordinator = FakeCoordinator([])
    VerdictScheduler(coordinator).on_trial_error(TUNE, trial(error_file=path))
    ((number, outcome),) = coordinator.ended
    assert (number, outcome.ending) == (3, Ending.LOST)
    last = "ActorDiedError: out of memory" if text else "no message"
    assert outcome.error == f"The process of its lane ended: {last}"


def test_tune_has_nothing_to_save() -> None:
    assert VerdictScheduler(FakeCoordinator([])).__getstate__() == {}
