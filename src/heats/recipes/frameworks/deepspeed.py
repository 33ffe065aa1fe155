"""DeepSpeed with ZeRO stage 1, 2 or 3: each rank saves its shards.

A checkpoint can be loaded by as many ranks as wrote it.
"""

from __future__ import annotations

import tempfile
from typing import Any

import deepspeed
import ray.train
import ray.train.torch
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch.nn.functional import cross_entropy

from heats.recipes.frameworks import common


def train(config: dict[str, Any]) -> None:
    """Train on every rank, reporting metrics and a checkpoint after each epoch.

    Args:
        config: `lr`, `batch_size` (of all workers together), `epochs`, `weight_decay`, `seed`,
            `hidden` (width of both hidden layers), `dropout`, `zero_stage` (0 to 3).
    """
    world_size = ray.train.get_context().get_world_size()
    network = common.network(config)
    optimizer = torch.optim.AdamW(
        network.parameters(), lr=config["lr"], weight_decay=config["weight_decay"]
    )
    engine, *_ = deepspeed.initialize(
        model=network,
        optimizer=optimizer,
        config={
            "train_micro_batch_size_per_gpu": max(1, config["batch_size"] // world_size),
            "zero_optimization": {"stage": config["zero_stage"]},
            "gradient_clipping": 1.0,  # As by default; no other framework here clips.
        },
    )
    try:
        _train(engine, config)
    finally:
        engine.destroy()  # Else its hooks keep it, and the weights, for as long as the process.


def _train(engine: deepspeed.DeepSpeedEngine, config: dict[str, Any]) -> None:
    device = ray.train.torch.get_device()
    loader = common.train_loader(config)
    epochs_done = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as directory:
            _, state = engine.load_checkpoint(directory)
        epochs_done = state["epoch"]

    for epoch in range(epochs_done + 1, config["epochs"] + 1):
        common.begin_epoch(config, epoch, loader)
        engine.train()
        losses = []
        for images, labels in loader:
            loss = cross_entropy(engine(images.to(device)), labels.to(device))
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        metrics = common.epoch_metrics(epoch, losses, engine)
        # Each rank writes to a directory of its own; the report makes one of them.
        with tempfile.TemporaryDirectory() as directory:
            engine.save_checkpoint(directory, client_state={"epoch": epoch})
            ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(directory))


def evaluate(config: dict[str, Any], checkpoint_dir: str) -> dict[str, float]:
    """`val_loss` and `val_accuracy` of a checkpoint, computed anew on the validation data."""
    network = common.network(config)
    network.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir))
    return common.evaluate(network)
