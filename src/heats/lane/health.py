"""What went wrong, and what follows: the one place where that is decided.

A fault is told by a rank from an exception (`fault_of`), by the lane from its ranks' signs of life
(`hang`), or from how its worker group ended (`fault_of_group`). `TREATMENTS` says what it ends, and
whether the trial goes on from its newest checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from heats.trial import Fault, Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from heats.config import FailureConf
    from heats.lane.messages import RankPulse, TurnEnded


class Budget(Enum):
    """What another attempt after a fault is charged to."""

    failures = "failure.max_failures"
    """The trial's own doing: what it did once it will most likely do again."""
    retries = "failure.max_retries"
    """Not the trial's doing, or not certainly."""
    free = "nothing"

    def allows(self, count: int, conf: FailureConf) -> bool:
        """Whether a trial may start again after `count` faults that are charged to this."""
        limits = {Budget.failures: conf.max_failures, Budget.retries: conf.max_retries}
        return self not in limits or count <= limits[self]


@dataclass(frozen=True, slots=True)
class Treatment:
    """What follows a fault.

    `ends_lane`: whether the worker group cannot be trusted with another trial. A lane with several
    workers ends with every fault: the others may wait in a collective that one of them left.
    """

    budget: Budget
    ends_lane: bool = True


TREATMENTS = {
    Fault.error: Treatment(Budget.failures, ends_lane=False),
    Fault.out_of_memory: Treatment(Budget.failures),
    Fault.uneven_reports: Treatment(Budget.failures),
    Fault.broken_program: Treatment(Budget.failures),
    Fault.device_error: Treatment(Budget.retries),
    Fault.oom_killed: Treatment(Budget.retries),
    Fault.rank_died: Treatment(Budget.retries),
    Fault.lane_died: Treatment(Budget.retries),
    Fault.hang: Treatment(Budget.retries),
    Fault.start_timeout: Treatment(Budget.retries),
    Fault.interrupted: Treatment(Budget.retries),
    Fault.preempted: Treatment(Budget.free),
    Fault.retired: Treatment(Budget.free),
}


def ends_lane(fault: Fault, num_workers: int) -> bool:
    """Whether a lane with so many workers ends with a fault, or only its turn."""
    return num_workers > 1 or TREATMENTS[fault].ends_lane


# --- telling faults -------------------------------------------------------------------------------

_DEVICE_ERRORS = "CUDA error", "CUDA driver error", "NCCL error", "CUDNN_STATUS", "CUBLAS_STATUS"


_PREEMPTIONS = "preempted", "node was terminated expectedly"
"""How Ray says that a node was drained, or told to go."""


def fault_of(error: BaseException) -> Fault:
    """The fault behind what a task function raised."""
    import torch
    import torch.distributed as dist

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return Fault.out_of_memory
    if isinstance(error, KeyboardInterrupt):
        return Fault.interrupted
    if isinstance(error, torch.AcceleratorError | dist.DistBackendError):
        return Fault.device_error
    if isinstance(error, RuntimeError) and any(text in str(error) for text in _DEVICE_ERRORS):
        return Fault.device_error
    return Fault.error


def fault_of_ranks(faults: Iterable[Fault]) -> Fault:
    """The fault of a turn whose ranks raised: the one that may have led to the others."""
    first = Fault.out_of_memory, Fault.device_error, Fault.interrupted
    return min(faults, key=lambda each: first.index(each) if each in first else len(first))


def fault_of_group(error: str, num_oom_kills: int) -> Fault | None:
    """The fault behind the end of a worker group; None where it tells nothing.

    Args:
        error: What Ray says of it.
        num_oom_kills: How many processes of this node the kernel ended for want of memory since
            the group started.
    """
    if "node running low on memory" in error or num_oom_kills > 0:
        return Fault.oom_killed
    return Fault.preempted if any(text in error for text in _PREEMPTIONS) else None


def num_oom_kills() -> int:
    """How many processes the kernel of this machine has ended for want of memory; 0: unknown."""
    try:
        with open("/proc/vmstat", encoding="ascii") as file:
            counts = dict(line.split() for line in file)
    except (OSError, ValueError):
        return 0
    return int(counts.get("oom_kill", 0))


# --- hangs ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Patience:
    """How long ranks may be idle, in seconds.

    `report_s`: while one of them waits in a report or has ended its turn. `other_s`: elsewhere,
    which may be a slow disk or network.
    """

    report_s: float
    other_s: float


def hang(
    num_workers: int,
    pulses: Mapping[int, RankPulse],
    ended: Mapping[int, TurnEnded],
    patience: Patience,
) -> Outcome | None:
    """The end of a turn that will not end by itself; None while it may go on.

    Uneven reports where the ranks do not call `ray.train.report` equally often, which the next
    attempt would do again; a hang where they are stuck for no reason that can be seen.

    Args:
        num_workers: Ranks of the lane.
        pulses: The last one of each rank in this turn.
        ended: Ranks that have left the turn.
        patience: How long they may be idle.
    """
    left = [rank for rank in range(num_workers) if rank not in ended]
    if not left or any(rank not in pulses for rank in left):
        return None
    idle_s = min(pulses[rank].idle_s for rank in left)
    reporting = [rank for rank in left if pulses[rank].in_report]
    others = [rank for rank in left if rank not in reporting]
    if idle_s < (patience.report_s if reporting or ended else patience.other_s):
        return None
    places = "\n".join(f"rank {rank} is at {pulses[rank].place}" for rank in left)
    idle = f"for {idle_s:.0f} s nothing has moved"
    if reporting and (others or ended):
        missing = ", ".join(map(str, sorted({*others, *ended})))
        waiting = ", ".join(map(str, reporting))
        what = "has returned" if not others else "is elsewhere"
        return Outcome.failed(
            Fault.uneven_reports,
            f"Rank {waiting} waits in ray.train.report, while rank {missing} {what} and {idle}:"
            f" every rank must report equally often (lane.report_timeout_s).\n{places}",
        )
    where = "in ray.train.report" if reporting else "in the train function"
    key = "lane.report_timeout_s" if reporting or ended else "lane.hang_timeout_s"
    return Outcome.failed(Fault.hang, f"The trial hangs {where}: {idle} ({key}).\n{places}")
