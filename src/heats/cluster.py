"""The Ray cluster a sweep runs on, and how many trials fit on it at once."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import os
import signal
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heats.config import Placement
from heats.errors import ConfigError
from heats.service import current
from heats.trial import LaneShape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from heats.config import BackendConf, ClusterConf, ScalingConf
    from heats.service import Up

_EPSILON = 1e-9
_SHARE_OF_TYPE = 0.001

_RAY_ENV = {
    # Train's controller looks at its workers this often; a lane's start and end wait for it.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    # Output goes to per-trial files, so `print` must stay what it is.
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_TRAIN_ENABLE_STATE_TRACKING": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # One process less for each lane to start.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
    # What Ray starts in advance has another environment than lanes and workers: nobody uses it.
    "RAY_prestart_worker_first_driver": "0",
}


@dataclass(frozen=True, slots=True)
class Node:
    """Resources of one node, by Ray's names (`CPU`, `GPU`, custom ones)."""

    resources: dict[str, float]


def local_node(conf: ClusterConf) -> Node:
    """This machine as one node, without starting Ray or loading torch."""
    cpus = conf.num_cpus if conf.num_cpus is not None else len(os.sched_getaffinity(0))
    gpus = conf.num_gpus if conf.num_gpus is not None else _num_local_gpus()
    return Node({"CPU": float(cpus), **({"GPU": float(gpus)} if gpus else {})})


def without(nodes: list[Node], resources: dict[str, float]) -> list[Node]:
    """The nodes with so much taken from the one that has most; not below nothing."""
    names = [name for name, amount in resources.items() if amount > 0]
    if not nodes or not names:
        return nodes

    def amounts(node: Node) -> list[float]:
        return [node.resources.get(name, 0) for name in reversed(names)]

    largest = max(nodes, key=amounts)
    left = {
        name: max(0.0, amount - resources.get(name, 0))
        for name, amount in largest.resources.items()
    }
    return [Node(left) if node is largest else node for node in nodes]


def lane_shape(
    conf: ScalingConf,
    backend: BackendConf,
    nodes: list[Node],
    *,
    is_single_run: bool,
    now: list[Node] | None = None,
) -> LaneShape:
    """The workers of one trial on these nodes.

    A run without a search space takes every GPU, one worker each, or else all CPUs of a node in one
    worker. A sweep's trial takes one GPU, or else one CPU, so that many run at once. A trial whose
    workers are elastic takes as many as fit on the nodes that there are `now`, which may have
    become others since the sweep began; None: the same.

    Raises:
        ConfigError: Not even one trial fits; the message names the key and what the cluster has.
    """
    num_gpus = sum(node.resources.get("GPU", 0) for node in nodes)
    use_gpu = num_gpus >= 1 if conf.use_gpu is None else conf.use_gpu
    num_workers, least = conf.num_workers, None
    if isinstance(num_workers, list):
        least, num_workers = num_workers
    per_worker = dict(conf.resources_per_worker or {})
    if not per_worker:
        per_worker = {"GPU": 1.0} if use_gpu else {"CPU": 1.0}
        if is_single_run and not use_gpu and num_workers is None:
            per_worker = {"CPU": max(node.resources.get("CPU", 1) for node in nodes)}
    if num_workers is None:
        num_workers = int(num_gpus) if is_single_run and use_gpu else 1
    if conf.accelerator_type is not None:  # As Ray's ScalingConfig asks for it.
        per_worker[f"accelerator_type:{conf.accelerator_type}"] = _SHARE_OF_TYPE
    shape = LaneShape(
        max(num_workers, 1),
        use_gpu,
        per_worker,
        backend.framework,
        backend.backend,
        backend.timeout_s,
        conf.placement_strategy,
    )
    if least is not None:
        counts = range(shape.num_workers, least - 1, -1)
        elastic = [dataclasses.replace(shape, num_workers=count) for count in counts]
        there = nodes if now is None else now
        fitting = (each for each in elastic if capacity(each, there) >= 1)
        shape = next(fitting, elastic[-1])
        if now is not None:
            return shape  # Where too few are left it waits for more.
    if capacity(shape, nodes) < 1:
        total: dict[str, float] = {}
        for node in nodes:
            for name, amount in node.resources.items():
                if name in per_worker:
                    total[name] = total.get(name, 0) + amount
        needed = " + ".join(f"{amount:g} {name}" for name, amount in per_worker.items())
        has = ", ".join(f"{total.get(name, 0):g} {name}" for name in per_worker)
        msg = (
            f"scaling.num_workers={shape.num_workers} workers of {needed} each do not fit: the "
            f"cluster has {has}. Ask for fewer workers, or for less in "
            f"scaling.resources_per_worker"
            + ("; scaling.use_gpu=false trains on CPUs." if use_gpu else ".")
        )
        raise ConfigError(msg)
    return shape


def capacity(shape: LaneShape, nodes: list[Node]) -> int:
    """How many trials of this shape fit on the nodes at once; a worker never spans nodes."""
    num_trials = 0
    free = [_Free(node) for node in nodes]
    while _place(shape, free):
        num_trials += 1
        if not any(shape.resources_per_worker.values()):
            break  # Workers that need nothing fit for ever.
    return num_trials


