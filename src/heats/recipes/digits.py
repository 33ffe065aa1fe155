"""Handwritten digits with a plain PyTorch loop: an ordinary Ray Train function.

Data: the test part of UCI's "Optical Recognition of Handwritten Digits", as scikit-learn ships it
(1,797 images of 8x8 pixels from 0 to 16). One fifth is held out for validation, always the same.

Every epoch seeds all randomness from (seed, epoch, rank), so a run that continues from a checkpoint
goes on exactly as if it had never stopped: no generator's state has to be kept.
"""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import ray.train
import ray.train.torch
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

if TYPE_CHECKING:
    from collections.abc import Iterable

NUM_PIXELS, NUM_CLASSES, MAX_PIXEL = 64, 10, 16.0

# Files of a checkpoint.
WEIGHTS, ARCHITECTURE, TRAINING = "model.safetensors", "model.json", "training.pt"


def train(config: dict[str, Any]) -> None:
    """Train on every rank, reporting metrics and a checkpoint after each epoch.

    Args:
        config: `lr`, `batch_size` (of all workers together), `epochs`, `weight_decay`, `seed`,
            `hidden` (width of both hidden layers), `dropout`.
    """
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    device = ray.train.torch.get_device()
    data = load_data()

    loader = ray.train.torch.prepare_data_loader(
        DataLoader(
            Images(data.train_images, data.train_labels),
            batch_size=max(1, config["batch_size"] // world_size),
            shuffle=True,
            collate_fn=_as_it_is,
        )
    )
    torch.manual_seed(config["seed"])
    model = ray.train.torch.prepare_model(network(config["hidden"], config["dropout"]))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config["lr"], weight_decay=config["weight_decay"], fused=True
    )
    epochs_done = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as directory:
            epochs_done = load_checkpoint(directory, _unwrapped(model), optimizer, config)

    # Each rank validates its own share; nothing is counted twice, however many ranks there are.
    val_images = data.val_images[rank::world_size].to(device)
    val_labels = data.val_labels[rank::world_size].to(device)

    for epoch in range(epochs_done + 1, config["epochs"] + 1):
        _seed_epoch(config["seed"], epoch, rank)
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(config["seed"] * 100_003 + epoch)
        totals = torch.stack(
            [
                *_train_epoch(model, optimizer, loader),
                *_validate(_unwrapped(model), val_images, val_labels),
            ]
        )
        if world_size > 1:
            torch.distributed.all_reduce(totals)
        train_loss, num_train, val_loss, num_correct, num_val = totals.tolist()
        metrics = {
            "epoch": epoch,
            "train_loss": train_loss / num_train,
            "val_loss": val_loss / num_val,
            "val_accuracy": num_correct / num_val,
        }
        if rank != 0:
            ray.train.report(metrics)
            continue
        with tempfile.TemporaryDirectory() as directory:
            save_checkpoint(directory, _unwrapped(model), optimizer, epoch, config)
            ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(directory))


def evaluate(config: dict[str, Any], checkpoint_dir: str) -> dict[str, float]:
    """`val_loss` and `val_accuracy` of a checkpoint, computed anew on the validation data."""
    data = load_data()
    model = network(config["hidden"], config["dropout"])
    model.load_state_dict(load_file(Path(checkpoint_dir, WEIGHTS)))
    val_loss, num_correct, num_val = _validate(model, data.val_images, data.val_labels)
    return {
        "val_loss": float(val_loss / num_val),
        "val_accuracy": float(num_correct / num_val),
    }


def example(config: dict[str, Any]) -> np.ndarray:
    """Five images as the predictor takes them: (5, 64) float32, pixels from 0 to 16."""
    del config  # The same for every trial.
    return (load_data().val_images[:5] * MAX_PIXEL).numpy()


class Data(NamedTuple):
    """Images: (n, 64) float32 from 0 to 1; labels: (n,) int64."""

    train_images: Tensor
    train_labels: Tensor
    val_images: Tensor
    val_labels: Tensor


@functools.cache
def load_data() -> Data:
    """The data, split; read once per process, so that later trials in a lane find it in memory."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    images = (digits.data / MAX_PIXEL).astype(np.float32)
    parts = train_test_split(
        images, digits.target, test_size=0.2, stratify=digits.target, random_state=0
    )
    train_images, val_images, train_labels, val_labels = map(torch.from_numpy, parts)
    return Data(train_images, train_labels, val_images, val_labels)


class Images(Dataset[tuple[Tensor, Tensor]]):
    """Images and labels in memory, given out a batch at a time: far faster than one by one."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        """Number of images."""
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """One image and its label."""
        return self.images[index], self.labels[index]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """A batch; the loader calls this where it exists."""
        return self.images[indices], self.labels[indices]


def network(hidden: int, dropout: float) -> nn.Sequential:
    """An MLP from (n, 64) images to (n, 10) logits; digits_predictor.py builds the same one."""
    return nn.Sequential(
        *(nn.Linear(NUM_PIXELS, hidden), nn.ReLU(), nn.Dropout(dropout)),
        *(nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(dropout)),
        nn.Linear(hidden, NUM_CLASSES),
    )


def save_checkpoint(
    directory: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    epoch: int,
    config: dict[str, Any],
) -> None:
    """Write what `load_checkpoint` and the predictor need into `directory`."""
    save_file(model.state_dict(), Path(directory, WEIGHTS))
    Path(directory, ARCHITECTURE).write_text(json.dumps({"hidden": config["hidden"]}))
    state = {"optimizer": optimizer.state_dict(), "epoch": epoch}
    torch.save(state, Path(directory, TRAINING))


def load_checkpoint(
    directory: str, model: nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, Any]
) -> int:
    """Number of epochs done when the checkpoint was written; model and optimizer are set to it."""
    model.load_state_dict(load_file(Path(directory, WEIGHTS)))
    state = torch.load(Path(directory, TRAINING), map_location="cpu", weights_only=True)
    optimizer.load_state_dict(state["optimizer"])
    # The checkpoint may be of a trial with other settings (population based training).
    for group in optimizer.param_groups:
        group.update(lr=config["lr"], weight_decay=config["weight_decay"])
    return int(state["epoch"])


def _train_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Iterable[tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """Sum of the losses and number of images of this rank's share of an epoch."""
    model.train()
    losses, num_images = [], 0
    for images, labels in loader:
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.detach() * len(labels))
        num_images += len(labels)
    total = torch.stack(losses).double().sum()
    return total, torch.tensor(num_images, dtype=torch.float64, device=total.device)


@torch.no_grad()
def _validate(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sum of the losses, number of right answers, number of images."""
    model.eval()
    logits = model(images)
    loss = cross_entropy(logits, labels, reduction="none").double().sum()
    num_correct = (logits.argmax(dim=1) == labels).double().sum()
    return loss, num_correct, torch.full_like(num_correct, len(labels))


def _seed_epoch(seed: int, epoch: int, rank: int) -> None:
    torch.manual_seed(int(np.random.SeedSequence((seed, epoch, rank)).generate_state(1)[0]))


def _unwrapped(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def _as_it_is(batch: Any) -> Any:
    return batch
