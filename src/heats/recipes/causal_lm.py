"""Training a GPT-2 with the Hugging Face Trainer, which is fed by Ray Data.

After Ray's guide on Ray Data with the Hugging Face Trainer. Text and model are those of
gpt2_pretraining (`gpt2.py`).
"""

from __future__ import annotations

import tempfile
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray.train
import torch
import transformers
from ray.train.huggingface.transformers import RayTrainReportCallback, prepare_trainer
from torch.utils.data import DataLoader, IterableDataset

import heats
from heats.recipes import gpt2, hub
from heats.recipes.gpt2 import TOKENS
from heats.recipes.gpt2_pretraining import example

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["evaluate", "example", "train"]

CHECKPOINT_NAME = RayTrainReportCallback.CHECKPOINT_NAME


def train(config: dict[str, Any]) -> None:
    """Train on every rank; each `eval_steps`, evaluate, save, and report both.

    Reads the datasets `train`, split between the workers, and `validation`, of which every worker
    gets all (`gpt2.dataset`).

    Args:
        config: `lr` (falls to zero on a line), `batch_size` (blocks of a worker for one step),
            `epochs` (of `eval_steps` steps), `weight_decay`, `seed`; sizes of the model
            (`gpt2.build_model`); the text (`gpt2.blocks`); `shuffle_buffer` (blocks; None: in the
            order of the text), `precision` (fp32, bf16).
    """
    gpt2.quiet()
    encoding = gpt2.encoding(config["source"], config["data_dir"])
    model = gpt2.build_model(config)
    heats.set_tags(
        hub.tags(
            data=config["source"],
            data_fingerprint=gpt2.fingerprint(config),
            model=f"GPT-2, {model.num_parameters():,} parameters",
            model_fingerprint=hub.model_fingerprint(model),
        )
    )
    # A folder for each rank, so that no rank copies what another one is still writing.
    with tempfile.TemporaryDirectory() as output_dir:
        trainer = BlocksTrainer(
            model=model,
            args=arguments(config, output_dir),
            train_dataset=Passes(config),
            eval_dataset=ValidationBlocks(
                ray.train.get_dataset_shard("validation").iter_torch_batches(
                    batch_size=config["batch_size"]
                )
            ),
            callbacks=[SaveEncoding(encoding), RayTrainReportCallback()],
        )
        trainer.remove_callback(transformers.PrinterCallback)  # The report says the same.
        trainer = prepare_trainer(trainer)
        if checkpoint := ray.train.get_checkpoint():
            with checkpoint.as_directory() as directory:
                trainer.train(resume_from_checkpoint=str(Path(directory, CHECKPOINT_NAME)))
        else:
            trainer.train()


def evaluate(config: dict[str, Any], checkpoint_dir: str) -> dict[str, float]:
    """`eval_loss` of a checkpoint, computed anew on the validation blocks."""
    gpt2.quiet()
    model = transformers.GPT2LMHeadModel.from_pretrained(Path(checkpoint_dir, CHECKPOINT_NAME))
    with tempfile.TemporaryDirectory() as output_dir:
        trainer = BlocksTrainer(
            model=model,
            args=arguments(config, output_dir),
            eval_dataset=ValidationBlocks(
                [{TOKENS: batch} for batch in gpt2.batches(config, "validation")]
            ),
        )
        return {"eval_loss": float(trainer.evaluate()["eval_loss"])}


class Passes(IterableDataset[dict[str, torch.Tensor]]):
    """Batches without an end: this rank's share of the data, in another order in each pass.

    So a run that skips what it has trained on, as the Trainer does when it goes on from a
    checkpoint, finds as many batches as one that was never stopped.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """As the model takes them."""
        shard = ray.train.get_dataset_shard("train")
        for number in count():
            batches = shard.iter_torch_batches(
                batch_size=self._config["batch_size"],
                drop_last=True,
                local_shuffle_buffer_size=self._config["shuffle_buffer"],
                local_shuffle_seed=self._config["seed"] + number,
            )
            yield from _labelled(batches)


class ValidationBlocks(IterableDataset[dict[str, torch.Tensor]]):
    """The same batches in each evaluation."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """As the model takes them."""
        return _labelled(self._batches)


class BlocksTrainer(transformers.Trainer):
    """Takes batches as they come: Ray Data has split them between the workers already."""

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Of `Passes`."""
        return _loader(self.train_dataset)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Of `ValidationBlocks`."""
        return _loader(eval_dataset or self.eval_dataset)


class SaveEncoding(transformers.TrainerCallback):
    """Puts the encoding beside the model, for the predictor."""

    def __init__(self, encoding: Any) -> None:
        self._encoding = encoding

    def on_save(
        self,
        args: transformers.TrainingArguments,
        state: transformers.TrainerState,
        control: transformers.TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Before the report, which copies the folder."""
        del control, kwargs
        if state.is_world_process_zero:
            folder = Path(str(args.output_dir), f"checkpoint-{state.global_step}")
            gpt2.save_encoding(self._encoding, folder)


def arguments(config: dict[str, Any], output_dir: str) -> transformers.TrainingArguments:
    """The Trainer's, of which evaluation, saving and logging all happen each `eval_steps`."""
    has_gpu = torch.cuda.is_available()
    return transformers.TrainingArguments(
        output_dir=output_dir,
        max_steps=config["epochs"] * config["eval_steps"],
        per_device_train_batch_size=config["batch_size"],
        per_device_eval_batch_size=config["batch_size"],
        learning_rate=config["lr"],
        weight_decay=config["weight_decay"],
        seed=config["seed"],
        bf16=config["precision"] == "bf16",
        eval_strategy="steps",
        eval_steps=config["eval_steps"],
        save_strategy="steps",
        save_steps=config["eval_steps"],
        logging_strategy="steps",
        logging_steps=config["eval_steps"],
        save_total_limit=1,  # The report has copied the others away.
        prediction_loss_only=True,
        ddp_find_unused_parameters=False,
        use_cpu=not has_gpu,
        disable_tqdm=True,
        report_to="none",
    )


def _loader(batches: Any) -> DataLoader[Any]:
    return DataLoader(batches, batch_size=1, collate_fn=_only)


def _only(batches: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return batches[0]


def _labelled(batches: Iterable[Any]) -> Iterator[dict[str, torch.Tensor]]:
    """The model shifts the labels by itself."""
    for batch in batches:
        tokens = batch[TOKENS].long()
        yield {TOKENS: tokens, "labels": tokens}
