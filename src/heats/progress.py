"""How far a sweep is, and how long the rest of it will take."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from heats.trial import TrialState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from heats.record import SweepRecord, TrialRecord

_RECENT = 100
"""Ended trials that an estimate looks back on: later ones are pruned earlier."""


def expected_time_left(
    durations: Sequence[float], ages: Sequence[float], num_waiting: int, num_lanes: int
) -> float | None:
    """Seconds until the last trial ends, or None while too few trials have ended to tell.

    The first trials to end are the short ones, so nothing is said before every lane has ended one,
    and a running trial that is older than the mean counts as one of its present age.

    Args:
        durations: Seconds that ended trials took.
        ages: Seconds that the running trials have taken so far.
        num_waiting: Trials not yet begun.
        num_lanes: Trials that run at once.
    """
    if not durations or len(durations) < num_lanes:
        return None
    mean = sum(durations) / len(durations)
    seen = [*durations, *(age for age in ages if age > mean)]
    mean = sum(seen) / len(seen)
    left = [0.0]
    for age in ages:
        longer = [seconds - age for seconds in seen if seconds > age]
        left.append(sum(longer) / len(longer) if longer else 0.0)
    return max(max(left), (sum(left) + num_waiting * mean) / max(1, num_lanes))


@dataclass(slots=True)
class Tally:
    """Counts of a growing record, kept up to date at the cost of what is new in it."""

    record: SweepRecord
    counts: dict[TrialState, int] = field(default_factory=lambda: dict.fromkeys(TrialState, 0))
    best: TrialRecord | None = None
    running: dict[int, TrialRecord] = field(default_factory=dict)
    recent: deque[TrialRecord] = field(default_factory=lambda: deque(maxlen=_RECENT))
    num_seen: int = 0

    def update(self) -> list[TrialRecord]:
        """Take in what happened since the last call; gives the trials that ended meanwhile."""
        # One C call, so that the driver cannot add a trial half-way.
        new = list(itertools.islice(self.record.trials.values(), self.num_seen, None))
        self.num_seen += len(new)
        self.running.update((trial.number, trial) for trial in new)
        ended = [trial for trial in self.running.values() if trial.ended_s is not None]
        ended.sort(key=lambda trial: trial.ended_s or 0.0)
        for trial in ended:
            del self.running[trial.number]
            self.counts[trial.state] += 1
            self.recent.append(trial)
            than = self.best.value if self.best else None
            if trial.state is TrialState.COMPLETE and self.record.objective.is_better(
                trial.value, than
            ):
                self.best = trial
        self.counts[TrialState.RUNNING] = len(self.running)
        return ended

    @property
    def num_ended(self) -> int:
        """Number of trials in a final state."""
        return sum(self.counts.values()) - self.counts[TrialState.RUNNING]
