"""The death of a lane's process, as Ray Tune has to see it.

Where a node is low on memory, Ray ends processes, those of lanes among them. Tune knows two ways
for an actor's task to fail, a death and an exception, and ends the whole sweep at this third.
Verified on ray 2.60; tests/integration/test_ray_contract.py covers the private names.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ray.air.execution._internal.actor_manager import RayActorManager
from ray.exceptions import OutOfMemoryError, RayActorError

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def memory_kills_are_deaths() -> Iterator[None]:
    """While it is entered, a lane that Ray ended for want of memory costs no more than its turn."""
    original = RayActorManager._actor_task_failed

    def failed(self: Any, tracked_actor_task: Any, exception: Exception) -> None:
        if isinstance(exception, OutOfMemoryError):
            first, *_ = str(exception).splitlines() or ["out of memory"]  # Pages of detail follow.
            actor_id = str(tracked_actor_task._tracked_actor.actor_id)
            exception = RayActorError(actor_id, first)
        original(self, tracked_actor_task, exception)

    RayActorManager._actor_task_failed = failed
    try:
        yield
    finally:
        RayActorManager._actor_task_failed = original
