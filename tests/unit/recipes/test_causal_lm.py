"""The recipe causal_lm on one rank, with a GPT-2 that is as small as its vocabulary lets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("transformers", reason="needs heats[examples]")
pytest.importorskip("tiktoken", reason="needs heats[examples]")

import ray.train
from mlflow.pyfunc.model import PythonModelContext
from tests.unit.recipes.gpt2_data import CONFIG, NUM_BLOCKS, Shards, needs_packages

from heats.recipes import causal_lm, gpt2_predictor

if TYPE_CHECKING:
    from tests.unit.recipes.conftest import OneRank

pytestmark = [pytest.mark.timeout(60), needs_packages]

TIMES = ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second")


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Settings for a few blocks, of which a run takes more than one pass."""
    settings = CONFIG | {"batch_size": 16, "epochs": 2, "eval_steps": 3, "dropout": 0.1}
    assert settings["epochs"] * settings["eval_steps"] > NUM_BLOCKS / settings["batch_size"]
    monkeypatch.setattr(ray.train, "get_dataset_shard", Shards(settings).get)
    return settings


def without_times(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: m[key] for key in m if key not in TIMES} for m in metrics]


def test_run_that_continues_in_its_second_pass_equals_one_that_never_stopped(
    one_rank: OneRank, config: dict[str, Any]
) -> None:
    config |= {"epochs": 3}
    whole = one_rank.run(causal_lm.train, config)
    second = one_rank.checkpoints[1]

    rest = one_rank.run(causal_lm.train, config, continue_from=second)

    assert [m["step"] for m in whole] == [3, 6, 9]
    assert whole[2]["eval_loss"] < whole[0]["eval_loss"] < 10.9
    assert without_times(rest) == without_times(whole[2:])


def test_evaluate_gives_what_was_reported_and_the_predictor_reads_the_checkpoint(
    one_rank: OneRank, config: dict[str, Any]
) -> None:
    (reported,) = one_rank.run(causal_lm.train, config | {"epochs": 1})
    checkpoint = str(one_rank.checkpoints[0])

    found = causal_lm.evaluate(config, checkpoint)

    assert found == {"eval_loss": pytest.approx(reported["eval_loss"], rel=1e-6)}
    predictor = gpt2_predictor.TextGenerator()
    context = PythonModelContext({"checkpoint": checkpoint}, model_config={})  # type: ignore[no-untyped-call]
    predictor.load_context(context)
    frame, _ = causal_lm.example(config)
    assert len(predictor.predict(context, frame, {"max_new_tokens": 2})) == 2
