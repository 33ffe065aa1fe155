"""The arithmetic of the GPT-2 benchmark."""

from __future__ import annotations

import pytest

pytest.importorskip("tiktoken", reason="needs heats[examples]")

from benchmarks import gpt2

SMALL_GPT2 = {**gpt2._GPT2, "n_positions": 256, "dropout": 0.0, "seed": 0}


def test_utilization_is_the_share_of_the_peak_that_the_model_needs() -> None:
    of_a_token = 6 * 123_849_984 + 12 * 12 * 768 * 256

    found = gpt2.utilization(SMALL_GPT2, 100_000.0, "NVIDIA H100 80GB HBM3")

    assert found == pytest.approx(100_000 * of_a_token / 989e12)


def test_utilization_of_an_unknown_gpu_is_not_known() -> None:
    assert gpt2.utilization(SMALL_GPT2, 100_000.0, "Some GPU") is None
