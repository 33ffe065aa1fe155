"""What a lane reserves in the Ray cluster, and who frees it.

Ray frees a placement group when its creator and the whole job are gone: that of a lane which died
would hold its CPUs and GPUs to the end of the sweep. So a placement group's name tells which sweep
and which process made it, and the driver frees those of the dead.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import ray
from ray.util import get_placement_group, placement_group, placement_group_table
from ray.util import remove_placement_group as remove

from heats.errors import LaneLostError

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

logger = logging.getLogger(__name__)

_NUM_LOOKS, _LOOK_EVERY_S = 6, 10.0
"""Ray needs up to half a minute to hold a node that is silent for dead."""


class Reservation:
    """The placement group of one worker group, in the process that starts its workers.

    `sweep_id` is the driver run's own.
    """

    def __init__(self, sweep_id: str) -> None:
        self._prefix = f"{sweep_id}-{ray.get_runtime_context().get_actor_id()}"
        self._lock = threading.Lock()
        self._group: PlacementGroup | None = None
        self._is_released = False

    def make(self, bundles: list[dict[str, float]], strategy: str) -> PlacementGroup:
        """A new placement group in place of the one before, which a failed start leaves behind.

        Raises:
            LaneLostError: It was released, so no worker is to start any more.
        """
        with self._lock:
            if self._is_released:
                msg = "The lane was closed while its workers were starting."
                raise LaneLostError(msg)
            self._free()
            name = f"{self._prefix}-{next(_numbers)}"  # Ray wants every name to be another one.
            self._group = placement_group(bundles, strategy=strategy, name=name)
            return self._group

    def release(self) -> None:
        """Free it for good; workers that are in it end at once."""
        with self._lock:
            self._is_released = True
            self._free()

    def _free(self) -> None:
        if self._group is not None:
            remove(self._group)
            self._group = None


_numbers = itertools.count()


def free_reservations_soon(sweep_id: str) -> None:
    """Free what the dead reserved, now and again: Ray may learn of a death after we did."""

    def free() -> None:
        for _ in range(_NUM_LOOKS):
            if not ray.is_initialized():
                return
            free_reservations(sweep_id, of_the_dead=True)
            time.sleep(_LOOK_EVERY_S)

    threading.Thread(target=free, daemon=True, name="heats-reservations").start()


def free_reservations(sweep_id: str, *, of_the_dead: bool) -> None:
    """Free what this driver's lanes reserved: all of it, or only that of processes that died.

    What goes wrong is logged: the sweep has more to say than its cleaning up.
    """
    try:
        _free(sweep_id, of_the_dead=of_the_dead)
    except Exception as exc:  # noqa: BLE001 - Ray raises anything where its own services are down
        logger.warning("Ray did not free what a lane had reserved: %s", exc)


def _free(sweep_id: str, *, of_the_dead: bool) -> None:
    for each in placement_group_table().values():
        name: str = each["name"]
        if not name.startswith(f"{sweep_id}-") or each["state"] == "REMOVED":
            continue
        if of_the_dead and not _is_dead(name.split("-")[-2]):
            continue
        with suppress(ValueError):  # It was freed in this moment.
            remove(get_placement_group(name))
            logger.info("Freed what the lane of actor %s had reserved.", name.split("-")[-2])


def _is_dead(actor_id: str) -> bool:
    # Ray's public way to ask needs its dashboard, which a sweep does not start.
    return bool(ray._private.state.actors(actor_id).get("State") == "DEAD")
