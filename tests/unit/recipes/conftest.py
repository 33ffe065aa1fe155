"""What Ray Train gives a train function, without Ray."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
import ray.train
import ray.train.torch
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


class OneRank:
    """The only rank of a training run: keeps what it reports, continues where it is told."""

    def __init__(self, storage: Path) -> None:
        self._storage = storage
        self._continue_from: Path | None = None
        self.metrics: list[dict[str, Any]] = []
        self.checkpoints: list[Path] = []

    def run(
        self,
        train: Callable[[dict[str, Any]], None],
        config: dict[str, Any],
        continue_from: Path | None = None,
    ) -> list[dict[str, Any]]:
        """The metrics that `train` reports; `checkpoints` holds those of the latest run."""
        self._storage = self._storage.parent / f"{self._storage.name}+"
        self._continue_from = continue_from
        self.metrics, self.checkpoints = [], []
        train(config)
        return self.metrics

    def get_world_rank(self) -> int:
        return 0

    def get_world_size(self) -> int:
        return 1

    def report(
        self, metrics: dict[str, Any], checkpoint: ray.train.Checkpoint | None = None
    ) -> None:
        self.metrics.append(dict(metrics))
        if checkpoint is not None:
            kept = self._storage / str(len(self.metrics))
            shutil.copytree(checkpoint.path, kept)
            self.checkpoints.append(kept)

    def get_checkpoint(self) -> ray.train.Checkpoint | None:
        return ray.train.Checkpoint(self._continue_from) if self._continue_from else None


@pytest.fixture
def one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OneRank]:
    """Stands for Ray Train in this process, with one thread, as a worker with one CPU has."""
    rank = OneRank(tmp_path / "storage")
    monkeypatch.setattr(ray.train, "get_context", lambda: rank)
    monkeypatch.setattr(ray.train, "report", rank.report)
    monkeypatch.setattr(ray.train, "get_checkpoint", rank.get_checkpoint)
    monkeypatch.setattr(ray.train.torch, "get_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(ray.train.torch, "prepare_model", lambda model: model)
    monkeypatch.setattr(ray.train.torch, "prepare_data_loader", lambda loader: loader)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield rank
    torch.set_num_threads(num_threads)
