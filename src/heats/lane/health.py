"""Whether a turn still goes on, from what its ranks say of themselves.

A rank is idle while its training thread stays where it is and its process, with its children, uses
no CPU to speak of. It measures that itself, so a rank that cannot speak (long C code that holds the
interpreter) is never taken for idle, and a slow step is never taken for a hang.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from heats.trial import Ending, Outcome

if TYPE_CHECKING:
    from collections.abc import Mapping

    from heats.lane.messages import RankPulse, TurnEnded


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

    RAISED where the ranks do not call `ray.train.report` equally often, which the next attempt
    would do again; LOST where they are stuck for no reason that can be seen.

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
        return Outcome(
            Ending.RAISED,
            error=(
                f"Rank {waiting} waits in ray.train.report, while rank {missing} {what} and {idle}:"
                f" every rank must report equally often (lane.report_timeout_s).\n{places}"
            ),
        )
    where = "in ray.train.report" if reporting else "in the train function"
    key = "lane.report_timeout_s" if reporting or ended else "lane.hang_timeout_s"
    return Outcome(Ending.LOST, error=f"The trial hangs {where}: {idle} ({key}).\n{places}")
