from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from mlflow.entities.model_registry import ModelVersion, ModelVersionTag

from heats.config import Direction
from heats.tracking.candidate import Candidate
from heats.tracking.gates import better, reproduced
from heats.trial import Objective

CANDIDATE = Candidate(
    study="digits",
    trial=3,
    run_id="a" * 32,
    objective=Objective("val_loss", Direction.minimize),
    value=0.25,
    checkpoint="run-3/checkpoint",
    resource=9,
)


def _held_by(**changes: Any) -> ModelVersion:
    """Version 7, promoted from another run than the candidate's."""
    tags = dataclasses.replace(CANDIDATE, **{"run_id": "b" * 32, **changes}).tags()
    listed = [
        ModelVersionTag(key, value)  # type: ignore[no-untyped-call]
        for key, value in tags.items()
    ]
    return ModelVersion("digits", "7", 0, tags=listed)


@pytest.mark.parametrize(
    ("value", "passes"),
    [(0.25, True), (0.25 * (1 + 1e-7), True), (0.25 * (1 + 1e-5), False), (float("nan"), False)],
)
def test_reproduced_allows_the_relative_tolerance(value: float, passes: bool) -> None:
    def evaluate(config: dict[str, Any], checkpoint_dir: str) -> dict[str, float]:
        assert (config, checkpoint_dir) == ({"lr": 1}, "here")
        return {"val_loss": value}

    gate = reproduced(CANDIDATE, evaluate, {"lr": 1}, Path("here"), tolerance=1e-6)
    assert gate.passed is passes
    assert repr(value) in gate.detail
    assert "0.25" in gate.detail


def test_reproduced_takes_rounding_around_zero_for_equal() -> None:
    candidate = dataclasses.replace(CANDIDATE, value=0.0)
    gate = reproduced(candidate, lambda *_: {"val_loss": 1e-12}, {}, Path("here"), tolerance=1e-6)
    assert gate.passed


def test_reproduced_says_what_evaluate_returns_instead_of_the_objective() -> None:
    gate = reproduced(CANDIDATE, lambda *_: {"f1": 1, "acc": 1}, {}, Path("here"), tolerance=1)
    assert not gate.passed
    assert "val_loss; it returns acc, f1" in gate.detail


def test_reproduced_says_where_evaluate_raised() -> None:
    def evaluate(config: dict[str, Any], _: str) -> dict[str, float]:
        return {"val_loss": config["missing"]}

    gate = reproduced(CANDIDATE, evaluate, {}, Path("here"), tolerance=1)
    assert not gate.passed
    assert "KeyError: 'missing'" in gate.detail
    assert "test_gates.py:" in gate.detail


def test_better_passes_where_nothing_holds_the_alias() -> None:
    assert better(CANDIDATE, None, "champion").passed


@pytest.mark.parametrize(
    ("direction", "champion", "passes"),
    [
        (Direction.minimize, 0.3, True),
        (Direction.minimize, 0.25, False),
        (Direction.minimize, 0.2, False),
        (Direction.minimize, float("nan"), True),
        (Direction.maximize, 0.2, True),
        (Direction.maximize, 0.3, False),
    ],
)
def test_better_compares_in_the_objectives_direction(
    direction: Direction, champion: float, passes: bool
) -> None:
    objective = Objective("val_loss", direction)
    candidate = dataclasses.replace(CANDIDATE, objective=objective)
    gate = better(candidate, _held_by(value=champion, objective=objective), "champion")
    assert gate.passed is passes
    assert "0.25 of trial 3" in gate.detail
    assert f"{champion!r} of version 7" in gate.detail


@pytest.mark.parametrize(
    "objective",
    [Objective("val_accuracy", Direction.minimize), Objective("val_loss", Direction.maximize)],
)
def test_better_refuses_another_metric_or_direction(objective: Objective) -> None:
    gate = better(CANDIDATE, _held_by(value=99.0, objective=objective), "champion")
    assert not gate.passed
    assert "not comparable" in gate.detail
    assert "99.0" in gate.detail


def test_better_refuses_to_replace_a_version_of_unknown_value() -> None:
    gate = better(CANDIDATE, ModelVersion("digits", "7", 0), "champion")
    assert not gate.passed
    assert "heats.value" in gate.detail


def test_better_lets_new_predictor_code_replace_the_old_one() -> None:
    assert better(CANDIDATE, _held_by(run_id=CANDIDATE.run_id), "champion").passed
