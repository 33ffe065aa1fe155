from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from heats.config import Direction
from heats.trial import Objective, clean_metrics, resource_spent

LOSS = Objective("loss", Direction.minimize)
SCORE = Objective("score", Direction.maximize)


@pytest.mark.parametrize(
    ("objective", "value", "than", "is_better"),
    [
        (LOSS, 0.1, 0.2, True),
        (LOSS, 0.2, 0.1, False),
        (LOSS, 0.1, 0.1, False),
        (SCORE, 0.2, 0.1, True),
        (SCORE, 0.1, 0.2, False),
        (LOSS, 0.1, None, True),
        (LOSS, None, None, False),
        (LOSS, None, 0.1, False),
        (LOSS, 0.1, math.nan, True),
        (LOSS, -math.inf, 0.1, False),
        (LOSS, math.nan, None, False),
        (SCORE, math.inf, 0.1, False),
        (SCORE, 0.1, math.inf, True),
    ],
)
def test_better_is_finite_and_ahead(
    objective: Objective, value: float | None, than: float | None, is_better: bool
) -> None:
    assert objective.is_better(value, than) is is_better


def test_objective_without_a_metric_has_a_name() -> None:
    assert Objective(None, Direction.minimize).name == "objective"
    assert LOSS.name == "loss"


@pytest.mark.parametrize(
    ("value", "cleaned"),
    [
        (True, 1.0),
        (3, 3.0),
        (0.5, 0.5),
        (np.float32(0.5), 0.5),
        (np.int64(7), 7.0),
        (np.array(0.25), 0.25),
        (10**400, math.inf),
        (-(10**400), -math.inf),
        (math.inf, math.inf),
    ],
)
def test_numbers_become_floats(value: Any, cleaned: float) -> None:
    metrics = clean_metrics({"loss": value})
    assert metrics == {"loss": cleaned}
    assert type(metrics["loss"]) is float


def test_nan_stays_nan() -> None:
    assert math.isnan(clean_metrics({"loss": math.nan})["loss"])


@pytest.mark.parametrize(
    "value", ["0.5", b"0.5", None, [0.5], {"a": 1}, np.array([1.0, 2.0]), 1j, object()]
)
def test_what_is_no_number_is_left_out(value: Any) -> None:
    assert clean_metrics({"loss": 0.5, "other": value}) == {"loss": 0.5}


def test_names_of_metrics_are_text() -> None:
    assert clean_metrics({1: 0.5}) == {"1": 0.5}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("metrics", "spent"),
    [
        ({"epoch": 3.0}, 3),
        ({"epoch": 2.9}, 2),
        ({"epoch": 0.0}, 0),
        ({"step": 3.0}, 5),
        ({"epoch": math.nan}, 5),
        ({"epoch": math.inf}, 5),
    ],
)
def test_resource_is_reported_or_counted(metrics: dict[str, float], spent: int) -> None:
    assert resource_spent(metrics, 5, "epoch") == spent
