from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.fakes import fake_spec

from heats.config import Direction, Isolation, LaneConf
from heats.lane.lane import Lane, LaneSettings
from heats.lane.task import TaskRef
from heats.lane.trainable import OUTCOME, REPORTS, LaneTrainable
from heats.trial import Ending, Fault, LaneShape, Objective, Outcome, Report, TrialSpec

if TYPE_CHECKING:
    from collections.abc import Callable

RETURNED = Outcome(Ending.RETURNED, returned=0.5)
RAISED = Outcome.failed(Fault.error, "no data")
LOST = Outcome.failed(Fault.rank_died, "rank 0 went away")
REPORT = Report(0.0, {"loss": 0.5})


class ScriptedLane(Lane):
    """Gives what a test wrote down, and notes what is asked of it."""

    def __init__(self, script: list[tuple[list[Report], Outcome | None]], shape: LaneShape) -> None:
        self._script, self.shape = script, shape
        self.notes: list[Any] = []
        self.stops = True
        self._is_open = True
        self._loss = None

    @property
    def is_new(self) -> bool:
        return not any(isinstance(note, tuple) for note in self.notes)

    @property
    def is_usable(self) -> bool:
        return self._is_open

    def begin(self, spec: TrialSpec) -> None:
        self.notes.append(("begin", spec.number))

    def gather(self) -> tuple[list[Report], Outcome | None]:
        reports, outcome = self._script.pop(0)
        if outcome is LOST:
            self._loss = outcome
        return reports, outcome

    def request_stop(self) -> None:
        self.notes.append("request stop")

    def stop(self) -> bool:
        self.notes.append("stop")
        return self.stops

    def close(self, *, is_broken: bool = False) -> None:
        self._is_open = False
        self.notes.append("kill" if is_broken else "close")


class Lanes:
    """A trainable on scripted lanes; each new lane goes on with the same script."""

    def __init__(self, isolation: Isolation = Isolation.lane, num_workers: int = 1) -> None:
        self._num_workers = num_workers
        self.script: list[tuple[list[Report], Outcome | None]] = []
        self.made: list[ScriptedLane] = []
        self._isolation = isolation

    def trainable(self) -> LaneTrainable:
        class Scripted(LaneTrainable):
            make_lane: Callable[[LaneSettings, LaneShape], Lane] = staticmethod(self._make)

        trainable: LaneTrainable = Scripted.__new__(Scripted)  # Tune's own set-up needs Ray.
        trainable.setup({**self.config(0), "shape": self.spec(0).shape})
        trainable.reset_config(self.config(0))
        return trainable

    def spec(self, number: int, num_workers: int | None = None) -> TrialSpec:
        return fake_spec(number, num_workers=num_workers or self._num_workers)

    def config(self, number: int, num_workers: int | None = None) -> dict[str, Any]:
        settings = LaneSettings(
            sweep_id="heats-1",
            task=TaskRef("train.py", None),
            objective=Objective("loss", Direction.minimize),
            pace=None,
            lane=LaneConf(isolation=self._isolation),
            storage_path="lanes",
            tracking_uri="sqlite:///mlflow.db",
            seed=0,
            system_interval_s=None,
        )
        return {"spec": self.spec(number, num_workers), "settings": settings}

    def _make(self, settings: LaneSettings, shape: LaneShape) -> Lane:
        self.made.append(ScriptedLane(self.script, shape))
        return self.made[-1]


def step(reports: list[Report], outcome: Outcome | None) -> dict[str, Any]:
    return {REPORTS: reports, OUTCOME: outcome}


def test_lane_serves_trial_after_trial() -> None:
    lanes = Lanes()
    lanes.script += [([REPORT], None), ([], RETURNED), ([], RETURNED)]
    trainable = lanes.trainable()
    assert trainable.step() == step([REPORT], None)
    assert trainable.step() == step([], RETURNED)
    assert trainable.reset_config(lanes.config(1))
    assert trainable.step()[OUTCOME] == RETURNED
    trainable.cleanup()
    (lane,) = lanes.made
    assert lane.notes == [("begin", 0), "stop", ("begin", 1), "stop", "close"]


def test_lost_lane_is_killed_and_the_next_trial_gets_another() -> None:
    lanes = Lanes()
    lanes.script += [([], LOST), ([], RETURNED)]
    trainable = lanes.trainable()
    assert trainable.step() == step([], LOST)
    trainable.reset_config(lanes.config(1))
    assert trainable.step()[OUTCOME] == RETURNED
    assert [lane.notes[:2] for lane in lanes.made] == [[("begin", 0), "kill"], [("begin", 1)]]


def test_lane_of_one_worker_goes_on_after_an_error_of_user_code() -> None:
    lanes = Lanes()
    lanes.script += [([REPORT], RAISED), ([], RETURNED)]
    trainable = lanes.trainable()
    assert trainable.step() == step([REPORT], RAISED)
    trainable.reset_config(lanes.config(1))
    trainable.step()
    (lane,) = lanes.made
    assert lane.notes == [("begin", 0), "stop", ("begin", 1)]


def test_lane_of_two_workers_is_left_after_an_error_of_user_code() -> None:
    lanes = Lanes(num_workers=2)
    lanes.script += [([REPORT], RAISED), ([], RETURNED)]
    trainable = lanes.trainable()
    assert trainable.step() == step([REPORT], RAISED)
    trainable.reset_config(lanes.config(1))
    trainable.step()
    assert lanes.made[0].notes == [("begin", 0), "close", "stop"]
    assert lanes.made[1].notes == [("begin", 1)]


def test_rank_that_does_not_stop_in_time_is_killed_and_the_key_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lanes = Lanes()
    lanes.script += [([REPORT], None), ([], RETURNED)]
    trainable = lanes.trainable()
    trainable.step()
    lanes.made[0].stops = False
    trainable.reset_config(lanes.config(1))
    assert "lane.stop_grace_s=5" in caplog.text
    trainable.step()
    assert lanes.made[0].notes == [("begin", 0), "stop", "kill"]
    assert lanes.made[1].notes == [("begin", 1)]


def test_isolated_trial_has_a_lane_of_its_own() -> None:
    lanes = Lanes(Isolation.process)
    lanes.script += [([], RETURNED), ([], RETURNED)]
    trainable = lanes.trainable()
    trainable.step()
    trainable.reset_config(lanes.config(1))
    trainable.step()
    assert [lane.notes for lane in lanes.made] == [[("begin", 0), "stop", "close"], [("begin", 1)]]


def test_turn_is_ended_without_waiting_for_it() -> None:
    lanes = Lanes()
    lanes.script += [([], None), ([REPORT], Outcome(Ending.STOPPED))]
    trainable = lanes.trainable()
    trainable.step()
    trainable.end_turn()
    assert trainable.step() == step([REPORT], Outcome(Ending.STOPPED))
    assert lanes.made[0].notes == [("begin", 0), "request stop"]


def test_trial_of_another_shape_gets_a_lane_of_it() -> None:
    lanes = Lanes()
    lanes.script += [([], RETURNED), ([], RETURNED), ([], RETURNED)]
    trainable = lanes.trainable()
    trainable.step()
    for number, num_workers in ((1, 2), (2, 2)):
        trainable.reset_config(lanes.config(number, num_workers))
        trainable.step()
    assert [lane.shape.num_workers for lane in lanes.made] == [1, 2]
    assert lanes.made[0].notes[-1] == "close"
