"""Fine-tuning a pretrained encoder on a task of GLUE: Ray Data feeds the Hugging Face Trainer.

After Ray's example "Fine-tune a Hugging Face Transformers Model". Data and model come from the hub,
or from packages where the config names those of offline/.
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray.train
import torch
import transformers
from ray.train.huggingface.transformers import RayTrainReportCallback, prepare_trainer
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss

import heats
from heats.recipes import glue_data, hub

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pandas as pd
    from numpy.typing import NDArray
    from ray.data import DataIterator

    Columns = dict[str, NDArray[Any]]
    Batch = dict[str, Tensor]

# The folder of the Hugging Face checkpoint within the Ray Train checkpoint.
CHECKPOINT_NAME = RayTrainReportCallback.CHECKPOINT_NAME


def train(config: dict[str, Any]) -> None:
    """Train on every rank; after each epoch, evaluate, save, and report both.

    Reads the datasets `train`, split between the workers, and `validation`, whole for each worker
    (`DataConfig(datasets_to_split=["train"])`): see `glue_data.dataset`.

    Args:
        config: `lr` (at the start; it falls to zero on a line), `batch_size` (of each worker),
            `epochs`, `weight_decay`, `seed`, `task`, `source`, `data_dir`, `model`, `max_length`,
            `max_train_rows`, `max_eval_rows` (as the datasets were made with),
            `shuffle_buffer_rows` (from which batches are drawn; None: in order).

    Raises:
        HubError: Model or data cannot be loaded from the hub.
        FileNotFoundError: A package is not in `data_dir`; the message tells how to get it.
        ValueError: There is no such task in `source`, or the datasets are not those of `config`.
    """
    _quiet()
    # The same head on every rank, and in every run of this config.
    transformers.set_seed(config["seed"])
    model = _load_model(config)
    fingerprints = [
        f"{split} {glue_data.fingerprint(**_source(config, split))}"
        for split in ("train", "validation")
    ]
    heats.set_tags(
        hub.tags(
            data=f"{config['source']}: {config['task']}",
            data_fingerprint=", ".join(fingerprints),
            model=config["model"],
            model_fingerprint=hub.model_fingerprint(model),
        )
    )
    num_rows = glue_data.load(**_source(config, "train")).num_rows
    batches = TrainBatches(config, ray.train.get_dataset_shard("train"), num_rows)
    # A folder for each rank, so that no rank copies what another one is still writing.
    with tempfile.TemporaryDirectory() as output_dir:
        trainer = GlueTrainer(config, model, batches, output_dir)
        trainer.add_callback(RayTrainReportCallback())
        trainer = prepare_trainer(trainer)
        if checkpoint := ray.train.get_checkpoint():
            with checkpoint.as_directory() as directory:
                trainer.train(resume_from_checkpoint=str(Path(directory, CHECKPOINT_NAME)))
        else:
            trainer.train()


def evaluate(config: dict[str, Any], checkpoint_dir: str) -> dict[str, float]:
    """Metrics of a checkpoint, computed anew on the validation rows, under their reported names."""
    _quiet()
    source = Path(checkpoint_dir, CHECKPOINT_NAME)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(source).eval()
    rows = glue_data.tokenized(
        glue_data.load(**_source(config, "validation")),
        model=config["model"],
        max_length=config["max_length"],
    )
    columns = {name: np.array(rows[name].to_pylist(), dtype=object) for name in rows.column_names}
    collate, size = collator(config), config["batch_size"]
    outputs, labels = [], []
    for start in range(0, rows.num_rows, size):
        batch = collate({name: column[start : start + size] for name, column in columns.items()})
        labels.append(batch.pop("labels"))
        with torch.no_grad():
            outputs.append(model(**batch).logits)
    found = metrics(config, torch.cat(outputs).numpy(), torch.cat(labels).numpy())
    return {f"eval_{name}": value for name, value in found.items()}


def example(config: dict[str, Any]) -> pd.DataFrame:
    """Three rows as the predictor takes them: a frame with the task's text columns."""
    rows = glue_data.load(**_source(config, "validation")).slice(0, 3)
    return rows.drop_columns(["label"]).to_pandas()


