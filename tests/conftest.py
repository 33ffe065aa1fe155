"""Fixtures that several folders share, and the rules that hold for each folder."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from heats.config import ClusterConf

if TYPE_CHECKING:
    from collections.abc import Iterator

REPO = Path(__file__).parents[1]

# Seconds a test may take, its fixtures included. The first integration test starts Ray.
TIMEOUT_S = {"unit": 30, "integration": 120, "e2e": 300}

# Quiet libraries: no usage statistics, nothing from a model hub. Subprocesses inherit it.
ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_OFFLINE": "1",
}


def pytest_configure() -> None:
    """Set the environment before any test module, and so any library, is imported."""
    os.environ.update(ENVIRONMENT)
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


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
    """Address of a local Ray cluster with 4 logical CPUs, shared by the test session.

    It is the one that `cluster.address=null` gives a user, with all GPUs; a sweep in the test
    process joins it.
    """
    import ray

    from heats import cluster

    with cluster.ray_cluster(ClusterConf(num_cpus=4)):
        yield ray.get_runtime_context().gcs_address


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
