"""What a lane does with the reports of a turn while their checkpoints are validated."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.fakes import FakeValidator

from heats.lane.messages import RankReport
from heats.lane.reports import TurnReports
from heats.lane.validation import FAILED, TIMEOUT, VALIDATED, Validated, ValidationTask
from heats.trial import Report

TASK = ValidationTask(b"", (), None, {}, "validation.log")
LONG_S = 5.0


class Turn:
    """A turn's reports, and what was taken of them."""

    def __init__(self, num_ranks: int = 1) -> None:
        self.validator = FakeValidator()
        self._num_ranks, self._index = num_ranks, 0
        self._validated = threading.Semaphore(0)
        self.reports = TurnReports(self.validator, self._validated.release)

    def makes(self, loss: float, checkpoint: str | None = None, *, validated: bool = False) -> None:
        self._index += 1
        task = TASK if validated else None
        metrics = {"loss": loss}
        last = self._num_ranks - 1  # Only the last rank has a checkpoint.
        self.reports.add(
            {
                rank: RankReport(
                    1,
                    self._index,
                    Report(0.0, metrics if rank == 0 else {}, checkpoint if rank == last else None),
                    pickle.dumps(metrics) if rank == 0 else b"",
                    task if rank == last else None,
                )
                for rank in range(self._num_ranks)
            }
        )

    def taken(self) -> list[dict[str, float]]:
        return [report.metrics for report in self.reports.take()]

    def validates(self, uri: str, end: Validated) -> None:
        self.validator.ends(uri, end)
        assert self._validated.acquire(timeout=LONG_S)

    def statuses(self) -> list[str]:
        found = self.reports.checkpoints(is_stopping=False)
        return [each.status for each in found.checkpoints]


@pytest.fixture(params=[1, 2])
def turn(request: pytest.FixtureRequest) -> Turn:
    return Turn(request.param)


def test_report_is_given_out_at_once_where_nothing_is_validated(turn: Turn) -> None:
    turn.makes(0.5, "a")
    assert turn.taken() == [{"loss": 0.5}]
    assert turn.taken() == []
    assert turn.statuses() == ["COMMITTED"]
    assert not turn.reports.is_validating


def test_report_waits_for_its_validation_and_those_behind_it_wait_as_well(turn: Turn) -> None:
    turn.makes(0.5, "a", validated=True)
    turn.makes(0.4)
    assert turn.taken() == []
    assert turn.statuses() == ["PENDING_VALIDATION"]
    turn.validates("a", Validated(VALIDATED, {"valid": 1.0}, pickle.dumps({"valid": 1})))
    assert turn.taken() == [{"loss": 0.5, "valid": 1.0}, {"loss": 0.4}]
    assert turn.statuses() == ["VALIDATED"]
    (checkpoint,) = turn.reports.checkpoints(is_stopping=False).checkpoints
    assert [pickle.loads(part) for part in checkpoint.pickled] == [{"loss": 0.5}, {"valid": 1}]


@pytest.mark.parametrize("status", [FAILED, TIMEOUT])
def test_report_whose_validation_failed_is_given_out_as_it_is(status: str, turn: Turn) -> None:
    turn.makes(0.5, "a", validated=True)
    turn.validates("a", Validated(status))
    assert turn.taken() == [{"loss": 0.5}]
    assert turn.statuses() == [status]


def test_checkpoints_are_validated_one_after_another(turn: Turn) -> None:
    for name in "abc":
        turn.makes(0.5, name, validated=True)
    for index, name in enumerate("abc", 1):
        turn.validates(name, Validated(VALIDATED))
        assert turn.validator.began[:index] == list("abc"[:index])
    assert len(turn.taken()) == 3


def test_cancelled_validation_drops_its_report_and_those_behind_it(turn: Turn) -> None:
    turn.makes(0.6, "a")
    turn.makes(0.5, "b", validated=True)
    turn.makes(0.4, "c", validated=True)
    assert turn.taken() == [{"loss": 0.6}]
    cancelling: Callable[[], None] = turn.reports.cancel
    ThreadPoolExecutor(1).submit(cancelling).result(LONG_S)
    assert turn.taken() == []
    assert not turn.reports.is_validating
    turn.validator.ends("b", Validated(VALIDATED))
    assert turn.taken() == []
