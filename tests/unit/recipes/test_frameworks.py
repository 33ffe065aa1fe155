"""The recipes in PyTorch's own words, on one rank with a process group of its own."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.unit.recipes.conftest import OneRank

CONFIG: dict[str, Any] = {
    "lr": 3e-3,
    "batch_size": 64,
    "epochs": 3,
    "weight_decay": 1e-4,
    "seed": 0,
    "hidden": 32,
    "dropout": 0.2,
    "loader_workers": 0,
}

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    """A process group of one rank, as Ray Train makes it."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("recipe", ["ddp", "fsdp1", "fsdp2"])
# One rank has no shards, which FSDP1 says, and torch calls deprecated functions of its own.
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_run_that_continues_equals_one_that_never_stopped(recipe: str, one_rank: OneRank) -> None:
    module = importlib.import_module(f"heats.recipes.frameworks.{recipe}")
    whole = one_rank.run(module.train, CONFIG)
    first = one_rank.checkpoints[0]

    rest = one_rank.run(module.train, CONFIG, continue_from=first)

    assert [metrics["epoch"] for metrics in whole] == [1, 2, 3]
    assert rest == whole[1:]
    assert whole[-1]["val_accuracy"] > 0.7
    found = module.evaluate(CONFIG, str(first))
    assert found == pytest.approx({key: whole[0][key] for key in found}, rel=1e-6)
