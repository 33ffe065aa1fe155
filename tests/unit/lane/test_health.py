"""Hangs are told from slow steps, and uneven reports from hangs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from heats.config import FailureConf
from heats.lane.health import (
    TREATMENTS,
    Budget,
    Patience,
    ends_lane,
    fault_of,
    fault_of_group,
    fault_of_ranks,
    hang,
)
from heats.lane.messages import RankPulse, TurnEnded
from heats.trial import Ending, Fault

if TYPE_CHECKING:
    from collections.abc import Callable

PATIENCE = Patience(report_s=30, other_s=600)


def pulses(*ranks: tuple[float, bool]) -> dict[int, RankPulse]:
    return {
        rank: RankPulse(rank, 1, idle_s, in_report, f"train.py:{rank + 1} in step")
        for rank, (idle_s, in_report) in enumerate(ranks)
    }


def ended(*ranks: int) -> dict[int, TurnEnded]:
    return {rank: TurnEnded(1, rank, Ending.RETURNED, None, None) for rank in ranks}


@pytest.mark.parametrize(
    ("ranks", "left"),
    [
        ([(0, False)], ()),
        ([(599, False)], ()),
        ([(29, True), (29, False)], ()),
        ([(500, True), (0, False)], ()),  # Rank 1 is in a slow step: rank 0 may wait.
        ([(500, True), (29, True)], ()),
        ([(0, False), (0, False)], (1,)),
    ],
)
def test_turn_in_which_something_moves_goes_on(
    ranks: list[tuple[float, bool]], left: tuple[int, ...]
) -> None:
    assert hang(len(ranks), pulses(*ranks), ended(*left), PATIENCE) is None


def test_rank_that_has_not_spoken_is_not_idle() -> None:
    assert hang(2, pulses((900, True)), {}, PATIENCE) is None
    assert hang(1, pulses((900, True)), ended(0), PATIENCE) is None


def test_rank_that_waits_in_a_report_that_another_never_makes_fails_the_trial() -> None:
    outcome = hang(2, pulses((31, True), (40, False)), {}, PATIENCE)
    assert outcome is not None
    assert outcome.fault is Fault.uneven_reports
    assert outcome.error is not None
    assert "Rank 0 waits in ray.train.report, while rank 1 is elsewhere" in outcome.error
    assert "rank 1 is at train.py:2 in step" in outcome.error


def test_rank_that_waits_in_a_report_after_another_returned_fails_the_trial() -> None:
    outcome = hang(2, pulses((31, True), (40, False)), ended(1), PATIENCE)
    assert outcome is not None
    assert outcome.fault is Fault.uneven_reports
    assert outcome.error is not None
    assert "while rank 1 has returned" in outcome.error


@pytest.mark.parametrize(
    ("ranks", "place"),
    [
        ([(601, False)], "in the train function"),
        ([(601, False), (700, False)], "in the train function"),
        ([(31, True), (32, True)], "in ray.train.report"),
    ],
)
def test_turn_in_which_nothing_moves_is_lost(ranks: list[tuple[float, bool]], place: str) -> None:
    outcome = hang(len(ranks), pulses(*ranks), {}, PATIENCE)
    assert outcome is not None
    assert outcome.fault is Fault.hang
    assert outcome.error is not None
    assert f"hangs {place}" in outcome.error


# --- faults and what follows --------------------------------------------------------------------


def raised(call: Callable[[], object]) -> BaseException:
    with pytest.raises(BaseException) as info:  # noqa: PT011 - what it is, is the question
        call()
    return info.value


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (ValueError("no data"), Fault.error),
        (SystemExit("no data"), Fault.error),
        (RuntimeError("shape (3, 4) does not fit"), Fault.error),
        (KeyboardInterrupt(), Fault.interrupted),
        (raised(lambda: bytearray(1 << 62)), Fault.out_of_memory),
        (raised(lambda: np.zeros(1 << 55)), Fault.out_of_memory),
        (torch.OutOfMemoryError("CUDA out of memory"), Fault.out_of_memory),
        (RuntimeError("CUDA error: device-side assert triggered"), Fault.device_error),
        (RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:1275"), Fault.device_error),
    ],
)
def test_fault_is_told_from_what_was_raised(error: BaseException, fault: Fault) -> None:
    assert fault_of(error) is fault


def test_fault_that_may_have_led_to_the_others_stands_for_all_ranks() -> None:
    assert fault_of_ranks([Fault.error, Fault.out_of_memory, Fault.error]) is Fault.out_of_memory
    assert fault_of_ranks([Fault.error, Fault.device_error]) is Fault.device_error
    assert fault_of_ranks([Fault.error]) is Fault.error


def test_end_of_a_worker_group_tells_want_of_memory_and_preemption() -> None:
    killed = "Task was killed due to the node running low on memory."
    assert fault_of_group(killed, 0) is Fault.oom_killed
    assert fault_of_group("ActorDiedError: connection error code 2", 1) is Fault.oom_killed
    assert fault_of_group("ActorDiedError: the actor was preempted", 0) is Fault.preempted
    left = "The actor's node was terminated expectedly: received SIGTERM"
    assert fault_of_group(left, 0) is Fault.preempted
    assert fault_of_group("ActorDiedError: connection error code 2", 0) is None


def test_every_fault_has_a_treatment() -> None:
    assert set(TREATMENTS) == set(Fault)


def test_only_an_error_in_a_lane_of_one_leaves_the_lane() -> None:
    assert [fault for fault in Fault if not ends_lane(fault, 1)] == [Fault.error]
    assert all(ends_lane(fault, 2) for fault in Fault)


def test_retries_are_charged_to_whose_doing_the_fault_was() -> None:
    conf = FailureConf(max_failures=0, max_retries=2)
    allowed = {
        fault: [TREATMENTS[fault].budget.allows(count, conf) for count in (1, 2, 3, 100)]
        for fault in Fault
    }
    never, twice, ever = [False] * 4, [True, True, False, False], [True] * 4
    assert allowed[Fault.error] == allowed[Fault.out_of_memory] == never
    assert allowed[Fault.uneven_reports] == allowed[Fault.broken_program] == never
    assert allowed[Fault.rank_died] == allowed[Fault.hang] == allowed[Fault.oom_killed] == twice
    assert allowed[Fault.preempted] == allowed[Fault.retired] == ever
    assert Budget.failures.allows(2, FailureConf(max_failures=2))
