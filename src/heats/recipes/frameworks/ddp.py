"""PyTorch DistributedDataParallel, with a DataLoader that may have worker processes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch
import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from heats.recipes.frameworks import common

CHECKPOINT = "checkpoint.pt"


def train(config: dict[str, Any]) -> None:
    """Train on every rank, reporting metrics and a checkpoint after each epoch.

    Args:
        config: `lr`, `batch_size` (of all workers together), `epochs`, `weight_decay`, `seed`,
            `hidden` (width of both hidden layers), `dropout`, `loader_workers` (processes that load
            data, for each rank; 0: none).
    """
    device = ray.train.torch.get_device()
    loader = common.train_loader(config)
    network = common.network(config).to(device)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config["lr"], weight_decay=config["weight_decay"]
    )
    epochs_done = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as directory:
            state = torch.load(Path(directory, CHECKPOINT), map_location=device, weights_only=True)
        network.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        epochs_done = state["epoch"]

    for epoch in range(epochs_done + 1, config["epochs"] + 1):
        common.begin_epoch(config, epoch, loader)
        model.train()  # type: ignore[no-untyped-call]
        losses = []
        for images, labels in loader:
            loss = cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss)
        metrics = common.epoch_metrics(epoch, losses, network)
        if ray.train.get_context().get_world_rank() != 0:
            ray.train.report(metrics)
            continue
        with tempfile.TemporaryDirectory() as directory:
            state = {
                "model": network.state_dict(),
                "optimizer": optimizer.state_dict(),
                "epoch": epoch,
            }
            torch.save(state, Path(directory, CHECKPOINT))
            ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(directory))


def evaluate(config: dict[str, Any], checkpoint_dir: str) -> dict[str, float]:
    """`val_loss` and `val_accuracy` of a checkpoint, computed anew on the validation data."""
    network = common.network(config)
    state = torch.load(Path(checkpoint_dir, CHECKPOINT), map_location="cpu", weights_only=True)
    network.load_state_dict(state["model"])
    return common.evaluate(network)
