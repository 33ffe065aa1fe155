"""Fine-tuning a vision transformer for image classification with the Hugging Face Trainer.

After the ViT example of Ray's courses ("Scalable Training with Ray Train for ViT Image
Classification"). Model and data come from the hub, or from packages where the config names those of
offline/images.py and offline/vision.py.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import itertools
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import ray.train
import torch
import transformers
from PIL import Image
from ray.train.huggingface.transformers import RayTrainReportCallback, prepare_trainer

import heats
from heats.recipes import hub
from heats.recipes.offline import images as offline_images
from heats.recipes.offline import vision as offline_vision
from heats.recipes.offline.packages import FASHION_MNIST

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import pandas as pd
    from datasets import Dataset
    from numpy.typing import NDArray

# The folder of the Hugging Face checkpoint within the Ray Train checkpoint.
CHECKPOINT_NAME = RayTrainReportCallback.CHECKPOINT_NAME

OFFLINE = "recipe=image_classification"

# The model whose sizes the config gives, with fresh weights.
FROM_CONFIG = "vit"


def train(config: dict[str, Any]) -> None:
    """Train on every rank; after each epoch, evaluate, save, and report both.

    Args:
        config: `lr` (at the end of the warm-up; then it falls to zero on a line), `batch_size` (of
            all workers together), `epochs`, `weight_decay`, `seed`, `model`, `vit` (the sizes of
            `model=vit`: fields of ViTConfig), `image_size` (pixels; None: what the model was
            pretrained with), `freeze_backbone`, `dataset`, `data_dir` (where the packages of
            offline/ are), `eval_split`, `classes` (only the first so many; None: all),
            `max_train_rows`, `max_eval_rows` (None: all), `loader_workers` (processes that load
            data, for each rank; 0: none), `warmup_ratio`.

    Raises:
        HubError: Model or data cannot be loaded from the hub.
        FileNotFoundError: A package is not in `data_dir`; the message tells how to get it.
    """
    _quiet()
    # The same head on every rank, and in every run of this config.
    transformers.set_seed(config["seed"])
    corpus = load_corpus(config)
    model = build_model(config, corpus.label_names)
    heats.set_tags(
        hub.tags(
            data=config["dataset"],
            data_fingerprint=corpus.fingerprint,
            model=config["model"],
            model_fingerprint=hub.model_fingerprint(model),
        )
    )
    # A folder for each rank, so that no rank copies what another one is still writing.
    with tempfile.TemporaryDirectory() as output_dir:
        trainer = build_trainer(
            config, model, corpus, output_dir, ray.train.get_context().get_world_size()
        )
        trainer.add_callback(RayTrainReportCallback())
        trainer = prepare_trainer(trainer)
        if checkpoint := ray.train.get_checkpoint():
            with checkpoint.as_directory() as directory:
                source = Path(directory, CHECKPOINT_NAME)
                load_weights(model, source)
                trainer.train(resume_from_checkpoint=str(source))
        else:
            trainer.train()


def evaluate(config: dict[str, Any], checkpoint_dir: str) -> dict[str, float]:
    """Metrics of a checkpoint, computed anew on the evaluation rows, under their reported names."""
    _quiet()
    source = Path(checkpoint_dir, CHECKPOINT_NAME)
    model = transformers.AutoModelForImageClassification.from_pretrained(source)
    with tempfile.TemporaryDirectory() as output_dir:
        trainer = build_trainer(config, model, load_corpus(config), output_dir)
        metrics: dict[str, float] = trainer.evaluate()
    return {key: metrics[key] for key in ("eval_accuracy", "eval_loss", "eval_majority_accuracy")}


def example(config: dict[str, Any]) -> pd.DataFrame:
    """Two images as the predictor takes them: a frame with the column `image`, of nested lists."""
    import pandas as pd

    _quiet()
    rows = load_corpus(config).eval.with_format(None)[:2]
    arrays = map(_array, rows["pixels"], rows["shape"])
    return pd.DataFrame({"image": [array.tolist() for array in arrays]})


class Corpus(NamedTuple):
    """Rows that become pixels for the model as they are read.

    `majority` is the label that is most frequent in the training rows, `fingerprint` that of the
    rows in use.
    """

    processor: transformers.BaseImageProcessor
    train: Dataset
    eval: Dataset
    label_names: Sequence[str]
    majority: int
    fingerprint: str


def load_corpus(config: dict[str, Any]) -> Corpus:
    """The rows that `config` asks for, kept for later trials; decoded once for a node."""
    keys = ("model", "image_size", "dataset", "data_dir", "eval_split", "classes")
    limits = (config["max_train_rows"], config["max_eval_rows"])
    return _load_corpus(**{key: config[key] for key in keys}, limits=limits)


@functools.lru_cache(maxsize=4)
def _load_corpus(
    *,
    model: str,
    image_size: int | None,
    dataset: str,
    data_dir: str,
    eval_split: str,
    classes: int | None,
    limits: tuple[int | None, int | None],
) -> Corpus:
    processor = load_processor(model, data_dir, image_size)
    train_rows, eval_rows = (
        load_rows(dataset, data_dir, split, classes, limit)
        for split, limit in zip(("train", eval_split), limits, strict=True)
    )

    def transform(batch: dict[str, list[Any]]) -> dict[str, Any]:
        images = [Image.fromarray(each) for each in map(_array, batch["pixels"], batch["shape"])]
        pixel_values = processor(images, return_tensors="pt")["pixel_values"]
        return {"pixel_values": pixel_values, "labels": batch["labels"]}

    majority = collections.Counter(train_rows["labels"]).most_common(1)[0][0]
    of_rows = f"train {fingerprint(train_rows)[:12]}, eval {fingerprint(eval_rows)[:12]}"
    parts = train_rows.with_transform(transform), eval_rows.with_transform(transform)
    return Corpus(processor, *parts, train_rows.features["labels"].names, majority, of_rows)


def load_rows(
    dataset: str, data_dir: str, split: str, classes: int | None, limit: int | None
) -> Dataset:
    """The first rows of a part, with `pixels` (raw bytes), their `shape`, and `labels`.

    They are decoded once for a node, and mapped from a file by each process.

    Args:
        dataset: fashion-mnist, otherwise a data set of the hub, or a folder of images as `datasets`
            takes it: part/class/image.
        data_dir: Where the package of fashion-mnist is.
        split: The part.
        classes: Leave out the rows of other classes than the first so many.
        limit: Number of rows; None: all.
    """
    if dataset == offline_images.DATASET:

        def build() -> Dataset:
            images, labels = offline_images.fashion_mnist(data_dir, split)
            return _decoded(images, labels.tolist(), offline_images.LABELS, classes, limit)

        return heats.cached((FASHION_MNIST.sha256, split, classes, limit), build)

    from datasets import load_dataset

    with hub.loading(dataset, OFFLINE):
        found = load_dataset(dataset, split=split)
    columns = {type(feature).__name__: name for name, feature in found.features.items()}
    image, label = columns["Image"], columns["ClassLabel"]

    def build_found() -> Dataset:
        images = (np.asarray(each.convert("RGB")) for each in found[image])
        return _decoded(images, found[label], found.features[label].names, classes, limit)

    # Their names hold the commit of the hub, or a digest of the folder.
    files = [file["filename"] for file in found.cache_files]
    return heats.cached((files, split, classes, limit), build_found)


def _decoded(
    images: Iterable[NDArray[np.uint8]],
    labels: Sequence[int],
    names: Sequence[str],
    classes: int | None,
    limit: int | None,
) -> Dataset:
    from datasets import ClassLabel, Dataset, Features, List, Value

    pairs = (
        pair for pair in zip(images, labels, strict=True) if classes is None or pair[1] < classes
    )
    rows = list(itertools.islice(pairs, limit))
    return Dataset.from_dict(
        {
            "pixels": [image.tobytes() for image, _ in rows],
            "shape": [image.shape for image, _ in rows],
            "labels": [label for _, label in rows],
        },
        Features(
            pixels=Value("large_binary"),
            shape=List(Value("int32")),
            labels=ClassLabel(names=list(names)[:classes]),
        ),
    )


def _array(pixels: bytes, shape: Sequence[int]) -> NDArray[np.uint8]:
    return np.frombuffer(pixels, np.uint8).reshape(shape)


def fingerprint(rows: Dataset) -> str:
    """SHA-256 of images and labels."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(repr((row["shape"], row["labels"])).encode())
        digest.update(row["pixels"])
    return digest.hexdigest()


