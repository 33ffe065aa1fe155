"""Fine-tuning a BERT for text classification with the Hugging Face Trainer in Ray Train.

After Ray's guide "Get Started with Distributed Training using Hugging Face Transformers". Model and
data come from the hub, or from packages where the config names those of offline/text.py.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import ray.train
import torch
import transformers
from ray.train.huggingface.transformers import RayTrainReportCallback, prepare_trainer

import heats
from heats.recipes import hub
from heats.recipes.offline import text as offline_text
from heats.recipes.offline.text import Rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd
    from datasets import Dataset

# The folder of the Hugging Face checkpoint within the Ray Train checkpoint.
CHECKPOINT_NAME = RayTrainReportCallback.CHECKPOINT_NAME

OFFLINE = "recipe=text_classification"


def train(config: dict[str, Any]) -> None:
    """Train on every rank; after each epoch, evaluate, save, and report both.

    Args:
        config: `lr` (at the end of the warm-up; then it falls to zero on a line), `batch_size` (of
            all workers together), `epochs`, `weight_decay`, `seed`, `model`, `dataset`, `data_dir`
            (where the packages of offline/ are), `max_train_rows`, `max_eval_rows` (None: all
            rows), `max_length` (tokens), `padding` (True: to the longest of a batch;
            "max_length"), `frozen_layers`, `warmup_ratio`.

    Raises:
        HubError: Model or data cannot be loaded from the hub.
        FileNotFoundError: A package is not in `data_dir`; the message tells how to get it.
    """
    _quiet()
    # The same head on every rank, and in every run of this config.
    transformers.set_seed(config["seed"])
    corpus = load_corpus(config)
    source = model_source(config["model"])
    with hub.loading(source, OFFLINE):
        model = transformers.AutoModelForSequenceClassification.from_pretrained(
            source,
            num_labels=len(corpus.label_names),
            id2label=dict(enumerate(corpus.label_names)),
            label2id={name: index for index, name in enumerate(corpus.label_names)},
        )
    heats.set_tags(
        hub.tags(
            data=config["dataset"],
            data_fingerprint=corpus.fingerprint,
            model=config["model"],
            model_fingerprint=hub.model_fingerprint(model),
        )
    )
    freeze(model, config["frozen_layers"])
    # A folder for each rank, so that no rank copies what another one is still writing.
    with tempfile.TemporaryDirectory() as output_dir:
        trainer = build_trainer(
            config, model, corpus, output_dir, ray.train.get_context().get_world_size()
        )
        trainer.add_callback(RayTrainReportCallback())
        trainer = prepare_trainer(trainer)
        if checkpoint := ray.train.get_checkpoint():
            with checkpoint.as_directory() as directory:
                trainer.train(resume_from_checkpoint=str(Path(directory, CHECKPOINT_NAME)))
        else:
            trainer.train()


def evaluate(config: dict[str, Any], checkpoint_dir: str) -> dict[str, float]:
    """Metrics of a checkpoint, computed anew on the evaluation rows, under their reported names."""
    _quiet()
    source = Path(checkpoint_dir, CHECKPOINT_NAME)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(source)
    with tempfile.TemporaryDirectory() as output_dir:
        trainer = build_trainer(config, model, load_corpus(config), output_dir)
        metrics: dict[str, float] = trainer.evaluate()
    return {key: metrics[key] for key in ("eval_accuracy", "eval_loss", "eval_majority_accuracy")}


def example(config: dict[str, Any]) -> pd.DataFrame:
    """Three texts as the predictor takes them: a frame with the column `text`."""
    import pandas as pd

    del config  # The same for every trial.
    texts = ["A joy from start to end.", "It has its moments.", "Two hours that I want back."]
    return pd.DataFrame({"text": texts})


class Corpus(NamedTuple):
    """Tokenized rows; `majority` is the label that is most frequent in the training rows.

    `fingerprint` is that of the rows in use.
    """

    tokenizer: transformers.PreTrainedTokenizerBase
    train: Dataset
    eval: Dataset
    label_names: Sequence[str]
    majority: int
    fingerprint: str


def load_corpus(config: dict[str, Any]) -> Corpus:
    """The rows that `config` asks for, kept for later trials; tokenized once for a node."""
    keys = ("model", "dataset", "data_dir", "max_train_rows", "max_eval_rows", "max_length")
    padding = config.get("padding", True)
    return _load_corpus(**{key: config[key] for key in keys}, padding=padding)


@functools.lru_cache(maxsize=4)
def _load_corpus(
    *,
    model: str,
    dataset: str,
    data_dir: str,
    max_train_rows: int | None,
    max_eval_rows: int | None,
    max_length: int,
    padding: bool | str,
) -> Corpus:
    from datasets import Dataset

    source = model_source(model)
    with hub.loading(source, OFFLINE):
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    tokenizer.model_max_length = max_length  # Saved with the model: the predictor cuts there too.
    train_rows, eval_rows, label_names = _load_rows(
        dataset, data_dir, max_train_rows, max_eval_rows
    )

    pad_now = padding == "max_length"  # Otherwise the Trainer pads each batch.

    def tokenized(rows: Rows) -> Dataset:
        def build() -> Dataset:
            tokens = tokenizer(rows.texts, truncation=True, padding=padding if pad_now else False)
            return Dataset.from_dict({**tokens, "label": rows.labels})

        version = transformers.__version__
        return heats.cached((model, version, max_length, pad_now, fingerprint(rows)), build)

    majority = collections.Counter(train_rows.labels).most_common(1)[0][0]
    of_rows = f"train {fingerprint(train_rows)[:12]}, eval {fingerprint(eval_rows)[:12]}"
    parts = tokenized(train_rows), tokenized(eval_rows)
    return Corpus(tokenizer, *parts, label_names, majority, of_rows)


def fingerprint(rows: Rows) -> str:
    """SHA-256 of texts and labels."""
    return hashlib.sha256(repr(rows).encode()).hexdigest()


def _load_rows(
    dataset: str, data_dir: str, max_train_rows: int | None, max_eval_rows: int | None
) -> tuple[Rows, Rows, Sequence[str]]:
    """The first rows of the parts `train` and `test`, and the names of the labels."""
    if dataset == offline_text.DATASET:
        parts = offline_text.movie_reviews(data_dir)
        train_rows, eval_rows = (
            Rows(parts[split].texts[:limit], parts[split].labels[:limit])
            for split, limit in (("train", max_train_rows), ("test", max_eval_rows))
        )
        return train_rows, eval_rows, offline_text.LABELS

    from datasets import load_dataset

    with hub.loading(dataset, OFFLINE):
        found = load_dataset(dataset)
    train_rows, eval_rows = (
        Rows(list(found[split]["text"][:limit]), list(found[split]["label"][:limit]))
        for split, limit in (("train", max_train_rows), ("test", max_eval_rows))
    )
    return train_rows, eval_rows, found["train"].features["label"].names


def model_source(name: str) -> str:
    """What `from_pretrained` takes: a folder for the packaged model, else `name` of the hub."""
    return offline_text.model_path() if name == offline_text.MODEL else name


def freeze(model: transformers.PreTrainedModel, num_layers: int) -> None:
    """Keep the embeddings and the first encoder layers of a BERT as they are; 0: train all."""
    if num_layers == 0:
        return
    base: Any = model.base_model
    for module in (base.embeddings, *base.encoder.layer[:num_layers]):
        module.requires_grad_(requires_grad=False)


def build_trainer(
    config: dict[str, Any],
    model: transformers.PreTrainedModel,
    corpus: Corpus,
    output_dir: str,
    world_size: int = 1,
) -> transformers.Trainer:
    """A Trainer that evaluates and saves after each epoch; batches are padded to their longest."""
    has_gpu = torch.cuda.is_available()
    batch_size = max(1, config["batch_size"] // world_size)
    arguments = transformers.TrainingArguments(
        output_dir=output_dir,
        num_train_epochs=config["epochs"],
        per_device_train_batch_size=batch_size,
        per_device_eval_batch_size=batch_size,
        learning_rate=config["lr"],
        weight_decay=config["weight_decay"],
        warmup_steps=config["warmup_ratio"],  # Below one it is a share of all steps.
        seed=config["seed"],
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_strategy="epoch",
        save_total_limit=1,  # The report has copied the others away.
        # Else the loss, a mean over the rank's rows, is multiplied by the number of ranks.
        average_tokens_across_devices=False,
        use_cpu=not has_gpu,
        dataloader_pin_memory=has_gpu,
        disable_tqdm=True,
        report_to="none",
    )

    def compute_metrics(prediction: transformers.EvalPrediction) -> dict[str, float]:
        labels = np.asarray(prediction.label_ids)
        answers = np.asarray(prediction.predictions).argmax(axis=-1)
        return {
            "accuracy": float(np.mean(answers == labels)),
            "majority_accuracy": float(np.mean(labels == corpus.majority)),
        }

    trainer = transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=corpus.train,
        eval_dataset=corpus.eval,
        processing_class=corpus.tokenizer,
        compute_metrics=compute_metrics,
    )
    trainer.remove_callback(transformers.PrinterCallback)  # The report says the same.
    return trainer


def _quiet() -> None:
    """No progress bars and tables of loaded weights: a sweep would repeat them for every trial."""
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
