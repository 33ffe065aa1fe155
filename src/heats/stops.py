"""When a study ends before its last trial."""

from __future__ import annotations

import time
from itertools import takewhile
from typing import TYPE_CHECKING

from heats.trial import TrialState
from heats.wording import last_line

if TYPE_CHECKING:
    from heats.config import StopConf
    from heats.record import SweepRecord, TrialRecord


class Stops:
    """The reasons that `StopConf` gives; each is None where the study goes on."""

    def __init__(self, conf: StopConf, record: SweepRecord) -> None:
        """Start the clock; failures in a row are counted on from the record."""
        self._conf, self._objective = conf, record.objective
        self._started_s = time.monotonic()
        ended = [trial for trial in record.trials.values() if trial.ended_s is not None]
        ended.sort(key=lambda trial: trial.ended_s or 0.0, reverse=True)
        failed = takewhile(lambda trial: trial.state is TrialState.FAIL, ended)
        self._num_failures = len(list(failed))

    def is_target(self, value: float) -> bool:
        """Whether a value is good enough."""
        target = self._conf.target
        return target is not None and (value == target or self._objective.is_better(value, target))

    def at_value(self, trial: int, value: float) -> str | None:
        """Why a value ends the study."""
        if not self.is_target(value):
            return None
        return f"trial {trial} reached the target {self._conf.target:g}"

    def now(self) -> str | None:
        """Why the time ends it."""
        limit = self._conf.time_limit_s
        if limit is None or time.monotonic() - self._started_s <= limit:
            return None
        return f"the time limit of {limit:g} s was reached"

    def at_end(self, ended: TrialRecord) -> str | None:
        """Why the end of a trial ends it."""
        limit = self._conf.max_failures
        self._num_failures = self._num_failures + 1 if ended.state is TrialState.FAIL else 0
        if limit is None or self._num_failures < limit:
            return None
        return (
            f"{limit} trials failed in a row (stop.max_failures). The last one: "
            f"{last_line(ended.error) or 'no message'}"
        )
