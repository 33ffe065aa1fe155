"""heats: hyperparameter sweeps that race. See README.md.

What a task function may call is here. It works wherever the function runs: in a trial, in any other
Ray Train worker, and in a plain run of the app, where there is nobody to report to.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from heats.cache import cached

if TYPE_CHECKING:
    from ray.train import Checkpoint

__all__ = ["cached", "get_checkpoint", "report", "set_tags"]


def report(metrics: dict[str, Any], checkpoint: Checkpoint | None = None, **options: Any) -> None:
    """Report metrics, and a checkpoint to go on from: `ray.train.report` with all its options.

    Call it on every rank. In a plain run of the app it does nothing.

    Args:
        metrics: Numbers by name: the objective, and how much of the resource is spent (`epoch`).
        checkpoint: A folder with all that `get_checkpoint` is to give back.
        options: Other arguments of `ray.train.report`.

    Raises:
        TrialStoppedError: The trial is to stop here; let it pass.
    """
    if _is_in_train_worker():
        import ray.train

        ray.train.report(metrics, checkpoint=checkpoint, **options)


def get_checkpoint() -> Checkpoint | None:
    """Where the trial goes on: its newest checkpoint, as `ray.train.get_checkpoint` gives it.

    None where it starts at its beginning, and in a plain run of the app.
    """
    if not _is_in_train_worker():
        return None
    import ray.train

    checkpoint: Checkpoint | None = ray.train.get_checkpoint()
    return checkpoint


def set_tags(tags: dict[str, str]) -> None:
    """Tag the trial's MLflow run: which data it used, for instance. They go with the next report.

    Those of rank 0 count. Outside of a trial it does nothing.
    """
    if _is_in_train_worker():
        from heats.lane.context import set_tags

        set_tags(tags)


def _is_in_train_worker() -> bool:
    if "ray.train" not in sys.modules:  # A worker has it; a plain run need not wait for it.
        return False
    from heats.lane.context import is_in_train_worker

    return is_in_train_worker()
