from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from ray.tune.schedulers import TrialScheduler
from tests.fakes import FakeCoordinator, fake_spec

from heats.lane.trainable import OUTCOME, REPORTS
from heats.trial import Ending, Fault, Outcome, Report, Verdict
from heats.tune.scheduler import VerdictScheduler

if TYPE_CHECKING:
    from pathlib import Path

REPORT = Report(0.0, {"loss": 0.5})
RETURNED = Outcome(Ending.RETURNED, returned=0.5)


class Controller:
    """What the scheduler sees of Tune: notes which trials' turns it ended."""

    def __init__(self) -> None:
        self.ended: list[int] = []
        self._resetting_trials: list[Any] = []

    def _trial_task_failure(self, trial: Any, exception: Exception) -> None:
        pass

    def _schedule_trial_task(self, trial: Any, method: str, *, on_error: Any) -> None:
        assert on_error == self._trial_task_failure
        assert method == "end_turn"
        self.ended.append(trial.config["spec"].number)


TUNE: Any = Controller()


def no_death() -> None:
    raise AssertionError


def scheduler(coordinator: FakeCoordinator) -> VerdictScheduler:
    return VerdictScheduler(coordinator, lambda *_: None, no_death)


def trial(number: int = 3, *, error_file: Path | None = None) -> Any:
    return SimpleNamespace(
        trial_id=f"trial-{number}", config={"spec": fake_spec(number)}, error_file=error_file
    )


def step(reports: list[Report], outcome: Outcome | None) -> dict[str, Any]:
    return {REPORTS: reports, OUTCOME: outcome}


def test_reports_are_recorded_and_the_trial_goes_on() -> None:
    coordinator = FakeCoordinator([])
    told = scheduler(coordinator).on_trial_result(TUNE, trial(), step([REPORT], None))
    assert told == TrialScheduler.CONTINUE
    assert coordinator.recorded == [(3, [REPORT])]
    assert coordinator.ended == []


@pytest.mark.parametrize("verdict", list(Verdict))
def test_end_is_told_after_its_last_reports_whatever_the_verdict(verdict: Verdict) -> None:
    coordinator = FakeCoordinator([], verdict=verdict)
    told = scheduler(coordinator).on_trial_result(TUNE, trial(), step([REPORT], RETURNED))
    assert told == TrialScheduler.STOP
    assert coordinator.recorded == [(3, [REPORT])]
    assert coordinator.ended == [(3, RETURNED)]


def test_trial_that_is_to_stop_has_ended_and_its_lane_knows_at_once() -> None:
    coordinator = FakeCoordinator([], verdict=Verdict.STOP)
    tune: Any = Controller()
    told = scheduler(coordinator).on_trial_result(tune, trial(), step([REPORT], None))
    assert told == TrialScheduler.STOP
    assert coordinator.ended == [(3, Outcome(Ending.STOPPED))]
    assert tune.ended == [3]


def test_trial_of_a_driver_that_leaves_goes_on_to_its_next_report() -> None:
    coordinator = FakeCoordinator([], verdict=Verdict.LEAVE)
    own = scheduler(coordinator)
    tune: Any = Controller()
    told = own.on_trial_result(tune, trial(), step([], None))
    assert told == TrialScheduler.CONTINUE
    assert tune.ended == [3]
    last = step([REPORT], Outcome(Ending.STOPPED))
    assert own.on_trial_result(tune, trial(), last) == TrialScheduler.STOP
    assert coordinator.recorded[-1] == (3, [REPORT])
    assert coordinator.ended == [(3, Outcome(Ending.STOPPED))]
    assert tune.ended == [3]


@pytest.mark.parametrize("text", ["Traceback ...\nActorDiedError: out of memory\n", "", None])
def test_trial_whose_process_died_is_lost_with_the_reason(tmp_path: Path, text: str | None) -> None:
    path = None
    if text is not None:
        path = tmp_path / "error.txt"
        path.write_text(text, encoding="utf-8")
    coordinator = FakeCoordinator([])
    deaths: list[str] = []
    own = VerdictScheduler(coordinator, lambda *_: None, lambda: deaths.append("lane"))
    own.on_trial_error(TUNE, trial(error_file=path))
    assert deaths == ["lane"]
    ((number, outcome),) = coordinator.ended
    assert (number, outcome.fault) == (3, Fault.lane_died)
    last = "ActorDiedError: out of memory" if text else "no message"
    assert outcome.error == f"The process of its lane ended: {last}"


def test_tune_has_nothing_to_save() -> None:
    assert scheduler(FakeCoordinator([])).__getstate__() == {}


def test_trial_whose_lane_died_before_it_came_is_not_charged() -> None:
    coordinator = FakeCoordinator([])
    own = VerdictScheduler(coordinator, lambda *_: None, lambda: None)
    controller: Any = Controller()
    controller._resetting_trials = [coming := trial(3)]
    own.on_trial_error(controller, coming)
    own.on_trial_error(controller, trial(4))
    assert [outcome.fault for _, outcome in coordinator.ended] == [Fault.retired, Fault.lane_died]