def metrics(
    config: dict[str, Any], outputs: NDArray[np.floating], labels: NDArray[Any]
) -> dict[str, float]:
    """`loss` and the task's metric; outputs: (rows, labels), labels: (rows,)."""
    task = glue_data.task_named(config["task"], config["source"])
    found, wanted = torch.from_numpy(outputs).double(), torch.from_numpy(labels)
    if task.num_labels == 1:
        loss = mse_loss(found[:, 0], wanted.double())
    else:
        loss = cross_entropy(found, wanted)
    return {"loss": loss.item(), task.metric: glue_data.score(task.metric, outputs, labels)}


def collator(config: dict[str, Any]) -> Callable[[Columns], Batch]:
    """What makes a batch of tokenized rows, padded to the longest, as the model takes it."""
    tokenizer = glue_data.load_tokenizer(config["model"], config["max_length"])
    is_score = glue_data.task_named(config["task"], config["source"]).num_labels == 1
    dtype = torch.float32 if is_score else torch.int64

    def collate(rows: Columns) -> Batch:
        tokens = {
            name: [np.asarray(ids).tolist() for ids in column]
            for name, column in rows.items()
            if name != "label"
        }
        batch = tokenizer.pad(tokens, return_tensors="pt")
        return {**batch, "labels": torch.tensor(rows["label"].tolist(), dtype=dtype)}

    return collate


