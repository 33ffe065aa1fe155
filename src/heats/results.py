"""`optimization_results.yaml`: the best trial so far, for people and for scripts."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import yaml

from heats.trial import TrialState

if TYPE_CHECKING:
    from pathlib import Path

    from heats.record import SweepRecord, TrialRecord

RESULTS_FILE = "optimization_results.yaml"

_EVERY_S = 1.0
"""How old the number of trials in it may become; a better trial is told at once."""


class Results:
    """The file in `folder`, kept up to date with the record; Hydra's own sweepers write it too."""

    def __init__(self, folder: Path, record: SweepRecord) -> None:
        self._path, self._record = folder / RESULTS_FILE, record
        self._best: float | None = None
        self._written_s = 0.0

    def update(self, ended: TrialRecord) -> None:
        """Take the end of a trial into account."""
        objective = self._record.objective
        is_better = objective.is_better(ended.value, self._best)
        is_best = ended.state is TrialState.COMPLETE and is_better
        if is_best or time.monotonic() - self._written_s > _EVERY_S:
            self.write()

    def write(self) -> None:
        """Write it anew, in one step."""
        record = self._record
        best = record.best()
        results: dict[str, Any] = {
            "name": "heats",
            "best_params": {} if best is None else dict(best.params),
            "best_value": None if best is None else best.value,
            "best_trial": None if best is None else best.number,
            "best_run_id": None if best is None else best.run_id,
            "study_name": record.start.study_name,
            "metric": record.objective.name,
            "direction": record.objective.direction.value,
            "num_trials": {state.value.lower(): count for state, count in record.counts().items()},
        }
        partial = self._path.with_suffix(".tmp")
        partial.write_text(yaml.safe_dump(results, sort_keys=False), encoding="utf-8")
        os.replace(partial, self._path)
        self._best = results["best_value"]
        self._written_s = time.monotonic()
