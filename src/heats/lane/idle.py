"""Lanes that wait for a trial of their shape, where Ray Tune keeps actors to use again.

Tune keeps only as many idle actors as trials of the same resources wait, so a lane would end
whenever the next trial has another shape, and start again for the one after. Verified on ray 2.60;
tests/integration/test_ray_contract.py covers the private names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ray.tune import PlacementGroupFactory
from ray.tune.utils.object_cache import _ObjectCache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ray.tune.execution.tune_controller import TuneController

    from heats.lane.actors import LaneActors
    from heats.lane.pool import LanePool
    from heats.trial import LaneShape

_MAX_BYTES = 2**24
"""Most memory that a lane's own process reserves, in bytes."""


class IdleLanes(_ObjectCache):
    """Tune's cache of actors, which lets go of those only that the pool retires."""

    def __init__(self, pool: LanePool) -> None:
        super().__init__(may_keep_one=True)
        self._pool = pool
        self.release: Callable[[Any], object] | None = None
        """Is told of each lane that the sweep needs no more, where such lanes may stay."""
        self._shapes: dict[PlacementGroupFactory, LaneShape] = {}

    def know(self, shape: LaneShape) -> None:
        """Learn of a shape before a trial of it runs."""
        self._shapes[resources_of(shape)] = shape

    def cache_object(self, key: PlacementGroupFactory, obj: Any) -> bool:
        """Keep a lane whose trial is over."""
        self._cached_objects[key].append(obj)
        self._num_cached_objects += 1
        self._pool.rest(self._shapes[key])
        return True

    def pop_cached_object(self, key: PlacementGroupFactory) -> Any:
        """A lane for a trial of these resources; None where there is none."""
        lane = super().pop_cached_object(key)
        if lane is not None:
            self._pool.take(self._shapes[key])
        return lane

    def flush_cached_objects(self, force_all: bool = False) -> Iterator[Any]:
        """The lanes that end now."""
        if force_all:
            for lane in super().flush_cached_objects(force_all=True):
                if self.release is not None:
                    self.release(lane)
                yield lane
            return
        for shape in self._pool.retire():
            lane = super().pop_cached_object(resources_of(shape))
            if lane is not None:
                yield lane


def resources_of(shape: LaneShape) -> PlacementGroupFactory:
    """What Tune reserves for a lane's own process: nearly nothing, but told apart by its shape.

    Tune gives an idle actor to a trial that asks for equal resources. This is a function of the
    shape alone, because Tune calls a copy of it.
    """
    return PlacementGroupFactory([{"CPU": 0, "memory": 1 + hash(shape) % _MAX_BYTES}])


def install(tune_controller: TuneController, idle: IdleLanes, lanes: LaneActors) -> None:
    """Have Tune keep its idle actors there, and take those that it needs from the lanes."""
    controller: Any = getattr(tune_controller, "_tune_controller", tune_controller)
    controller._actor_cache, controller._class_cache = idle, lanes
    if lanes.stay:
        actors = controller._actor_manager
        idle.release = lambda lane: actors.schedule_actor_task(lane, "stay")