def fits(shapes: list[LaneShape], nodes: list[Node]) -> bool:
    """Whether lanes of all these shapes fit on the nodes together: the largest workers go first."""

    def size(shape: LaneShape) -> tuple[float, float]:
        return shape.resources_per_worker.get("GPU", 0), shape.resources_per_worker.get("CPU", 0)

    free = [_Free(node) for node in nodes]
    return all(_place(shape, free) for shape in sorted(shapes, key=size, reverse=True))


def _place(shape: LaneShape, free: list[_Free]) -> bool:
    """Take what the workers of a trial need; of one that does not fit some may be taken as well."""
    worker, workers = shape.resources_per_worker, range(shape.num_workers)
    match shape.placement:
        case Placement.STRICT_PACK:
            for node in free:
                trial = copy.deepcopy(node)
                if all(trial.take(worker) for _ in workers):
                    free[free.index(node)] = trial
                    return True
            return False
        case Placement.STRICT_SPREAD:
            taken = (node.take(worker) for node in sorted(free, key=_Free.left, reverse=True))
            return sum(itertools.islice(filter(None, taken), len(workers))) == len(workers)
    return all(any(node.take(worker) for node in free) for _ in workers)


class _Free:
    """What a node has left. GPUs are single devices: a worker has whole ones, or part of one."""

    def __init__(self, node: Node) -> None:
        self._rest = {name: amount for name, amount in node.resources.items() if name != "GPU"}
        self._gpus = [1.0] * int(node.resources.get("GPU", 0))

    def left(self) -> tuple[float, float]:
        """GPUs and CPUs."""
        return sum(self._gpus), self._rest.get("CPU", 0)

    def take(self, worker: dict[str, float]) -> bool:
        """Take what a worker needs, or nothing where that is too much."""
        amount = worker.get("GPU", 0)
        share, num_devices = min(amount, 1), math.ceil(amount - _EPSILON)
        rest = {name: need for name, need in worker.items() if name != "GPU" and need > 0}
        if any(self._rest.get(name, 0) + _EPSILON < need for name, need in rest.items()):
            return False
        fitting = [i for i, left in enumerate(self._gpus) if left + _EPSILON >= share]
        if len(fitting) < num_devices:
            return False
        fitting.sort(key=lambda i: self._gpus[i])  # Those in part use come first.
        for index in fitting[:num_devices]:
            self._gpus[index] -= share
        for name, need in rest.items():
            self._rest[name] -= need
        return True


def service_of(conf: ClusterConf) -> Up | None:
    """The service whose cluster a sweep of this process runs on; None: it has another one."""
    up = current()
    is_wanted = conf.address is None and not conf.dashboard
    has_all = up is not None and (
        conf.num_cpus in (None, up.num_cpus) and conf.num_gpus in (None, up.num_gpus)
    )
    return up if is_wanted and has_all else None


@contextmanager
def ray_cluster(conf: ClusterConf) -> Iterator[list[Node]]:
    """Connect to the cluster, or start a local one, and give its nodes; leave it at the end.

    In a driver that `heats up` keeps, the local one is there already.

    A Ray that this process is already connected to is used as it is, and left alone.

    Raises:
        ConfigError: There is no cluster at `cluster.address`.
    """
    import ray

    if ray.is_initialized():
        yield live_nodes()
        return
    saved = {key: os.environ.get(key) for key in _RAY_ENV}
    os.environ.update({key: os.environ.get(key, value) for key, value in _RAY_ENV.items()})
    options: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": "ERROR",
    }
    if (up := service_of(conf)) is not None:
        options["address"] = up.address
    elif conf.address is None:
        resources = local_node(conf).resources
        options |= {
            "address": "local",
            "include_dashboard": conf.dashboard,
            "num_cpus": int(resources["CPU"]),
            "num_gpus": int(resources.get("GPU", 0)),
        }
    else:
        options |= {"address": conf.address, "runtime_env": {"env_vars": _RAY_ENV}}
    is_main = threading.current_thread() is threading.main_thread()
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(**options)
        if (
            is_main and on_sigterm is not None
        ):  # Ray puts its own in place, which ends the process at once.
            signal.signal(signal.SIGTERM, on_sigterm)
    except (ConnectionError, ValueError) as exc:
        msg = f"cluster.address={conf.address!r:.80} cannot be used: {exc}"
        raise ConfigError(msg) from exc
    try:
        yield live_nodes()
    finally:
        ray.shutdown()
        for key, value in saved.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


def dashboard_url() -> str | None:
    """Address of the Ray dashboard of the connected cluster."""
    import ray

    if not ray.is_initialized():
        return None
    url = ray._private.worker.get_dashboard_url()
    return f"http://{url}" if url else None


def live_nodes() -> list[Node]:
    """The nodes that the connected cluster has now."""
    import ray

    return [Node(dict(node["Resources"])) for node in ray.nodes() if node["Alive"]]


def _num_local_gpus() -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    folder = Path("/proc/driver/nvidia/gpus")
    return len(list(folder.iterdir())) if folder.is_dir() else 0
