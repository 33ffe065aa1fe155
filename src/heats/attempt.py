"""One attempt at a trial as the race sees it: which of its reports are news."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from heats.trial import resource_spent

if TYPE_CHECKING:
    from pathlib import Path

    from heats.record import TrialRecord
    from heats.trial import Report


@dataclass(slots=True)
class Attempt:
    """Numbers the reports of an attempt.

    `log` is rank 0's. `known` are resource and index of the last report that earlier attempts made;
    `is_abandoned`: the trial goes on with other values, so what this attempt still does is lost.
    """

    log: Path
    next_index: int
    known: tuple[int, int]
    is_abandoned: bool = False

    @classmethod
    def of(cls, trial: TrialRecord, log: Path) -> Attempt:
        """The next attempt at a trial."""
        checkpoint, last = trial.last_checkpoint, trial.last
        known = (-1, -1)
        if last is not None:
            has_exploited = trial.exploited and trial.exploited[-1].index >= last.index
            # With other values and weights from elsewhere, every report is a new one.
            known = (-1 if has_exploited else last.resource), last.index
        return cls(log, checkpoint.index + 1 if checkpoint else 1, known)

    def take(self, report: Report, resource: str) -> tuple[int, int] | None:
        """Index and amount of resource of a report; None where it says nothing new."""
        index = self.next_index
        self.next_index = index + 1
        spent = resource_spent(report.metrics, index, resource)
        return None if self.is_abandoned or (spent, index) <= self.known else (index, spent)