def load_processor(
    model: str, data_dir: str, image_size: int | None
) -> transformers.BaseImageProcessor:
    """What makes pixels for the model of images; grey ones it turns into RGB."""
    settings: dict[str, Any] = {"do_convert_rgb": True}
    if image_size is not None:
        settings["size"] = {"height": image_size, "width": image_size}
    if model == FROM_CONFIG:
        return transformers.ViTImageProcessor(**settings)
    source = model_source(model, data_dir)
    with hub.loading(source, OFFLINE):
        processor: transformers.BaseImageProcessor = (
            transformers.AutoImageProcessor.from_pretrained(source, **settings)  # type: ignore[no-untyped-call]
        )
    return processor


def model_source(name: str, data_dir: str) -> str:
    """What `from_pretrained` takes: a folder for the packaged model, else `name` of the hub."""
    return offline_vision.model_path(data_dir) if name == offline_vision.MODEL else name


def build_model(config: dict[str, Any], label_names: Sequence[str]) -> transformers.PreTrainedModel:
    """A vision transformer with a fresh head for these labels."""
    labels: dict[str, Any] = {
        "id2label": dict(enumerate(label_names)),
        "label2id": {name: index for index, name in enumerate(label_names)},
    }
    model: transformers.PreTrainedModel
    if config["model"] == FROM_CONFIG:
        sizes = {"image_size": config["image_size"], **config["vit"]}
        model = transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, **labels))
    else:
        source = model_source(config["model"], config["data_dir"])
        with hub.loading(source, OFFLINE):
            model = transformers.AutoModelForImageClassification.from_pretrained(
                source, num_labels=len(label_names), **labels
            )
    if config["freeze_backbone"]:
        model.base_model.requires_grad_(requires_grad=False)
    return model


