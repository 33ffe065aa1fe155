"""The reports of a turn that every rank has made, and the validation of their checkpoints."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from heats.lane.messages import TurnCheckpoint, TurnCheckpoints
from heats.lane.validation import FAILED, Validated

if TYPE_CHECKING:
    from collections.abc import Callable

    from heats.lane.messages import RankReport
    from heats.lane.validation import Validate
    from heats.trial import Report


@dataclass(slots=True)
class _Made:
    """A report; `validated` None: no validation was asked for, or it still runs."""

    report: Report
    pickled: bytes
    is_pending: bool = False
    validated: Validated | None = None


class TurnReports:
    """Gives a turn's reports out in order, each once its checkpoint is validated.

    So whoever learns of a report learns of its validated metrics with it. Training goes on
    meanwhile. As in Ray Train one checkpoint is validated at a time.

    Args:
        validate: Runs one validation.
        on_validated: Is called from another thread when there may be something to take.
    """

    def __init__(self, validate: Validate, on_validated: Callable[[], None]) -> None:
        self._validate, self._on_validated = validate, on_validated
        self._num_made = 0
        self._held: deque[_Made] = deque()
        self._with_checkpoint: list[_Made] = []
        self._threads: ThreadPoolExecutor | None = None
        self._is_cancelled = threading.Event()

    def add(self, of_ranks: dict[int, RankReport]) -> None:
        """Take a report that every rank has made; metrics are rank 0's."""
        ranks = [of_ranks[rank] for rank in sorted(of_ranks)]
        first = next((each for each in ranks if each.report.checkpoint is not None), ranks[0])
        report = replace(ranks[0].report, checkpoint=first.report.checkpoint)
        made = _Made(report, ranks[0].pickled, is_pending=first.validation is not None)
        self._num_made += 1
        self._held.append(made)
        if report.checkpoint is not None:
            self._with_checkpoint.append(made)
        if first.validation is not None:
            self._threads = self._threads or ThreadPoolExecutor(1, "heats-validation")
            self._threads.submit(self._run, made, first)

    def take(self) -> list[Report]:
        """Reports that can be given out and were not yet."""
        taken: list[Report] = []
        while self._held and not self._held[0].is_pending:
            made = self._held.popleft()
            more = {} if made.validated is None else made.validated.metrics
            taken.append(replace(made.report, metrics={**made.report.metrics, **more}))
        return taken

    @property
    def is_validating(self) -> bool:
        """Whether a report is held back."""
        return bool(self._held)

    def checkpoints(self, *, is_stopping: bool) -> TurnCheckpoints:
        """What `ray.train.get_all_reported_checkpoints` is made of."""
        return TurnCheckpoints(
            num_reports=self._num_made,
            checkpoints=tuple(_checkpoint(made) for made in self._with_checkpoint),
            is_validating=any(made.is_pending for made in self._with_checkpoint),
            is_stopping=is_stopping,
        )

    def cancel(self) -> None:
        """End validations that run or wait; what they hold back is dropped.

        A trial that goes on later goes on before these checkpoints, and makes them again.
        """
        self._is_cancelled.set()
        self._held.clear()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _run(self, made: _Made, asked: RankReport) -> None:
        assert asked.validation is not None  # noqa: S101 - see `add`
        end = Validated(FAILED)
        try:
            uri = str(asked.report.checkpoint)
            end = self._validate(asked.validation, uri, self._is_cancelled)
        finally:
            made.validated, made.is_pending = end, False
            self._on_validated()


def _checkpoint(made: _Made) -> TurnCheckpoint:
    validated = made.validated
    if validated is None:
        status = "PENDING_VALIDATION" if made.is_pending else "COMMITTED"
    else:
        status = validated.status
    more = () if validated is None or validated.pickled is None else (validated.pickled,)
    return TurnCheckpoint(str(made.report.checkpoint), (made.pickled, *more), status)
