"""The coordinator as a Tune searcher: it hands out trials, one for each free lane."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ray.tune.search import Searcher

if TYPE_CHECKING:
    from heats.lane.lane import LaneSettings
    from heats.trial import Coordinator


class TrialSearcher(Searcher):
    """Suggests the coordinator's next trial while fewer than `max_concurrent` run."""

    def __init__(
        self, coordinator: Coordinator, settings: LaneSettings, max_concurrent: int
    ) -> None:
        super().__init__()
        self._coordinator, self._settings = coordinator, settings
        self._max_concurrent = max_concurrent
        self._running: set[str] = set()

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        """The config of the next Tune trial; FINISHED where there will be none any more."""
        if self._coordinator.is_done():
            finished: str = Searcher.FINISHED
            return finished
        if len(self._running) >= self._max_concurrent:
            return None
        spec = self._coordinator.next_trial()
        if spec is None:
            return None
        self._running.add(trial_id)
        return {"spec": spec, "settings": self._settings}

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Free the place; what happened went through the scheduler."""
        del result, error
        self._running.discard(trial_id)

    def __getstate__(self) -> dict[str, Any]:
        """Nothing: the Tuner writes itself to a file that nobody will read."""
        return {}

    def save(self, checkpoint_path: str) -> None:
        """Nothing: the ledger is the truth."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing: the ledger is the truth."""