def load_weights(model: transformers.PreTrainedModel, folder: Path) -> None:
    """Give a model the weights of a checkpoint, before a Trainer goes on from it.

    The Trainer alone would not find them: `save_pretrained` writes the weights of a vision
    transformer under older names, which `from_pretrained` knows and the Trainer does not
    (transformers 5.23, https://github.com/huggingface/transformers/issues/48805). What it does not
    find it leaves as it is: so it goes on with these.

    Raises:
        ValueError: The checkpoint lacks some weights.
    """
    loaded: Any = type(model).from_pretrained(folder, output_loading_info=True)
    saved, found = loaded
    if found["missing_keys"]:
        msg = f"The checkpoint in {folder} has no weights for {sorted(found['missing_keys'])}."
        raise ValueError(msg)
    model.load_state_dict(saved.state_dict())


def build_trainer(
    config: dict[str, Any],
    model: transformers.PreTrainedModel,
    corpus: Corpus,
    output_dir: str,
    world_size: int = 1,
) -> transformers.Trainer:
    """A Trainer that evaluates and saves after each epoch."""
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
        remove_unused_columns=False,  # The transform makes the model's from the others.
        dataloader_num_workers=config["loader_workers"],
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
        data_collator=collate,
        train_dataset=corpus.train,
        eval_dataset=corpus.eval,
        processing_class=corpus.processor,
        compute_metrics=compute_metrics,
    )
    trainer.remove_callback(transformers.PrinterCallback)  # The report says the same.
    return trainer


def collate(rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch: `pixel_values` (batch, 3, height, width) and `labels` (batch,)."""
    return {
        "pixel_values": torch.stack([row["pixel_values"] for row in rows]),
        "labels": torch.tensor([row["labels"] for row in rows]),
    }


def _quiet() -> None:
    """No progress bars and tables of loaded weights: a sweep would repeat them for every trial."""
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
