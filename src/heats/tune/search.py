"""The coordinator as a Tune searcher: it hands out trials, one for each free lane."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from ray.tune.search import Searcher

from heats.trial import Ending, Outcome

if TYPE_CHECKING:
    from heats.lane.lane import LaneSettings
    from heats.lane.pool import LanePool
    from heats.trial import Coordinator, TrialSpec


logger = logging.getLogger(__name__)


class TrialSearcher(Searcher):
    """Suggests the coordinator's next trial where the pool has a lane for it.

    What a trial needs is known only once it is asked for: one whose shape has no room yet waits
    here, and is the next to run.
    """

    def __init__(self, coordinator: Coordinator, settings: LaneSettings, pool: LanePool) -> None:
        super().__init__()
        self._coordinator, self._settings, self._pool = coordinator, settings, pool
        self._waiting: TrialSpec | None = None
        self._told: int | None = None

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        """The config of the next Tune trial; FINISHED where there will be none any more."""
        if self._coordinator.is_done():
            if self._waiting is not None:
                self._coordinator.end(self._waiting.number, Outcome(Ending.STOPPED))
                self._waiting = None
            finished: str = Searcher.FINISHED
            return finished
        if self._waiting is None:
            if not self._pool.may_admit():
                return None
            self._waiting = self._coordinator.next_trial()
        spec = self._waiting
        if spec is None:
            return None
        if not self._pool.admit(trial_id, spec.shape):
            if self._pool.is_empty and spec.number != self._told:
                self._told = spec.number
                logger.warning(
                    "Trial %d needs %d workers of %s, which the cluster has not now: it waits.",
                    spec.number,
                    spec.shape.num_workers,
                    spec.shape.resources_per_worker,
                )
            return None
        self._waiting = None
        return {"spec": spec, "settings": self._settings}

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Free the place; what happened went through the scheduler."""
        del result, error
        self._pool.leave(trial_id)

    def __getstate__(self) -> dict[str, Any]:
        """Nothing: the Tuner writes itself to a file that nobody will read."""
        return {}

    def save(self, checkpoint_path: str) -> None:
        """Nothing: the ledger is the truth."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing: the ledger is the truth."""
