"""What the examples share: handwritten digits, a small network, and metrics over all workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import ray.train
import ray.train.torch
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from heats.recipes import digits

if TYPE_CHECKING:
    from numpy.typing import NDArray


def datasets() -> tuple[TensorDataset, TensorDataset]:
    """Training and validation images, (n, 64) float32 from 0 to 1, with their labels."""
    data = digits.load_data()
    return (
        TensorDataset(data.train_images, data.train_labels),
        TensorDataset(data.val_images, data.val_labels),
    )


def rows(
    rank: int | None = None, world_size: int | None = None
) -> tuple[tuple[NDArray[Any], NDArray[Any]], tuple[NDArray[Any], NDArray[Any]]]:
    """This rank's share of the training and of the validation images, and their labels.

    Arrays of (n, 64) float32 from 0 to 1 and (n,) int64. Rank and world size are, unless both
    are given, those of the worker.
    """
    if rank is None or world_size is None:
        context = ray.train.get_context()
        rank, world_size = context.get_world_rank(), context.get_world_size()
    data = digits.load_data()
    images, labels, val_images, val_labels = (
        tensor[rank::world_size].numpy()
        for tensor in (data.train_images, data.train_labels, data.val_images, data.val_labels)
    )
    return (images, labels), (val_images, val_labels)


def with_accuracy(metrics: dict[str, float]) -> dict[str, float]:
    """Metrics with `val_accuracy` beside the `val_error` that boosting libraries count."""
    return {**metrics, "val_accuracy": 1 - metrics["val_error"]}


def network(config: dict[str, Any]) -> nn.Sequential:
    """An MLP with dropout, the same for the same `seed` on every rank: (n, 64) to (n, 10)."""
    torch.manual_seed(config["seed"])
    return digits.network(config["hidden"], config["dropout"])


def train_loader(config: dict[str, Any]) -> DataLoader[tuple[Tensor, ...]]:
    """This rank's share of the training images in batches; `batch_size` is of all ranks."""
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    train, _ = datasets()
    return DataLoader(
        train,
        batch_size=max(1, config["batch_size"] // world_size),
        sampler=DistributedSampler(train, world_size, rank, seed=config["seed"]),
        num_workers=config.get("loader_workers", 0),
    )


def begin_epoch(config: dict[str, Any], epoch: int, loader: DataLoader[Any] | None = None) -> None:
    """Let all randomness of an epoch depend on (seed, epoch, rank) alone.

    So a run that goes on from a checkpoint is the same as one that was never stopped, and no
    generator's state has to be saved.
    """
    rank = ray.train.get_context().get_world_rank()
    numbers = np.random.SeedSequence((config["seed"], epoch, rank)).generate_state(1)
    torch.manual_seed(int(numbers[0]))
    if loader is not None and isinstance(loader.sampler, DistributedSampler):
        loader.sampler.set_epoch(epoch)


def epoch_metrics(epoch: int, losses: list[Tensor], model: nn.Module) -> dict[str, float]:
    """Metrics after an epoch, over all ranks; each validates its share and has to call this.

    Args:
        epoch: Number of the epoch, from 1.
        losses: Of this rank's training batches.
        model: Any wrapper of the network.
    """
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    device = ray.train.torch.get_device()
    _, val = datasets()
    images, labels = (tensor[rank::world_size].to(device) for tensor in val.tensors)
    totals = torch.stack(
        [torch.stack(losses).detach().double().mean(), *_score(model, images, labels)]
    )
    if world_size > 1:
        torch.distributed.all_reduce(totals)
    sum_train_loss, val_loss, num_correct, num_val = totals.tolist()
    return {
        "epoch": epoch,
        "train_loss": sum_train_loss / world_size,
        "val_loss": val_loss / num_val,
        "val_accuracy": num_correct / num_val,
    }


def evaluate(model: nn.Module) -> dict[str, float]:
    """`val_loss` and `val_accuracy` of a network, computed anew in one process."""
    _, val = datasets()
    images, labels = val.tensors
    val_loss, num_correct, num_val = _score(model, images, labels).tolist()
    return {"val_loss": val_loss / num_val, "val_accuracy": num_correct / num_val}


@torch.no_grad()
def _score(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Sum of the losses, number of right answers, number of images: (3,) float64."""
    model.eval()
    logits = model(images)
    loss = cross_entropy(logits, labels, reduction="none").double().sum()
    num_correct = (logits.argmax(dim=1) == labels).double().sum()
    return torch.stack([loss, num_correct, torch.full_like(num_correct, len(labels))])
