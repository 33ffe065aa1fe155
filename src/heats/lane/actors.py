"""The actors that Ray Tune gets for trials: lanes that started ahead of it, or were there already.

Where `heats up` keeps a cluster, lanes outlive their sweep, as detached actors. The next sweep
takes over those that run its own program, unchanged since they loaded it, in workers of its own
shape; all others end.
Verified on ray 2.60; tests/integration/test_ray_contract.py covers the private names.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.actor import ActorClass
from ray.tune.execution.class_cache import _ActorClassCache

from heats.lane.trainable import LaneTrainable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ray.actor import ActorHandle

    from heats.lane.lane import LaneSettings
    from heats.trial import LaneShape

logger = logging.getLogger(__name__)

NAMESPACE = "heats-lanes"
_ANSWER_S = 5.0


@dataclass(frozen=True, slots=True)
class Standing:
    """A lane between sweeps; `since_s` and `loaded_s` are times since the epoch."""

    key: str
    shape: LaneShape
    since_s: float
    loaded_s: float
    files: frozenset[str]

    @property
    def is_current(self) -> bool:
        """Whether no source file that the lane has loaded was touched since."""
        try:
            return all(os.stat(path).st_ctime < self.loaded_s for path in self.files)
        except OSError:
            return False


def key_of(settings: LaneSettings) -> str | None:
    """The same for sweeps that a lane can serve one after another; None: it can serve only one."""
    task = settings.task
    if task.pickled is not None or settings.data.datasets is not None:
        return None
    parts = (
        *(task.script, task.module, task.wrapper, task.cwd, task.path),
        settings.lane.max_memory_growth_mib,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


class StandingLane(LaneTrainable):
    """A lane of which Tune's `stop` ends only the turn where `stay` came before."""

    _stays = False
    _standing: Standing | None = None

    def stay(self) -> None:
        """Wait for another sweep after the next `stop`: this one needs the lane no more."""
        self._stays = True

    def standing(self) -> Standing | None:
        """What the lane is between two sweeps; None where it cannot go on."""
        return self._standing

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Take the next trial, which may be another sweep's."""
        self._standing, self._stays = None, False
        return super().reset_config(new_config)

    def cleanup(self) -> None:
        """Wait for another sweep, or end."""
        key, lane = key_of(self._settings), self._lane
        is_sound = lane.stop()
        if self._stays and is_sound and lane.is_usable and key is not None:
            self._standing = Standing(key, lane.shape, time.time(), lane.loaded_s, lane.files)
        else:
            lane.close(is_broken=not is_sound)
            self._leave()

    def _leave(self) -> None:
        """End this process: a detached actor outlives its last handle."""
        ray.actor.exit_actor()


class LaneActors(_ActorClassCache):
    """Gives Tune lanes where it asks for an actor's class; they start before Tune does."""

    def __init__(
        self,
        settings: LaneSettings,
        shape: LaneShape,
        *,
        num_ahead: int,
        max_lanes: int,
        stay: bool,
    ) -> None:
        """Start lanes of a shape, or take over those that wait for this program.

        Args:
            settings: Of the lanes.
            shape: Of most trials.
            num_ahead: How many trials of it there will be at once, as far as is known.
            max_lanes: How many fit at once.
            stay: Whether lanes outlive the sweep.
        """
        super().__init__()
        self._settings, self._shape, self.stay = settings, shape, stay
        self._free: list[Any] = []
        self._take_over(key_of(settings) if stay else None, max_lanes)
        while len(self._free) < num_ahead:
            self._free.append(self._start(shape))

    def get(self, trainable_cls: type) -> Any:
        """What Tune takes for the class of its actor."""
        del trainable_cls
        return _LaneSource(self)

    def take(self, config: dict[str, Any], storage: Any) -> ActorHandle:
        """A lane for the trial of a config."""
        shape: LaneShape = config["spec"].shape
        if shape != self._shape:  # Those that wait could be in its way.
            self._end_free()
        lane = self._free.pop(0) if self._free else self._start(shape)
        lane.reset.remote(config, storage=storage)
        return lane

    def end_unused(self) -> None:
        """End the lanes that no trial came for, unless they wait for another sweep."""
        if not self.stay:
            self._end_free()

    def _end_free(self) -> None:
        """End the lanes that wait; by word, so that each frees what its workers reserve."""
        while self._free:
            self._free.pop().stop.remote()

    def _take_over(self, key: str | None, max_lanes: int) -> None:
        """Take the lanes that wait for a program; end the others, which hold what ours need."""
        for name, standing in _all_standing():
            is_ours = standing is not None and (standing.key, standing.shape) == (key, self._shape)
            is_wanted = standing is not None and is_ours and len(self._free) < max_lanes
            if standing is not None and is_wanted and standing.is_current:
                with suppress(ValueError):  # It ended in this moment.
                    self._free.append(ray.get_actor(name, NAMESPACE))
            else:
                end(name)

    def _start(self, shape: LaneShape) -> ActorHandle:
        lane_class = super().get(StandingLane if self.stay else LaneTrainable)
        options: dict[str, Any] = {"num_cpus": 0}
        if self.stay:
            name = f"lane-{secrets.token_hex(8)}"
            options |= {"lifetime": "detached", "name": name, "namespace": NAMESPACE}
        config = {"settings": self._settings, "shape": shape}
        return lane_class.options(**options).remote(config=config)


class _LaneSource:
    """Stands in for an actor's class: `remote` gives an actor that is there already."""

    __class__ = ActorClass  # Else Tune would make an actor's class of it.

    def __init__(self, lanes: LaneActors) -> None:
        self._lanes = lanes

    def options(self, **_: Any) -> _LaneSource:
        """As of an actor's class. A lane's own process reserves nothing."""
        return self

    def remote(self, *, config: dict[str, Any], storage: Any) -> ActorHandle:
        """As of an actor's class."""
        return self._lanes.take(config, storage)


def end_all_but_standing() -> list[tuple[str, Standing]]:
    """End what a sweep left behind; the lanes that wait for the next one, the oldest first."""
    found = []
    for name, standing in _all_standing():
        if standing is None:
            end(name)
        else:
            found.append((name, standing))
    return sorted(found, key=lambda each: each[1].since_s)


def end(name: str) -> None:
    """End a lane, and with it its workers."""
    try:
        ray.kill(ray.get_actor(name, NAMESPACE))
    except ValueError:
        logger.debug("lane %s was gone already", name)


def _all_standing() -> Iterable[tuple[str, Standing | None]]:
    """Name of each lane that there is, and what it says of itself; None where it does not wait."""
    names = [
        each["name"]
        for each in ray.util.list_named_actors(all_namespaces=True)
        if each["namespace"] == NAMESPACE
    ]
    asked = []
    for name in names:
        try:
            asked.append((name, ray.get_actor(name, NAMESPACE).standing.remote()))
        except ValueError:  # It ended in this moment.
            continue
    until = time.monotonic() + _ANSWER_S
    for name, answer in asked:
        try:
            yield name, ray.get(answer, timeout=max(0.0, until - time.monotonic()))
        except (ray.exceptions.RayError, TimeoutError):
            yield name, None