class TrainBatches:
    """This rank's batches of an epoch, full ones only; their order follows from (seed, epoch)."""

    def __init__(self, config: dict[str, Any], shard: DataIterator, num_rows: int) -> None:
        self._config, self._shard, self._epoch = config, shard, 0
        self._collate = collator(config)
        world_size = ray.train.get_context().get_world_size()
        self._num_batches: int = num_rows // (config["batch_size"] * world_size)
        if self._num_batches == 0:
            msg = (
                f"{num_rows} rows do not fill one batch of batch_size={config['batch_size']} on "
                f"each of {world_size} workers. Lower batch_size, or raise max_train_rows."
            )
            raise ValueError(msg)

    def __len__(self) -> int:
        """Batches of an epoch: with it the Trainer counts epochs, also where it goes on."""
        return self._num_batches

    def set_epoch(self, epoch: int) -> None:
        """Called by the Trainer before each epoch; the first one is 0."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[Batch]:
        """The batches of the epoch, in its order.

        Raises:
            ValueError: There are more of them, or fewer, than the rows make.
        """
        buffer_rows = self._config["shuffle_buffer_rows"]
        seeds = np.random.SeedSequence((self._config["seed"], self._epoch)).generate_state(1)
        batches = self._shard.iter_torch_batches(
            batch_size=self._config["batch_size"],
            collate_fn=self._collate,
            drop_last=True,
            local_shuffle_buffer_size=buffer_rows,
            local_shuffle_seed=int(seeds[0]) if buffer_rows else None,
        )
        # One batch behind: the Trainer asks for no more than it needs, and never sees the end.
        num_found, last = 0, None
        for batch in batches:
            if last is not None:
                yield last
            num_found, last = num_found + 1, batch
        if last is None or num_found != self._num_batches:
            msg = (
                f"A worker has {self._num_batches} batches to an epoch, but got {num_found}. The "
                "dataset train must be split between the workers (data.datasets_to_split), and be "
                "made with the task and rows of recipe.config."
            )
            raise ValueError(msg)
        yield last


class GlueTrainer(transformers.Trainer):
    """A Trainer on Ray Datasets; metrics are of every validation row, once.

    All ranks read the validation rows, and each computes its share of every batch. Shares are made
    equal with copies of the last row, which come last once the shares are gathered.
    """

    def __init__(
        self,
        config: dict[str, Any],
        model: transformers.PreTrainedModel,
        batches: TrainBatches,
        output_dir: str,
    ) -> None:
        has_gpu = torch.cuda.is_available()
        self._config, self._validation = config, ray.train.get_dataset_shard("validation")
        arguments = transformers.TrainingArguments(
            output_dir=output_dir,
            max_steps=len(batches) * config["epochs"],
            per_device_train_batch_size=config["batch_size"],
            per_device_eval_batch_size=config["batch_size"],
            learning_rate=config["lr"],
            weight_decay=config["weight_decay"],
            seed=config["seed"],
            # All three at once, so that a report has the metrics of its checkpoint.
            eval_strategy="epoch",
            save_strategy="epoch",
            logging_strategy="epoch",
            save_total_limit=1,  # The report has copied the others away.
            # Else the loss, a mean over the rank's rows, is multiplied by the number of ranks.
            average_tokens_across_devices=False,
            use_cpu=not has_gpu,
            disable_tqdm=True,
            report_to="none",
        )
        super().__init__(
            model=model,
            args=arguments,
            train_dataset=batches,
            eval_dataset=self._validation,
            processing_class=glue_data.load_tokenizer(config["model"], config["max_length"]),
            compute_metrics=self._metrics_of_all_rows,
        )
        self.remove_callback(transformers.PrinterCallback)  # The report says the same.

    def get_train_dataloader(self) -> Any:
        """Batches, which are made already."""
        return self.train_dataset

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """This rank's share of each batch."""
        del eval_dataset
        context = ray.train.get_context()
        rank, world_size = context.get_world_rank(), context.get_world_size()
        collate = collator(self._config)
        return self._validation.iter_torch_batches(
            batch_size=self._config["batch_size"] * world_size,
            collate_fn=lambda rows: collate(share(rows, rank, world_size)),
        )

    def prediction_step(self, *args: Any, **kwargs: Any) -> tuple[None, Any, Any]:
        """Outputs and labels, no loss: the Trainer would average it over batches, copies too."""
        _, outputs, labels = super().prediction_step(*args, **kwargs)
        return None, outputs, labels

    def _metrics_of_all_rows(self, prediction: transformers.EvalPrediction) -> dict[str, float]:
        outputs, labels = np.asarray(prediction.predictions), np.asarray(prediction.label_ids)
        num_rows = glue_data.load(**_source(self._config, "validation")).num_rows
        world_size = self.args.world_size
        if not 0 <= len(labels) - num_rows < world_size:
            msg = (
                f"There are {num_rows} validation rows, but {len(labels)} came. Every worker needs "
                "the whole dataset validation (data.datasets_to_split=[train]), made with the task "
                "and rows of recipe.config."
            )
            raise ValueError(msg)
        return metrics(self._config, outputs[:num_rows], labels[:num_rows])


def share(rows: Columns, rank: int, world_size: int) -> Columns:
    """A rank's rows of a batch; the last row is repeated until all ranks have as many."""
    num_rows = len(rows["label"])
    size = math.ceil(num_rows / world_size)
    index = np.minimum(np.arange(rank * size, (rank + 1) * size), num_rows - 1)
    return {name: column[index] for name, column in rows.items()}


def _source(config: dict[str, Any], split: str) -> dict[str, Any]:
    """The rows of a split, as `glue_data.load` takes them."""
    keys = ("task", "source", "data_dir")
    max_rows = config["max_train_rows" if split == "train" else "max_eval_rows"]
    return {**{key: config[key] for key in keys}, "split": split, "max_rows": max_rows}


def _load_model(config: dict[str, Any]) -> transformers.PreTrainedModel:
    task = glue_data.task_named(config["task"], config["source"])
    names = task.labels or ("score",)
    source = glue_data.model_source(config["model"])
    with hub.loading(source, glue_data.OFFLINE):
        model: transformers.PreTrainedModel = (
            transformers.AutoModelForSequenceClassification.from_pretrained(
                source,
                num_labels=task.num_labels,
                id2label=dict(enumerate(names)),
                label2id={name: index for index, name in enumerate(names)},
            )
        )
    return model


def _quiet() -> None:
    """No progress bars and tables of loaded weights: a sweep would repeat them for every trial."""
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
