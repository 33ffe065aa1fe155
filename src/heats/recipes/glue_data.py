"""The ten tasks of GLUE as Ray Datasets of tokenized rows, and how each is measured.

Not in glue.py: the processes of Ray Data load this module, and need neither torch nor a Trainer.
"""

from __future__ import annotations

import functools
import hashlib
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import ray.data
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from heats.recipes import hub
from heats.recipes.offline import glue as offline_glue
from heats.recipes.offline import text as offline_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

OFFLINE = "recipe=glue"

_BLOCK_ROWS = 8192  # Tokenized by one task of Ray Data.


class Task(NamedTuple):
    """Text columns, names of the labels (none: a score), metric, and the split to evaluate on."""

    columns: tuple[str, ...]
    labels: tuple[str, ...]
    metric: str = "accuracy"
    validation: str = "validation"

    @property
    def num_labels(self) -> int:
        """Outputs of the model; one: a regression."""
        return len(self.labels) or 1


_SENTENCES = ("sentence1", "sentence2")
_ENTAILMENT = ("entailment", "not_entailment")
_MNLI = ("premise", "hypothesis"), ("entailment", "neutral", "contradiction")
TASKS = {
    "cola": Task(("sentence",), ("unacceptable", "acceptable"), "matthews_correlation"),
    "mnli": Task(*_MNLI, validation="validation_matched"),
    "mnli-mm": Task(*_MNLI, validation="validation_mismatched"),
    "mrpc": Task(_SENTENCES, ("not_equivalent", "equivalent")),
    "qnli": Task(("question", "sentence"), _ENTAILMENT),
    "qqp": Task(("question1", "question2"), ("not_duplicate", "duplicate")),
    "rte": Task(_SENTENCES, _ENTAILMENT),
    "sst2": Task(("sentence",), ("negative", "positive")),
    "stsb": Task(_SENTENCES, (), "pearson"),
    "wnli": Task(_SENTENCES, ("not_entailment", "entailment")),
}


def task_named(name: str, source: str) -> Task:
    """The task, with the labels that it has in `source`.

    Raises:
        ValueError: There is no such task; the message names those there are.
    """
    if name not in TASKS:
        msg = f"recipe.config.task={name!r} is not a task of GLUE. Known: {', '.join(TASKS)}."
        raise ValueError(msg)
    task = TASKS[name]
    if source == offline_glue.SOURCE:
        return task._replace(labels=offline_glue.LABELS.get(name, task.labels))
    return task


def dataset(
    task: str,
    split: str,
    *,
    source: str,
    data_dir: str,
    model: str,
    max_length: int | None,
    max_rows: int | None = None,
    ray_remote_args: dict[str, Any] | None = None,
) -> ray.data.Dataset:
    """Tokenized rows with their labels, in the order of the source.

    Args:
        task: One of `TASKS`.
        split: `train` or `validation`.
        source: `offline`, or the set's name on the hub.
        data_dir: Where the packages of offline/ are.
        model: Whose tokenizer to use.
        max_length: Tokens of a row, both texts together; longer ones are cut. None: the model's.
        max_rows: The first ones; None: all.
        ray_remote_args: What a task that tokenizes needs, for `map_batches`:
            `{resources: {cpu_node: 1}}` keeps them on nodes that offer it.
    """
    table = load(task=task, split=split, source=source, data_dir=data_dir, max_rows=max_rows)
    starts = range(0, table.num_rows, _BLOCK_ROWS)
    return ray.data.from_arrow([table.slice(start, _BLOCK_ROWS) for start in starts]).map_batches(
        tokenized,
        batch_format="pyarrow",
        batch_size=None,
        fn_kwargs={"model": model, "max_length": max_length},
        **(ray_remote_args or {}),
    )


@functools.lru_cache(maxsize=8)
def load(*, task: str, split: str, source: str, data_dir: str, max_rows: int | None) -> pa.Table:
    """The rows of a split: the task's text columns, then `label`.

    Raises:
        ValueError: There is no such task in `source`.
        HubError: The set cannot be loaded from the hub.
        FileNotFoundError: A package is not in `data_dir`; the message tells how to get it.
    """
    of_task = task_named(task, source)
    if source == offline_glue.SOURCE:
        rows = offline_glue.load(task, split, data_dir)
        table = pa.table([*rows.columns, rows.labels], names=[*of_task.columns, "label"])
    else:
        table = _from_hub(source, task, of_task.validation if split == "validation" else split)
    table = table.select([*of_task.columns, "label"])
    kind = pa.float32() if of_task.num_labels == 1 else pa.int64()
    table = table.set_column(table.num_columns - 1, "label", table["label"].cast(kind))
    return table if max_rows is None else table.slice(0, max_rows)


@functools.lru_cache(maxsize=4)
def _from_hub(source: str, task: str, split: str) -> pa.Table:
    from datasets import load_dataset

    with hub.loading(source, OFFLINE):
        found = load_dataset(source, task.removesuffix("-mm"), split=split)
    table: pa.Table = found.with_format("arrow")[:]
    return table


@functools.lru_cache(maxsize=8)
def fingerprint(**source: Any) -> str:
    """SHA-256 of the rows that `load` gives for the same arguments, its beginning."""
    digest = hashlib.sha256()
    for column in load(**source).columns:
        digest.update(repr(column.to_pylist()).encode())
    return digest.hexdigest()[:12]


def tokenized(rows: pa.Table, *, model: str, max_length: int | None) -> pa.Table:
    """`input_ids`, perhaps `token_type_ids`, and `label` of each row; not padded."""
    *texts, labels = (rows[name] for name in rows.column_names)
    tokens = load_tokenizer(model, max_length)(
        *(column.to_pylist() for column in texts), truncation=True, return_attention_mask=False
    )
    return pa.table({**tokens, "label": labels})


@functools.lru_cache(maxsize=4)
def load_tokenizer(model: str, max_length: int | None) -> PreTrainedTokenizerBase:
    """The tokenizer, which cuts at `max_length` tokens, also once it is saved with a model."""
    source = model_source(model)
    with hub.loading(source, OFFLINE):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source)
    if max_length is not None:
        tokenizer.model_max_length = max_length
    return tokenizer


def model_source(name: str) -> str:
    """What `from_pretrained` takes: a folder for the packaged model, else `name` of the hub."""
    return offline_text.model_path() if name == offline_text.MODEL else name


def score(metric: str, outputs: NDArray[np.floating], labels: NDArray[Any]) -> float:
    """The metric of a task; `outputs` are the model's: (rows, labels)."""
    if metric == "pearson":
        return pearson(outputs[:, 0], labels)
    answers = outputs.argmax(axis=-1)
    if metric == "matthews_correlation":
        return matthews_correlation(answers, labels)
    return float(np.mean(answers == labels))


def matthews_correlation(answers: NDArray[Any], labels: NDArray[Any]) -> float:
    """Matthews correlation of labels 0 and 1; 0.0 where all answers, or all labels, are the same.

    For two classes it is the Pearson correlation of the indicators.
    """
    return pearson(answers, labels)


def pearson(outputs: NDArray[Any], labels: NDArray[Any]) -> float:
    """Pearson correlation; 0.0 where one side does not vary: nothing was told."""
    left, right = (np.asarray(side, dtype=np.float64) for side in (outputs, labels))
    left, right = left - left.mean(), right - right.mean()
    scale = np.sqrt(np.sum(left**2) * np.sum(right**2))
    return float(np.sum(left * right) / scale) if scale > 0 else 0.0
