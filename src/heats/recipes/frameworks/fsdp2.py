"""PyTorch `fully_shard` (FSDP2), with sharded checkpoints: each rank writes its part.

A checkpoint can be loaded by any number of ranks: `torch.distributed.checkpoint` shards it anew.
"""

from __future__ import annotations

import tempfile
import warnings
from typing import Any

import ray.train
import ray.train.torch
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from heats.recipes.frameworks import common


def train(config: dict[str, Any]) -> None:
    """Train on every rank, reporting metrics and a checkpoint after each epoch.

    Args:
        config: `lr`, `batch_size` (of all workers together), `epochs`, `weight_decay`, `seed`,
            `hidden` (width of both hidden layers), `dropout`.
    """
    device = ray.train.torch.get_device()
    world_size = ray.train.get_context().get_world_size()
    loader = common.train_loader(config)
    model = common.network(config).to(device)
    mesh = init_device_mesh(device.type, (world_size,))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config["lr"], weight_decay=config["weight_decay"]
    )
    epochs_done = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as directory:
            epochs_done = _load(directory, model, optimizer)

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
        # Each rank writes to a directory of its own; the report makes one of them.
        with tempfile.TemporaryDirectory() as directory:
            weights, moments = get_state_dict(model, optimizer)
            state = {"model": weights, "optimizer": moments, "epoch": epoch}
            save(state, checkpoint_id=directory)
            ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(directory))


def evaluate(config: dict[str, Any], checkpoint_dir: str) -> dict[str, float]:
    """`val_loss` and `val_accuracy` of a checkpoint, computed anew on the validation data."""
    network = common.network(config)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # As is wanted.
        load({"model": network.state_dict()}, checkpoint_id=checkpoint_dir, no_dist=True)
    return common.evaluate(network)


def _load(directory: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Number of epochs done when the checkpoint was written; model and optimizer are set to it."""
    weights, moments = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": weights, "optimizer": moments, "epoch": 0}
    load(state, checkpoint_id=directory)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    epochs_done: int = state["epoch"]
    return epochs_done
