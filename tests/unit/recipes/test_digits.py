"""The digits recipe on one rank, and its predictor."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import mlflow
import numpy as np
import pytest
import torch
from mlflow.pyfunc.model import PythonModelContext

from heats.recipes import digits, digits_predictor

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.recipes.conftest import OneRank

CONFIG: dict[str, Any] = {
    "lr": 3e-3,
    "batch_size": 64,
    "epochs": 4,
    "weight_decay": 1e-4,
    "seed": 0,
    "hidden": 32,
    "dropout": 0.2,
}


def test_split_is_the_same_in_every_process_and_has_every_class_in_proportion() -> None:
    data = digits.load_data()

    assert (len(data.train_images), len(data.val_images)) == (1437, 360)
    assert data.val_labels[:8].tolist() == [7, 6, 3, 7, 7, 3, 2, 8]
    assert data.val_labels.bincount().tolist() == [36, 36, 35, 37, 36, 37, 36, 36, 35, 36]
    assert (float(data.train_images.min()), float(data.train_images.max())) == (0.0, 1.0)


def test_every_epoch_reports_metrics_and_a_checkpoint(one_rank: OneRank) -> None:
    metrics = one_rank.run(digits.train, CONFIG)

    assert [set(m) for m in metrics] == [{"epoch", "train_loss", "val_loss", "val_accuracy"}] * 4
    assert [m["epoch"] for m in metrics] == [1, 2, 3, 4]
    assert len(one_rank.checkpoints) == 4
    assert {path.name for path in one_rank.checkpoints[0].iterdir()} == {
        digits.WEIGHTS,
        digits.ARCHITECTURE,
        digits.TRAINING,
    }


def test_default_settings_reach_97_percent(one_rank: OneRank) -> None:
    metrics = one_rank.run(digits.train, CONFIG | {"epochs": 20, "hidden": 64, "dropout": 0.1})

    assert max(m["val_accuracy"] for m in metrics) >= 0.97


def test_run_that_continues_equals_one_that_never_stopped(one_rank: OneRank) -> None:
    whole = one_rank.run(digits.train, CONFIG)
    last = one_rank.checkpoints[-1]
    second = one_rank.checkpoints[1]

    rest = one_rank.run(digits.train, CONFIG, continue_from=second)

    assert rest == whole[2:]
    for name in (digits.WEIGHTS, digits.ARCHITECTURE):
        assert (one_rank.checkpoints[-1] / name).read_bytes() == (last / name).read_bytes()


def test_other_seed_gives_another_run_and_the_same_seed_the_same(one_rank: OneRank) -> None:
    first = one_rank.run(digits.train, CONFIG)
    again = one_rank.run(digits.train, CONFIG)
    other = one_rank.run(digits.train, CONFIG | {"seed": 1})

    assert again == first
    assert other != first


def test_run_from_a_checkpoint_of_other_settings_goes_on_with_its_own(one_rank: OneRank) -> None:
    one_rank.run(digits.train, CONFIG)
    own = CONFIG | {"lr": 1e-4, "weight_decay": 0.5}

    one_rank.run(digits.train, own, continue_from=one_rank.checkpoints[0])

    state = torch.load(one_rank.checkpoints[-1] / digits.TRAINING, weights_only=True)
    (group,) = state["optimizer"]["param_groups"]
    assert (group["lr"], group["weight_decay"]) == (1e-4, 0.5)


def test_evaluate_gives_exactly_what_was_reported(one_rank: OneRank) -> None:
    metrics = one_rank.run(digits.train, CONFIG)

    for reported, checkpoint in zip(metrics, one_rank.checkpoints, strict=True):
        found = digits.evaluate(CONFIG, str(checkpoint))
        assert found == {key: reported[key] for key in ("val_loss", "val_accuracy")}


def test_run_that_diverges_reports_it_and_goes_on(one_rank: OneRank) -> None:
    metrics = one_rank.run(digits.train, CONFIG | {"lr": 1e30, "epochs": 2})

    assert len(metrics) == 2
    assert not math.isfinite(metrics[-1]["val_loss"])


def test_predictor_answers_as_the_trained_model(one_rank: OneRank) -> None:
    one_rank.run(digits.train, CONFIG)
    checkpoint = str(one_rank.checkpoints[-1])
    predictor = digits_predictor.DigitsClassifier()
    context = PythonModelContext({"checkpoint": checkpoint}, model_config={})  # type: ignore[no-untyped-call]
    data = digits.load_data()

    predictor.load_context(context)
    answers = predictor.predict(context, (data.val_images * digits.MAX_PIXEL).numpy())

    accuracy = float(np.mean(answers == data.val_labels.numpy()))
    assert accuracy == digits.evaluate(CONFIG, checkpoint)["val_accuracy"]


def test_mlflow_stores_the_predictor_without_heats_and_infers_its_signature(
    one_rank: OneRank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_rank.run(digits.train, CONFIG | {"epochs": 1})
    monkeypatch.chdir(tmp_path)
    images = digits.example(CONFIG)

    mlflow.pyfunc.save_model(
        tmp_path / "model",
        python_model=digits_predictor.__file__,
        artifacts={"checkpoint": str(one_rank.checkpoints[-1])},
        input_example=images,
        pip_requirements=["torch"],
    )
    model = mlflow.pyfunc.load_model(str(tmp_path / "model"))

    assert images.shape == (5, 64)
    assert model.predict(images).shape == (5,)
    assert str(model.metadata.signature.inputs) == "[Tensor('float32', (-1, 64))]"
    assert "heats" not in (tmp_path / "model" / "digits_predictor.py").read_text().replace(
        "nothing of heats", ""
    )
