"""The Hugging Face Trainer with Ray's report callback, on a network of one's own.

After Ray's guide "Get Started with Distributed Training using Hugging Face Transformers". The
recipe text_classification has a pretrained transformer.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import ray.train
import torch
import transformers
from ray.train.huggingface.transformers import RayTrainReportCallback, prepare_trainer
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, TensorDataset

from heats.recipes.frameworks import common

CHECKPOINT_NAME = RayTrainReportCallback.CHECKPOINT_NAME


def train(config: dict[str, Any]) -> None:
    """Train on every rank; after each epoch, evaluate, save, and report both.

    Args:
        config: `lr`, `batch_size` (of all workers together), `epochs`, `weight_decay`, `seed`,
            `hidden` (width of both hidden layers), `dropout`.
    """
    world_size = ray.train.get_context().get_world_size()
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers.set_seed(config["seed"])  # The same weights on every rank.
    model = Classifier(config)
    # A folder for each rank, so that no rank copies what another one is still writing.
    with tempfile.TemporaryDirectory() as output_dir:
        trainer = _trainer(config, model, output_dir, world_size)
        trainer.add_callback(RayTrainReportCallback())
        trainer = prepare_trainer(trainer)
        if checkpoint := ray.train.get_checkpoint():
            with checkpoint.as_directory() as directory:
                trainer.train(resume_from_checkpoint=str(Path(directory, CHECKPOINT_NAME)))
        else:
            trainer.train()


def evaluate(config: dict[str, Any], checkpoint_dir: str) -> dict[str, float]:
    """Metrics of a checkpoint, computed anew on the validation data, under their reported names."""
    model = Classifier(config)
    model.load_state_dict(load_file(Path(checkpoint_dir, CHECKPOINT_NAME, "model.safetensors")))
    found = common.evaluate(model.network)
    return {"eval_loss": found["val_loss"], "eval_accuracy": found["val_accuracy"]}


class Classifier(nn.Module):
    """The network, with loss and logits as the Trainer takes them."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.network = common.network(config)

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Of a batch: images (n, 64), labels (n,)."""
        logits = self.network(images)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


class Digits(Dataset[dict[str, Any]]):
    """Images and labels, under the names that `Classifier.forward` gives them."""

    def __init__(self, images: TensorDataset) -> None:
        self._images, self._labels = images.tensors

    def __len__(self) -> int:
        """Number of images."""
        return len(self._labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One image and its label."""
        return {"images": self._images[index], "labels": self._labels[index]}


def _trainer(
    config: dict[str, Any], model: nn.Module, output_dir: str, world_size: int
) -> transformers.Trainer:
    has_gpu = torch.cuda.is_available()
    batch_size = max(1, config["batch_size"] // world_size)
    train_images, val_images = map(Digits, common.datasets())
    arguments = transformers.TrainingArguments(
        output_dir=output_dir,
        num_train_epochs=config["epochs"],
        per_device_train_batch_size=batch_size,
        per_device_eval_batch_size=128,
        learning_rate=config["lr"],
        weight_decay=config["weight_decay"],
        seed=config["seed"],
        # All three at once, so that a report has the metrics of its checkpoint.
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_strategy="epoch",
        save_total_limit=1,  # The report has copied the others away.
        ddp_find_unused_parameters=False,
        use_cpu=not has_gpu,
        dataloader_pin_memory=has_gpu,
        disable_tqdm=True,
        report_to="none",
    )
    trainer = transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=train_images,
        eval_dataset=val_images,
        compute_metrics=_accuracy,
    )
    trainer.remove_callback(transformers.PrinterCallback)  # The report says the same.
    return trainer


def _accuracy(prediction: transformers.EvalPrediction) -> dict[str, float]:
    answers = np.asarray(prediction.predictions).argmax(axis=-1)
    return {"accuracy": float(np.mean(answers == np.asarray(prediction.label_ids)))}
