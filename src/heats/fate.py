"""What becomes of a trial: final state, value and error, from its record and its last outcome."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from heats.config import Scheduler
from heats.trial import Ending, TrialState, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable

    from heats.config import SweepConf
    from heats.record import SweepRecord, TrialRecord
    from heats.trial import Objective, Outcome, Reported


@dataclass(frozen=True, slots=True)
class Fate:
    """A trial's final state, its best objective if it has one, and what went wrong if anything."""

    state: TrialState
    value: float | None
    error: str | None = None


class Lengths:
    """What is known of how much a full trial spends, in units of `objective.resource`."""

    def __init__(self, conf: SweepConf, record: SweepRecord) -> None:
        """Start with the longest trial of the record."""
        self._conf = conf
        self._ends: set[int] = set()
        self._longest = max((t.last.resource for t in record.trials.values() if t.last), default=0)

    def see(self, resource: int) -> None:
        """A trial has spent so much."""
        self._longest = max(self._longest, resource)

    def learn(self, trial: TrialRecord) -> None:
        """A trial came to its own end, if it is COMPLETE."""
        if trial.state is TrialState.COMPLETE and trial.last is not None:
            self._ends.add(trial.last.resource)

    def full(self) -> int | None:
        """Where a trial is complete though its scheduler stopped it; None: nowhere.

        Without `asha.max_resource` that is the one amount at which all trials that came to their
        own end did, and that none went beyond: the rung there stops trials that have nothing left
        to do.
        """
        if self._conf.scheduler is not Scheduler.asha:
            return None
        if self._conf.asha.max_resource is not None:
            return self._conf.asha.max_resource
        return self._longest if self._ends == {self._longest} else None


def fate(
    trial: TrialRecord,
    outcome: Outcome,
    objective: Objective,
    *,
    max_resource: int | None,
    is_target: Callable[[float], bool],
) -> Fate:
    """The fate of a trial whose last attempt came to this outcome.

    Args:
        trial: With all its reports.
        outcome: Of the last attempt; not one that is to be tried again.
        objective: Of the study.
        max_resource: Where the scheduler holds a trial to be complete; None: nowhere.
        is_target: Whether a value is good enough to end the study.
    """
    best = trial.best_report(objective)
    value = best.metrics[objective.name] if best else None
    if outcome.ending is Ending.FAILED:
        return Fate(TrialState.FAIL, value, outcome.error)
    diverged = divergence(trial, objective)
    if diverged is not None:
        what = f"{objective.name}={diverged.metrics[objective.name]}"
        where = f"{objective.resource} {diverged.resource}"
        return Fate(TrialState.PRUNED, value, f"diverged: {what} at {where}")
    if outcome.ending is Ending.STOPPED:
        last = trial.last
        is_full = max_resource is not None and last is not None and last.resource >= max_resource
        if not is_full and not (value is not None and is_target(value)):
            return Fate(TrialState.PRUNED, value)
    if outcome.returned is not None and objective.metric is None:
        value = outcome.returned
        if not math.isfinite(value):
            return Fate(TrialState.FAIL, None, f"The task function returned {value}.")
    if value is None:
        return Fate(TrialState.FAIL, None, _why_no_value(trial, objective))
    return Fate(TrialState.COMPLETE, value)


def is_sealed(trial: TrialRecord, objective: Objective) -> bool:
    """Whether the trial was told to stop for good, so that it never runs again."""
    return (
        any(judged.verdict is Verdict.STOP for judged in trial.judged)
        or divergence(trial, objective) is not None
    )


def divergence(trial: TrialRecord, objective: Objective) -> Reported | None:
    """The first report whose objective is not finite."""
    for report in trial.reports:
        if not math.isfinite(report.metrics.get(objective.name, 0.0)):
            return report
    return None


def _why_no_value(trial: TrialRecord, objective: Objective) -> str:
    if objective.metric is None:
        return (
            "The task function returned no number. Return the objective as a float, or set "
            "objective.metric to a metric that it reports."
        )
    seen = sorted({name for report in trial.reports for name in report.metrics})
    return (
        f"The metric {objective.metric!r} was never reported as a finite number; "
        f"reported: {', '.join(seen) or 'nothing'}. Set objective.metric to one of these."
    )
