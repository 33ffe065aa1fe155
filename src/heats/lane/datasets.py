"""Ray Datasets that the trials of a sweep share, split between the ranks of each lane.

One actor makes the datasets, owns their blocks, and splits them as Ray Train does (`DataConfig`,
`streaming_split`). A dataset is known by its node in the trial's own config: trials whose nodes are
the same share it. Where a sweep has none, nothing here starts.

A trial that stopped in the middle of an epoch leaves nothing to the next: every epoch of a split
starts anew when all ranks ask for it, and each turn has iterators of its own, so one that is
cleaned up late speaks for an epoch that is over. What is computed anew in every epoch may count the
epochs (a shuffle with a seed does), so there a turn also gets a split of its own.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import ray

from heats.config import DataConf
from heats.settings import section

if TYPE_CHECKING:
    from collections.abc import Iterator

    from heats.lane.lane import LaneSettings
    from heats.lane.pulse import Pulse
    from heats.lane.task import TaskRef
    from heats.trial import TrialSpec

_NUM_CALLS = 16
"""Calls at once: one makes a dataset, the others wait for it in a thread each."""

_LOOK_EVERY_S = 1.0


def unknown_dataset(name: object, known: Any) -> KeyError:
    """What a trial gets that asks for a dataset which it has not; Ray Train raises a KeyError."""
    return KeyError(
        f"Dataset shard for {name!r} not found. Known: {', '.join(sorted(known)) or 'none'}. "
        "Set data.datasets (docs/ray-train.md)."
    )


def data_of(spec: TrialSpec) -> DataConf:
    """The datasets that a trial's own config names; its classes are loaded by now."""
    return section(DataConf, pickle.loads(spec.config), "data")


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
        self._making: dict[str, threading.Lock] = {}
        self._datasets: dict[str, Any] = {}
        self._splits: dict[tuple[str, str], _Split] = {}

    def make(self, node: dict[str, Any]) -> None:
        """Have the dataset; the first call makes it."""
        key = _key(node)
        with self._lock:
            making = self._making.setdefault(key, threading.Lock())
        with making:
            if key not in self._datasets:
                dataset = make_dataset(node)
                self._datasets[key] = dataset.materialize() if self._conf.materialize else dataset

    def shard(
        self, name: str, node: dict[str, Any], lane: str, turn: int, rank: int, world_size: int
    ) -> Any:
        """The `ray.data.DataIterator` of a rank for one turn of a lane."""
        self.make(node)
        key = _key(node)
        with self._lock:
            split = self._splits.get((lane, name))
            if split is None or not split.serves(key, None if self._conf.materialize else turn):
                split = _Split(key, turn, self._split(name, key, world_size))
                self._splits[lane, name] = split
        return split.shards[rank]

    def release(self, lane: str) -> None:
        """Forget the splits of a lane that ended; their processes end with them."""
        with self._lock:
            for key in [key for key in self._splits if key[0] == lane]:
                del self._splits[key]

    def _split(self, name: str, key: str, world_size: int) -> list[Any]:
        from ray.train import DataConfig

        config = DataConfig(self._conf.datasets_to_split)
        of_ranks = config.configure({name: self._datasets[key]}, world_size, None, None)
        return [shards[name] for shards in of_ranks]


class _Split(NamedTuple):
    """A dataset, by its key, shared out to the ranks of a lane in one of its turns."""

    key: str
    turn: int
    shards: list[Any]

    def serves(self, key: str, turn: int | None) -> bool:
        """Whether it is of that dataset, and of that turn; None: of any."""
        return self.key == key and turn in (None, self.turn)


def _key(node: dict[str, Any]) -> str:
    return json.dumps(node, sort_keys=True)


class TurnShards:
    """Gives a rank its shards for one turn; Ray Train calls it a dataset shard provider."""

    def __init__(
        self, spec: TrialSpec, sweep_id: str, lane: str, turn: int, world_size: int, pulse: Pulse
    ) -> None:
        self._spec, self._sweep_id, self._lane, self._turn = spec, sweep_id, lane, turn
        self._world_size, self._pulse = world_size, pulse
        self._nodes: dict[str, Any] | None = None
        self._shards: dict[str, Any] = {}

    def get_dataset_shard(self, dataset_info: Any) -> Any:
        """The `ray.data.DataIterator` of this rank; the first call may wait for the dataset.

        Raises:
            KeyError: There is no dataset of that name.
        """
        name, rank = dataset_info.dataset_name, dataset_info.world_rank
        if self._nodes is None:  # Read once asked for: most trials have none.
            self._nodes = data_of(self._spec).datasets or {}
        if name not in self._nodes:
            raise unknown_dataset(name, self._nodes)
        if name not in self._shards:
            actor = ray.get_actor(_actor_name(self._sweep_id))
            coming = actor.shard.remote(
                name, self._nodes[name], self._lane, self._turn, rank, self._world_size
            )
            while not ray.wait([coming], timeout=_LOOK_EVERY_S)[0]:
                self._pulse.moved()  # It is being made, however long that takes: no hang.
            self._shards[name] = ray.get(coming)
        return self._shards[name]


@contextmanager
def shared_datasets(settings: LaneSettings) -> Iterator[None]:
    """Have the datasets made, beginning with those of the settings, and their actor until the end.

    The settings have the first trial's. Where trials need others, these are made once asked for.
    """
    if not settings.data.datasets:
        yield
        return
    actor_class = ray.remote(num_cpus=0, max_concurrency=_NUM_CALLS, max_restarts=1)(SharedDatasets)
    actor = actor_class.options(name=_actor_name(settings.sweep_id)).remote(
        settings.data, settings.task
    )
    if settings.data.materialize:  # While the lanes start. Whoever asks first learns of errors.
        for node in settings.data.datasets.values():
            actor.make.remote(node)
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
