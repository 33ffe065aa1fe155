"""Fixtures that several folders share, and the rules that hold for each folder."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

REPO = Path(__file__).parents[1]

# Seconds a test may take, its fixtures included. The first integration test starts Ray.
TIMEOUT_S = {"unit": 10, "integration": 120, "e2e": 300}

# Quiet libraries (no usage statistics, nothing from a model hub), and a Ray Train that polls its
# workers four times a second rather than every 2 s. Ray reads these when a process starts, and
# subprocesses and Ray workers inherit them.
ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.25",
    "RAY_TRAIN_ENABLE_STATE_TRACKING": "0",
    # Silences Ray's FutureWarning that this will be the default: without GPUs, hide none.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


def pytest_configure() -> None:
    """Set the environment before any test module, and so any library, is imported."""
    os.environ.update(ENVIRONMENT)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each test its folder's timeout, and skip `gpu` tests where there is no CUDA device."""
    for item in items:
        folder = item.path.relative_to(REPO / "tests").parts[0]
        if folder in TIMEOUT_S and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S[folder]))
    on_gpu = [item for item in items if item.get_closest_marker("gpu") is not None]
    if on_gpu and not _has_cuda():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[str]:
    """Address of a local Ray cluster with 4 logical CPUs, shared by the whole test session.

    With the dashboard: without it, Train runs that are stopped never give their CPUs back.
    """
    import ray

    ray.init(num_cpus=4, include_dashboard=True, log_to_driver=False, logging_level=logging.ERROR)
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


@pytest.fixture
def project_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new current directory with a copy of `sweep.py`, `conf/` and `sweeps/`, and no outputs."""
    for name in ("sweep.py", "conf", "sweeps"):
        source = REPO / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name)
        else:
            shutil.copy(source, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path
