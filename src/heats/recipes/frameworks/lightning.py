"""PyTorch Lightning with Ray's strategy, environment and report callback.

After Ray's guide "Get Started with Distributed Training using PyTorch Lightning".
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import ray.train
import torch
from ray.train.lightning import (
    RayDDPStrategy,
    RayLightningEnvironment,
    RayTrainReportCallback,
    prepare_trainer,
)
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from heats.recipes.frameworks import common


class DigitsModule(pl.LightningModule):
    """The network with its loss and optimizer."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        self.network = common.network(config)

    def on_train_batch_start(self, _: Any, batch_idx: int) -> None:
        """Let an epoch draw the same numbers also where the run goes on with it.

        Not in `on_train_epoch_start`: Lightning leaves that out after it has loaded a checkpoint.
        """
        if batch_idx == 0:
            common.begin_epoch(self.config, self.current_epoch + 1)

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        """The loss of a batch."""
        images, labels = batch
        loss = cross_entropy(self.network(images), labels)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        """Log loss and accuracy, which Lightning averages over batches and ranks."""
        images, labels = batch
        logits = self.network(images)
        accuracy = (logits.argmax(dim=1) == labels).float().mean()
        self.log("val_loss", cross_entropy(logits, labels), sync_dist=True)
        self.log("val_accuracy", accuracy, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(
            self.parameters(), lr=self.config["lr"], weight_decay=self.config["weight_decay"]
        )


def train(config: dict[str, Any]) -> None:
    """Train on every rank; the callback reports metrics and a checkpoint after each epoch.

    Args:
        config: `lr`, `batch_size` (of all workers together), `epochs`, `weight_decay`, `seed`,
            `hidden` (width of both hidden layers), `dropout`.
    """
    world_size = ray.train.get_context().get_world_size()
    batch_size = max(1, config["batch_size"] // world_size)
    train_images, val_images = common.datasets()
    trainer = prepare_trainer(
        pl.Trainer(
            max_epochs=config["epochs"],
            accelerator="auto",
            devices="auto",
            strategy=RayDDPStrategy(),
            plugins=[RayLightningEnvironment()],
            callbacks=[RayTrainReportCallback()],
            num_sanity_val_steps=0,
            logger=False,  # Metrics and checkpoints are reported instead.
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
    )
    module = DigitsModule(config)
    loaders = (
        DataLoader(train_images, batch_size=batch_size, shuffle=True),
        DataLoader(val_images, batch_size=batch_size),
    )
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as directory:
            path = Path(directory, RayTrainReportCallback.CHECKPOINT_NAME)
            trainer.fit(module, *loaders, ckpt_path=str(path))
    else:
        trainer.fit(module, *loaders)


def evaluate(config: dict[str, Any], checkpoint_dir: str) -> dict[str, float]:
    """`val_loss` and `val_accuracy` of a checkpoint, computed anew on the validation data."""
    path = Path(checkpoint_dir, RayTrainReportCallback.CHECKPOINT_NAME)
    state = torch.load(path, map_location="cpu", weights_only=True)
    module = DigitsModule(config)
    module.load_state_dict(state["state_dict"])
    return common.evaluate(module.network)
