"""Settings and data of the GPT-2 recipes' tests: a few blocks, as Ray Data would give them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from heats.recipes import gpt2
from heats.recipes.offline.packages import GENSIM, GPT2_BPE

DATA_DIR = Path(__file__).parents[3] / ".cache" / "data"

needs_packages = pytest.mark.skipif(
    not all((DATA_DIR / package.file).is_file() for package in (GENSIM, GPT2_BPE)),
    reason="needs `make data`",
)

CONFIG: dict[str, Any] = {
    "lr": 1e-2,
    "batch_size": 4,
    "weight_decay": 0.1,
    "seed": 0,
    "source": "wikipedia-gensim",
    "name": None,
    "data_dir": str(DATA_DIR),
    "block_size": 16,
    "lines_per_part": 8192,
    "max_val_lines": 4,
    "shuffle_buffer": 64,
    "n_positions": 16,
    "n_embd": 8,
    "n_layer": 2,
    "n_head": 2,
    "dropout": 0.0,
    "precision": "fp32",
}
NUM_BLOCKS = 64


class Shards:
    """Stands for `ray.train.get_dataset_shard`: the first blocks of each dataset."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._blocks = {
            "train": gpt2.blocks(config, "train")[:NUM_BLOCKS],
            "validation": gpt2.blocks(config, "validation"),
        }

    def get(self, name: str) -> Shard:
        return Shard(self._blocks[name])


class Shard:
    """Gives batches as a `ray.data.DataIterator` does."""

    def __init__(self, blocks: Any) -> None:
        self._blocks = blocks

    def iter_torch_batches(
        self,
        *,
        batch_size: int,
        drop_last: bool = False,
        local_shuffle_buffer_size: int | None = None,
        local_shuffle_seed: int | None = None,
    ) -> list[dict[str, torch.Tensor]]:
        order = np.arange(len(self._blocks))
        if local_shuffle_buffer_size:
            order = np.random.default_rng(local_shuffle_seed).permutation(order)
        end = len(order) - len(order) % batch_size if drop_last else len(order)
        return [
            {gpt2.TOKENS: torch.from_numpy(self._blocks[order[start:end][:batch_size]])}
            for start in range(0, end, batch_size)
        ]
