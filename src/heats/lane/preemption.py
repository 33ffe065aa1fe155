"""Learning in a worker that its node is going away.

Verified on ray 2.60; tests/integration/test_ray_contract.py covers the private names.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

from ray.train.v2._internal.execution.callback import WorkerGroupCallback

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType


class PreemptionCallback(WorkerGroupCallback):
    """Has the workers of a Ray Train run listen for SIGTERM, from their main threads."""

    def after_worker_group_start(self, worker_group: Any) -> None:
        """Only a main thread may: turns are served in another."""
        worker_group.execute(_listen)


def on_preemption(tell: Callable[[], None]) -> None:
    """Have `tell` called in this worker when it is sent SIGTERM, which then does not end it.

    Where `tell` raises OSError, because there is nobody to be told, the worker ends as Ray has it.
    """
    _told.append(tell)


_told: list[Callable[[], None]] = []


def _listen() -> None:
    ends = signal.getsignal(signal.SIGTERM)

    def on_sigterm(number: int, frame: FrameType | None) -> None:
        try:
            for tell in _told:
                tell()
        except OSError:
            _told.clear()
        if not _told and callable(ends):
            ends(number, frame)

    signal.signal(signal.SIGTERM, on_sigterm)
