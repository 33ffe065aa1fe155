"""The Ray cluster a sweep runs on, and how many trials fit on it at once."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heats.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from heats.config import ClusterConf, ScalingConf

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


@dataclass(frozen=True, slots=True)
class WorkerShape:
    """Workers of one trial: how many, and what each of them reserves."""

    num_workers: int
    use_gpu: bool
    resources_per_worker: dict[str, float]


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


def worker_shape(conf: ScalingConf, nodes: list[Node], *, is_single_run: bool) -> WorkerShape:
    """The workers of one trial on these nodes.

    A run without a search space takes every GPU, one worker each, or else all CPUs of a node in one
    worker. A sweep's trial takes one GPU, or else one CPU, so that many run at once.

    Raises:
        ConfigError: Not even one trial fits; the message names the key and what the cluster has.
    """
    num_gpus = sum(node.resources.get("GPU", 0) for node in nodes)
    use_gpu = num_gpus >= 1 if conf.use_gpu is None else conf.use_gpu
    num_workers = conf.num_workers
    per_worker = dict(conf.resources_per_worker or {})
    if not per_worker:
        per_worker = {"GPU": 1.0} if use_gpu else {"CPU": 1.0}
        if is_single_run and not use_gpu and num_workers is None:
            per_worker = {"CPU": max(node.resources.get("CPU", 1) for node in nodes)}
    if num_workers is None:
        num_workers = int(num_gpus) if is_single_run and use_gpu else 1
    shape = WorkerShape(max(num_workers, 1), use_gpu, per_worker)
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


def capacity(shape: WorkerShape, nodes: list[Node]) -> int:
    """How many trials of this shape fit on the nodes at once; a worker never spans nodes."""
    num_workers = 0
    for node in nodes:
        fits = [
            int((node.resources.get(name, 0) + 1e-9) // amount)
            for name, amount in shape.resources_per_worker.items()
            if amount > 0
        ]
        num_workers += min(fits, default=1)
    return num_workers // shape.num_workers


@contextmanager
def ray_cluster(conf: ClusterConf) -> Iterator[list[Node]]:
    """Connect to the cluster, or start a local one, and give its nodes; leave it at the end.

    A Ray that this process is already connected to is used as it is, and left alone.

    Raises:
        ConfigError: There is no cluster at `cluster.address`.
    """
    import ray

    if ray.is_initialized():
        yield _nodes()
        return
    saved = {key: os.environ.get(key) for key in _RAY_ENV}
    os.environ.update({key: os.environ.get(key, value) for key, value in _RAY_ENV.items()})
    options: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": "ERROR",
    }
    if conf.address is None:
        resources = local_node(conf).resources
        options |= {
            "address": "local",
            "include_dashboard": conf.dashboard,
            "num_cpus": int(resources["CPU"]),
            "num_gpus": int(resources.get("GPU", 0)),
        }
    else:
        options |= {"address": conf.address, "runtime_env": {"env_vars": _RAY_ENV}}
    try:
        ray.init(**options)
    except (ConnectionError, ValueError) as exc:
        msg = f"cluster.address={conf.address!r:.80} cannot be used: {exc}"
        raise ConfigError(msg) from exc
    try:
        yield _nodes()
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


def _nodes() -> list[Node]:
    import ray

    return [Node(dict(node["Resources"])) for node in ray.nodes() if node["Alive"]]


def _num_local_gpus() -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    folder = Path("/proc/driver/nvidia/gpus")
    return len(list(folder.iterdir())) if folder.is_dir() else 0
