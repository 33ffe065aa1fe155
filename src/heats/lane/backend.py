"""How the workers of a lane are joined: torch's process group, or another framework's network.

Verified on ray 2.60; tests/integration/test_ray_contract.py covers the private names.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.train._internal.utils import get_address_and_port
from ray.train.backend import Backend, BackendConfig
from ray.train.v2._internal.util import TrainingFramework

from heats.config import Framework

if TYPE_CHECKING:
    from heats.trial import LaneShape


def backend_config(shape: LaneShape) -> BackendConfig:
    """Ray Train's backend for a shape."""
    match shape.framework:
        case Framework.xgboost:
            from ray.train.xgboost import XGBoostConfig

            return XGBoostConfig()
        case Framework.lightgbm:
            from ray.train.lightgbm import LightGBMConfig

            return LightGBMConfig()
    has_own_gpus = shape.resources_per_worker.get("GPU", 0) >= 1
    # NCCL refuses two ranks on one device.
    has_nccl = shape.use_gpu and (has_own_gpus or shape.num_workers == 1)
    return WorkerTorchConfig(shape.backend or ("nccl" if has_nccl else "gloo"), shape.timeout_s)


@dataclass
class WorkerTorchConfig(BackendConfig):
    """What `ray.train.torch.TorchConfig()` does, with torch loaded by the workers alone."""

    backend: str
    timeout_s: int

    @property
    def backend_cls(self) -> type[Backend]:
        """Sets the process group up."""
        return WorkerTorchBackend

    @property
    def train_func_context(self) -> type[WorkerDevice]:
        """Wraps the train function."""
        return WorkerDevice

    @property
    def framework(self) -> TrainingFramework:
        """What the run is said to use."""
        return TrainingFramework.TORCH


class WorkerTorchBackend(Backend):
    """Starts the workers' torch process group."""

    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: WorkerTorchConfig) -> None:
        """Let every worker join; returns when all of them have."""
        address, port = worker_group.execute_single(0, get_address_and_port)
        joining = [
            worker_group.execute_single_async(
                rank,
                _join_process_group,
                backend=backend_config.backend,
                own_rank=rank,
                world_size=len(worker_group),
                address=address,
                port=port,
                timeout_s=backend_config.timeout_s,
            )
            for rank in range(len(worker_group))
        ]
        ray.get(joining)

    def on_shutdown(self, worker_group: Any, backend_config: BackendConfig) -> None:
        """Nothing: the workers' processes end with their lane."""


class WorkerDevice:
    """In a worker: the current CUDA device is the worker's own, as `TorchTrainer` has it."""

    def __enter__(self) -> None:
        """Set the device."""
        from ray.train.torch.config import TorchConfigContextManager

        TorchConfigContextManager().__enter__()

    def __exit__(self, *_: object) -> None:
        """Nothing to put back."""


def _join_process_group(
    *, backend: str, own_rank: int, world_size: int, address: str, port: int, timeout_s: int
) -> None:
    from ray.train.torch.config import _set_torch_distributed_env_vars
    from ray.train.torch.config import _setup_torch_process_group as setup

    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address, str(port)
    _set_torch_distributed_env_vars()
    setup(backend, own_rank, world_size, "env://", timeout_s)
