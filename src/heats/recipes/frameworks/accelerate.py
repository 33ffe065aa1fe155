"""Hugging Face Accelerate: `prepare`, `backward`, `gather_for_metrics`, `save_state`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import ray.train
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from heats.recipes.frameworks import common


def train(config: dict[str, Any]) -> None:
    """Train on every rank, reporting metrics and a checkpoint after each epoch.

    Args:
        config: `lr`, `batch_size` (of all workers together), `epochs`, `weight_decay`, `seed`,
            `hidden` (width of both hidden layers), `dropout`.
    """
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        dataloader_config=DataLoaderConfiguration(
            use_seedable_sampler=True, data_seed=config["seed"]
        ),
    )
    batch_size = max(1, config["batch_size"] // accelerator.num_processes)
    train_images, val_images = common.datasets()
    network = common.network(config)
    optimizer = torch.optim.AdamW(
        network.parameters(), lr=config["lr"], weight_decay=config["weight_decay"]
    )
    model, optimizer, loader, val_loader = accelerator.prepare(
        network,
        optimizer,
        DataLoader(train_images, batch_size=batch_size, shuffle=True),
        DataLoader(val_images, batch_size=batch_size),
    )
    epochs_done = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as directory:
            accelerator.load_state(directory)
            epochs_done = int(Path(directory, "epoch").read_text())

    for epoch in range(epochs_done + 1, config["epochs"] + 1):
        common.begin_epoch(config, epoch)
        loader.set_epoch(epoch)
        model.train()
        losses = []
        for images, labels in loader:
            loss = cross_entropy(model(images), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.detach())

        model.eval()
        outputs = []
        for images, labels in val_loader:
            with torch.no_grad():
                outputs.append(accelerator.gather_for_metrics((model(images), labels)))
        logits, labels = map(torch.cat, zip(*outputs, strict=True))
        metrics = {
            "epoch": epoch,
            "train_loss": accelerator.reduce(torch.stack(losses).mean(), "mean").item(),
            "val_loss": cross_entropy(logits, labels).item(),
            "val_accuracy": (logits.argmax(dim=1) == labels).double().mean().item(),
        }
        # Each rank saves its own generators' states; the report makes one directory of them.
        with tempfile.TemporaryDirectory() as directory:
            accelerator.save_state(directory)
            Path(directory, "epoch").write_text(str(epoch))
            ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(directory))


def evaluate(config: dict[str, Any], checkpoint_dir: str) -> dict[str, float]:
    """`val_loss` and `val_accuracy` of a checkpoint, computed anew on the validation data."""
    network = common.network(config)
    network.load_state_dict(load_file(Path(checkpoint_dir, "model.safetensors")))
    return common.evaluate(network)
