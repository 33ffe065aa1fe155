"""The death of a lane's process, as Ray Tune has to see it.

Where a node is low on memory, Ray ends processes, those of lanes among them. What Tune then gets is
neither an actor's death nor a task's failure to it, so it would end the whole sweep.
Verified on ray 2.60; tests/integration/test_ray_contract.py covers the private name.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from ray._private import serialization
from ray.exceptions import OutOfMemoryError, RayActorError

if TYPE_CHECKING:
    from collections.abc import Iterator


class KilledForMemoryError(OutOfMemoryError, RayActorError):
    """The process of an actor was ended because its node is low on memory."""

    def __init__(self, message: str) -> None:
        first, *_ = message.splitlines() or ["out of memory"]  # Pages of detail follow.
        OutOfMemoryError.__init__(self, first)
        RayActorError.__init__(self, error_msg=first)


@contextmanager
def memory_kills_are_deaths() -> Iterator[None]:
    """While it is entered, a lane that Ray ended for want of memory costs no more than its turn."""
    serialization.OutOfMemoryError = KilledForMemoryError
    try:
        yield
    finally:
        serialization.OutOfMemoryError = OutOfMemoryError
