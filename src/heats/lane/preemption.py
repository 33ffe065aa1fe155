"""Learning in a worker that its node is going away.

Verified on ray 2.60; tests/integration/test_ray_contract.py covers the private names.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any

from ray.train.v2._internal.execution import context as train_context
from ray.train.v2._internal.execution.callback import WorkerGroupCallback
from ray.train.v2._internal.execution.preemption import PreemptionWatcher

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

_POLL_S = 3.0
"""How often a lane asks whether a node of its workers is drained, in seconds."""


class PreemptionCallback(WorkerGroupCallback):
    """Has the workers of a Ray Train run learn of SIGTERM, and of their node being drained.

    Ray watches for the latter in a process for each run; here it does so in the lane's own.
    """

    def __init__(self) -> None:
        self._watcher: PreemptionWatcher | None = None

    def after_worker_group_start(self, worker_group: Any) -> None:
        """Begin."""
        worker_group.execute(_listen)  # Only a main thread may: turns are served in another.
        workers = worker_group.get_workers()
        ranks: dict[str, list[int]] = {}
        for each in workers:
            ranks.setdefault(each.metadata.node_id, []).append(each.distributed_context.world_rank)
        self._watcher = PreemptionWatcher(
            node_to_ranks=ranks,
            poll_interval_s=_POLL_S,
            worker_actors_by_rank={
                each.distributed_context.world_rank: each.actor for each in workers
            },
        )

    def before_worker_group_shutdown(self, worker_group: Any) -> None:
        """Stop."""
        del worker_group
        self._stop()

    def after_worker_group_abort(self, worker_group_context: Any) -> None:
        """Stop."""
        del worker_group_context
        self._stop()

    def _stop(self) -> None:
        if self._watcher is not None:
            self._watcher._stop_event.set()


def is_preempted() -> bool:
    """Whether this worker was told that a node of its group is drained."""
    info = train_context.get_train_context().preemption_context.preemption_info
    return info is not None


def on_preemption(tell: Callable[[], None]) -> None:
    """Have `tell` called in this worker when it is sent SIGTERM, which then does not end it.

    Where `tell` raises OSError, because there is nobody to be told, the worker ends as Ray has it.
    """
    _told.append(tell)


_told: list[Callable[[], None]] = []


def _listen() -> None:
    ends = signal.getsignal(signal.SIGTERM)

    def on_sigterm(number: int, frame: FrameType | None) -> None:
        if _has_told():
            return
        if callable(ends):
            ends(number, frame)
        else:
            signal.signal(number, ends)
            os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, on_sigterm)
    _end_children_of_forks(on_sigterm)


def _end_children_of_forks(handler: Callable[[int, FrameType | None], None]) -> None:
    """Have SIGTERM end children that the worker forks, and not be handled as the worker does.

    It is held back until the child has said so: CPython forgets a signal that comes before a
    forked child's first line, and a data loader's worker that is ended at once would live on.
    """
    masks = threading.local()

    def hold() -> None:
        masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def let_go() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.before)

    def begin() -> None:
        if signal.getsignal(signal.SIGTERM) is handler:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        let_go()

    os.register_at_fork(before=hold, after_in_parent=let_go, after_in_child=begin)


def _has_told() -> bool:
    """Tell everyone; False where there is nobody, or not any more."""
    try:
        for tell in _told:
            tell()
    except OSError:
        _told.clear()
    return bool(_told)
