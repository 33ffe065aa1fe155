"""Which checkpoints of a sweep are still needed, and the removal of the others.

A checkpoint is written once, straight into its trial's artifact directory, and goes when nothing
can need it any more: while a trial runs its best and its newest stay; of the finished trials only
the best `keep_best` keep any, their best. How many are a trial's best, and what makes one good, is
in `CheckpointConf`.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from heats.config import Direction, ScoreOrder
from heats.trial import Objective, TrialState

if TYPE_CHECKING:
    from heats.config import CheckpointConf
    from heats.record import SweepRecord, TrialRecord

logger = logging.getLogger(__name__)

CHECKPOINTS_DIR = "checkpoints"
"""Folder below a trial's artifact directory that its checkpoints are written to."""

_RAY_PREFIX = "checkpoint_2"
"""How the names begin that Ray Train gives to checkpoints: `checkpoint_<year>-...`."""


def unneeded(record: SweepRecord, conf: CheckpointConf) -> list[tuple[int, str]]:
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
    kept = {trial.number for trial in ranked[: conf.keep_best]}
    score = _score(conf, record.objective)
    dropped: list[tuple[int, str]] = []
    for trial in record.trials.values():
        if trial.checkpoints:
            needed = _needed(trial, score, conf.num_to_keep, is_kept=trial.number in kept)
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


def _score(conf: CheckpointConf, objective: Objective) -> Objective:
    """What makes a checkpoint good."""
    if conf.checkpoint_score_attribute is None:
        return objective
    is_max = conf.checkpoint_score_order is ScoreOrder.max
    return Objective(
        conf.checkpoint_score_attribute, Direction.maximize if is_max else Direction.minimize
    )


def _needed(
    trial: TrialRecord, score: Objective, num_to_keep: int | None, *, is_kept: bool
) -> set[str]:
    is_running = trial.state is TrialState.RUNNING
    needed: set[str | None] = set()
    if is_running or is_kept:
        needed |= {uri for uri, _ in trial.best_checkpoints(score)[:num_to_keep]}
    if is_running and trial.last_checkpoint is not None:
        needed.add(trial.last_checkpoint.checkpoint)
    return {uri for uri in needed if uri is not None}
