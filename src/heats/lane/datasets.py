"""Ray Datasets that all trials of a sweep share, split between the ranks of each lane.

One actor makes the datasets, owns their blocks, and splits them as Ray Train does (`DataConfig`,
`streaming_split`). Where a sweep has none, nothing here starts.

A trial that stopped in the middle of an epoch leaves nothing to the next: every epoch of a split
starts anew when all ranks ask for it, and each turn has iterators of its own, so one that is
cleaned up late speaks for an epoch that is over. What is computed anew in every epoch may count the
epochs (a shuffle with a seed does), so there a turn also gets a split of its own.
"""

from __future__ import annotations

import contextlib
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import ray

if TYPE_CHECKING:
    from collections.abc import Iterator

    from heats.config import DataConf
    from heats.lane.lane import LaneSettings
    from heats.lane.pulse import Pulse
    from heats.lane.task import TaskRef

_NUM_CALLS = 16
"""Calls at once: one makes a dataset, the others wait for it in a thread each."""

_LOOK_EVERY_S = 1.0


def unknown_dataset(name: object, known: Any) -> KeyError:
    """What a trial gets that asks for a dataset which it has not; Ray Train raises a KeyError."""
    return KeyError(
        f"Dataset shard for {name!r} not found. Known: {', '.join(sorted(known)) or 'none'}. "
        "Set data.datasets (docs/ray-train.md)."
    )


def make_dataset(node: dict[str, Any]) -> Any:
    """The `ray.data.Dataset` that a node of `data.datasets` describes.

    Raises:
        TypeError: The node makes something else.
    """
    import ray.data
    from hydra.utils import instantiate

    dataset = instantiate(node)
    if not isinstance(dataset, ray.data.Dataset):
        msg = f"{node['_target_']} made a {type(dataset).__name__}, not a ray.data.Dataset."
        raise TypeError(msg)
    return dataset


class SharedDatasets:
    """An actor's class: makes each dataset once, and splits it for each lane."""

    def __init__(self, conf: DataConf, task: TaskRef) -> None:
        task.load()  # Targets may be in the user's program, or where only that finds them.
        from ray.data import DataContext

        context = DataContext.get_current()
        context.enable_progress_bars = False
        # Trials are compared with each other: all of them see the same order.
        context.execution_options.preserve_order = True
        self._conf = conf
        self._lock = threading.Lock()
        self._making = {name: threading.Lock() for name in conf.datasets}
        self._datasets: dict[str, Any] = {}
        self._splits: dict[tuple[str, str], tuple[int, list[Any]]] = {}

    def make(self, name: str) -> None:
        """Have the dataset; the first call makes it."""
        with self._making[name]:
            if name not in self._datasets:
                dataset = make_dataset(self._conf.datasets[name])
                self._datasets[name] = dataset.materialize() if self._conf.materialize else dataset

    def shard(self, name: str, lane: str, turn: int, rank: int, world_size: int) -> Any:
        """The `ray.data.DataIterator` of a rank for one turn of a lane."""
        self.make(name)
        with self._lock:
            made_in, shards = self._splits.get((lane, name), (0, []))
            if not shards or not (self._conf.materialize or made_in == turn):
                shards = self._split(name, world_size)
                self._splits[lane, name] = turn, shards
        return shards[rank]

    def release(self, lane: str) -> None:
        """Forget the splits of a lane that ended; their processes end with them."""
        with self._lock:
            for key in [key for key in self._splits if key[0] == lane]:
                del self._splits[key]

    def _split(self, name: str, world_size: int) -> list[Any]:
        from ray.train import DataConfig

        config = DataConfig(self._conf.datasets_to_split)
        of_ranks = config.configure({name: self._datasets[name]}, world_size, None, None)
        return [shards[name] for shards in of_ranks]


class TurnShards:
    """Gives a rank its shards for one turn; Ray Train calls it a dataset shard provider."""

    def __init__(
        self, conf: DataConf, sweep_id: str, lane: str, turn: int, world_size: int, pulse: Pulse
    ) -> None:
        self._conf, self._sweep_id, self._lane, self._turn = conf, sweep_id, lane, turn
        self._world_size, self._pulse = world_size, pulse
        self._shards: dict[str, Any] = {}

    def get_dataset_shard(self, dataset_info: Any) -> Any:
        """The `ray.data.DataIterator` of this rank; the first call may wait for the dataset.

        Raises:
            KeyError: There is no dataset of that name.
        """
        name, rank = dataset_info.dataset_name, dataset_info.world_rank
        known = self._conf.datasets or {}
        if name not in known:
            raise unknown_dataset(name, known)
        if name not in self._shards:
            actor = ray.get_actor(_actor_name(self._sweep_id))
            coming = actor.shard.remote(name, self._lane, self._turn, rank, self._world_size)
            while not ray.wait([coming], timeout=_LOOK_EVERY_S)[0]:
                self._pulse.moved()  # It is being made, however long that takes: no hang.
            self._shards[name] = ray.get(coming)
        return self._shards[name]


@contextmanager
def shared_datasets(settings: LaneSettings) -> Iterator[None]:
    """Have the sweep's datasets made, from now on, and their actor until the end."""
    if not settings.data.datasets:
        yield
        return
    actor_class = ray.remote(num_cpus=0, max_concurrency=_NUM_CALLS, max_restarts=1)(SharedDatasets)
    actor = actor_class.options(name=_actor_name(settings.sweep_id)).remote(
        settings.data, settings.task
    )
    if settings.data.materialize:  # While the lanes start. Whoever asks first learns of errors.
        for name in settings.data.datasets:
            actor.make.remote(name)
    try:
        yield
    finally:
        ray.kill(actor)


def release_shards(settings: LaneSettings, lane: str) -> None:
    """A lane ended: its splits are needed no more."""
    if settings.data.datasets:
        with contextlib.suppress(ValueError, ray.exceptions.RayError):  # The sweep ended as well.
            ray.get_actor(_actor_name(settings.sweep_id)).release.remote(lane)


def _actor_name(sweep_id: str) -> str:
    return f"{sweep_id}-datasets"
