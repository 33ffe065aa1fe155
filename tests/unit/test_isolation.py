"""What `heats doctor --isolation` says of curves."""

from __future__ import annotations

import math

import pytest

from heats.isolation import Curve, first_difference
from heats.trial import Report


def curve(*losses: float, key: str = "loss") -> Curve:
    reports = [Report(0.0, {key: loss, "epoch": epoch}) for epoch, loss in enumerate(losses, 1)]
    return Curve(reports)


@pytest.mark.parametrize("losses", [(), (0.5,), (0.5, math.nan, math.inf)])
def test_equal_curves_are_identical(losses: tuple[float, ...]) -> None:
    assert first_difference(curve(*losses), curve(*losses), ["loss", "epoch"], "epoch") is None


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (
            curve(0.5, 0.4 + 1.1e-16),
            "DIFFERS: loss at epoch 2 is 0.40000000000000013 instead of 0.4",
        ),
        (curve(0.5, math.nan), "DIFFERS: loss at epoch 2 is nan instead of 0.4"),
        (curve(0.5, 0.4, key="other"), "DIFFERS: loss at epoch 1 is None instead of 0.5"),
        (curve(0.5), "DIFFERS: 1 reports instead of 2"),
    ],
)
def test_first_difference_is_named(other: Curve, told: str) -> None:
    assert first_difference(curve(0.5, 0.4), other, ["loss"], "epoch") == told
