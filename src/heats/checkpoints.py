"""Which checkpoints of a sweep are still needed, and the removal of the others.

A checkpoint is written once, straight into its trial's artifact directory, and goes when nothing
can need it any more: while a trial runs its best and its newest one stay; of the finished trials
only the best `keep_best` keep one, their best.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from heats.trial import TrialState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from heats.record import SweepRecord, TrialRecord

logger = logging.getLogger(__name__)

CHECKPOINTS_DIR = "checkpoints"
"""Folder below a trial's artifact directory that its checkpoints are written to."""

_RAY_PREFIX = "checkpoint_2"
"""How the names begin that Ray Train gives to checkpoints: `checkpoint_<year>-...`."""


def unneeded(record: SweepRecord, keep_best: int) -> list[tuple[int, str]]:
    """Trial number and path or URI of each checkpoint that can go.

    A trial that was interrupted counts as running: it continues from its newest checkpoint.
    """
    finished = [
        trial
        for trial in record.trials.values()
        if trial.state is TrialState.COMPLETE and trial.checkpoints
    ]
    finished.sort(key=lambda trial: trial.number)
    ranked = _best_first(record, finished)
    kept = {trial.number for trial in ranked[:keep_best]}
    dropped: list[tuple[int, str]] = []
    for trial in record.trials.values():
        if trial.checkpoints:
            needed = set(_needed(record, trial, is_kept=trial.number in kept))
            dropped += [(trial.number, uri) for uri in trial.checkpoints if uri not in needed]
    return dropped


def remove(uri: str) -> None:
    """Delete a checkpoint directory; one that is gone already is fine, a failure is only logged."""
    try:
        if "://" in uri:
            from pyarrow import fs

            filesystem, path = fs.FileSystem.from_uri(uri)
            filesystem.delete_dir(path)
        else:
            shutil.rmtree(uri)
    except FileNotFoundError:
        pass
    except OSError as exc:
        logger.warning("Could not remove the checkpoint %s: %s", uri, exc)


def orphans(record: SweepRecord) -> list[str]:
    """Local checkpoint directories that no record knows: half written, or of a stopped turn.

    Only those that Ray Train named: what user code stores beside them is its own.
    """
    found: list[str] = []
    known = {uri for trial in record.trials.values() for uri in trial.checkpoints}
    for trial in record.trials.values():
        if trial.artifact_dir and "://" not in trial.artifact_dir:
            folder = Path(trial.artifact_dir, CHECKPOINTS_DIR)
            found += [
                str(path)
                for path in folder.glob(f"{_RAY_PREFIX}*")
                if path.is_dir() and str(path) not in known
            ]
    return found


def _best_first(record: SweepRecord, trials: list[TrialRecord]) -> list[TrialRecord]:
    ranked: list[TrialRecord] = []
    for trial in trials:
        place = 0
        while place < len(ranked) and not record.objective.is_better(
            trial.value, ranked[place].value
        ):
            place += 1
        ranked.insert(place, trial)
    return ranked


def _needed(record: SweepRecord, trial: TrialRecord, *, is_kept: bool) -> Iterator[str]:
    best = trial.best_checkpoint(record.objective) or trial.last_checkpoint
    if trial.state is TrialState.RUNNING:
        reports = (best, trial.last_checkpoint)
    elif is_kept:
        reports = (best, None)
    else:
        reports = (None, None)
    for report in reports:
        if report is not None and report.checkpoint is not None:
            yield report.checkpoint
