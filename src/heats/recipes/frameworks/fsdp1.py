"""PyTorch FullyShardedDataParallel (FSDP1), with whole checkpoints that rank 0 writes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.functional import cross_entropy

from heats.recipes.frameworks import common

CHECKPOINT = "checkpoint.pt"

# Without `cpu_offload=True`, which in torch 2.13 frees weights that are on a CPU already.
WHOLE = StateDictOptions(full_state_dict=True)


def train(config: dict[str, Any]) -> None:
    """Train on every rank, reporting metrics and a checkpoint after each epoch.

    Args:
        config: `lr`, `batch_size` (of all workers together), `epochs`, `weight_decay`, `seed`,
            `hidden` (width of both hidden layers), `dropout`.
    """
    device = ray.train.torch.get_device()
    loader = common.train_loader(config)
    model = FullyShardedDataParallel(
        common.network(config),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),  # Each layer is a unit of its own.
        device_id=device,
    )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config["lr"], weight_decay=config["weight_decay"]
    )
    epochs_done = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as directory:
            state = torch.load(Path(directory, CHECKPOINT), map_location="cpu", weights_only=True)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=WHOLE,
        )
        epochs_done = state["epoch"]

    for epoch in range(epochs_done + 1, config["epochs"] + 1):
        common.begin_epoch(config, epoch, loader)
        model.train()
        losses = []
        for images, labels in loader:
            loss = cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss)
        metrics = common.epoch_metrics(epoch, losses, model)
        # Every rank takes part in gathering the shards, and rank 0 saves what they are together.
        weights, moments = get_state_dict(model, optimizer, options=WHOLE)
        if ray.train.get_context().get_world_rank() != 0:
            ray.train.report(metrics)
            continue
        with tempfile.TemporaryDirectory() as directory:
            state = {"model": weights, "optimizer": moments, "epoch": epoch}
            torch.save(state, Path(directory, CHECKPOINT))
            ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(directory))


def evaluate(config: dict[str, Any], checkpoint_dir: str) -> dict[str, float]:
    """`val_loss` and `val_accuracy` of a checkpoint, computed anew on the validation data."""
    network = common.network(config)
    state = torch.load(Path(checkpoint_dir, CHECKPOINT), map_location="cpu", weights_only=True)
    network.load_state_dict(state["model"])
    return common.evaluate(network)
