"""The recipe gpt2_pretraining on one rank, with a GPT-2 that is as small as its vocabulary lets."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("transformers", reason="needs heats[examples]")
pytest.importorskip("tiktoken", reason="needs heats[examples]")

import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from mlflow.pyfunc.model import PythonModelContext
from tests.unit.recipes.gpt2_data import CONFIG, Shards, needs_packages
from torch import nn

from heats.recipes import gpt2, gpt2_predictor, gpt2_pretraining

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.unit.recipes.conftest import OneRank

pytestmark = [pytest.mark.timeout(60), needs_packages]

TIMES = ("epoch_time_sec", "tokens_per_sec")


@pytest.fixture
def config(one_rank: OneRank, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Settings for a few blocks; their datasets are there."""
    settings = CONFIG | {
        "epochs": 2,
        "steps_per_epoch": 3,
        "dropout": 0.1,
        "parallel_strategy": "ddp",
        "precision": "fp32",
        "gradient_accumulation": 1,
        "compile": False,
        "activation_checkpointing": False,
        "checkpoint_upload": "sync",
    }
    monkeypatch.setattr(ray.train, "get_dataset_shard", Shards(settings).get)
    monkeypatch.setattr(ray.train.torch, "prepare_model", lambda model, **_: model)
    return settings


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """Of this process alone, as a worker of one has it."""
    meeting = f"file://{tmp_path}/process-group"
    dist.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def without_times(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: m[key] for key in m if key not in TIMES} for m in metrics]


def test_training_reports_every_epoch_and_lowers_the_loss(
    one_rank: OneRank, config: dict[str, Any]
) -> None:
    first, second = one_rank.run(gpt2_pretraining.train, config)

    assert (first["epoch"], second["epoch"]) == (1, 2)
    assert second["val_loss"] < first["val_loss"] < 10.9
    assert first["epoch_tokens"] == 3 * config["batch_size"] * config["block_size"]
    assert first["tokens_per_sec"] > 0
    assert len(one_rank.checkpoints) == 2


def test_run_that_continues_equals_one_that_never_stopped(
    one_rank: OneRank, config: dict[str, Any]
) -> None:
    whole = one_rank.run(gpt2_pretraining.train, config)
    first = one_rank.checkpoints[0]

    rest = one_rank.run(gpt2_pretraining.train, config, continue_from=first)

    assert without_times(rest) == without_times(whole[1:])


@pytest.mark.usefixtures("process_group")
def test_sharded_run_equals_a_whole_one_and_continues_from_either_checkpoint(
    one_rank: OneRank, config: dict[str, Any]
) -> None:
    whole = one_rank.run(gpt2_pretraining.train, config)
    whole_checkpoint = one_rank.checkpoints[0]
    sharded_config = config | {"parallel_strategy": "fsdp2"}

    sharded = one_rank.run(gpt2_pretraining.train, sharded_config)
    checkpoint = one_rank.checkpoints[0]

    for found, expected in zip(sharded, whole, strict=True):
        assert found["train_loss"] == pytest.approx(expected["train_loss"], rel=1e-6)
        assert found["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-6)
    assert not (checkpoint / "model.safetensors").exists()
    for start in (checkpoint, whole_checkpoint):
        for settings in (config, sharded_config):
            (rest,) = one_rank.run(gpt2_pretraining.train, settings, continue_from=start)
            assert rest["val_loss"] == pytest.approx(whole[1]["val_loss"], rel=1e-6)
    found = gpt2_pretraining.evaluate(config, str(checkpoint))
    assert found["val_loss"] == pytest.approx(sharded[0]["val_loss"], rel=1e-6)


def test_evaluate_gives_what_was_reported(one_rank: OneRank, config: dict[str, Any]) -> None:
    (reported,) = one_rank.run(gpt2_pretraining.train, config | {"epochs": 1})

    found = gpt2_pretraining.evaluate(config, str(one_rank.checkpoints[0]))

    assert found == {"val_loss": pytest.approx(reported["val_loss"], rel=1e-9)}


def test_two_batches_added_up_are_one_step_of_twice_the_size(
    one_rank: OneRank, config: dict[str, Any]
) -> None:
    config |= {"dropout": 0.0, "epochs": 1, "shuffle_buffer": None}

    (added,) = one_rank.run(
        gpt2_pretraining.train, config | {"batch_size": 2, "gradient_accumulation": 2}
    )
    (at_once,) = one_rank.run(gpt2_pretraining.train, config | {"batch_size": 4})

    assert added["epoch_tokens"] == at_once["epoch_tokens"]
    assert added["val_loss"] == pytest.approx(at_once["val_loss"], rel=1e-5)


def test_recomputed_activations_change_no_number(one_rank: OneRank, config: dict[str, Any]) -> None:
    kept = one_rank.run(gpt2_pretraining.train, config)

    recomputed = one_rank.run(gpt2_pretraining.train, config | {"activation_checkpointing": True})

    assert without_times(recomputed) == without_times(kept)


def test_compiled_model_is_the_same_model(
    one_rank: OneRank, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[nn.Module] = []
    compile_module = nn.Module.compile

    def compile_eager(module: nn.Module) -> None:
        calls.append(module)
        compile_module(module, backend="eager")

    monkeypatch.setattr(nn.Module, "compile", compile_eager)
    config |= {"epochs": 1, "dropout": 0.0}
    (plain,) = one_rank.run(gpt2_pretraining.train, config)

    (compiled,) = one_rank.run(gpt2_pretraining.train, config | {"compile": True})

    assert len(calls) == 1
    assert compiled["val_loss"] == pytest.approx(plain["val_loss"], rel=1e-5)


def test_bf16_computes_in_half_the_bits_and_keeps_the_weights_whole(
    one_rank: OneRank, config: dict[str, Any]
) -> None:
    (full,) = one_rank.run(gpt2_pretraining.train, config | {"epochs": 1})

    (half,) = one_rank.run(gpt2_pretraining.train, config | {"epochs": 1, "precision": "bf16"})

    assert half["val_loss"] != full["val_loss"]
    assert half["val_loss"] == pytest.approx(full["val_loss"], rel=1e-2)
    model = gpt2_predictor.load_model(str(one_rank.checkpoints[0]))
    assert {weights.dtype for weights in model.parameters()} == {torch.float32}


def test_asynchronous_upload_leaves_the_folder_to_ray(
    one_rank: OneRank, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    options: list[dict[str, Any]] = []

    def report(metrics: dict[str, Any], checkpoint: Any = None, **given: Any) -> None:
        options.append(given)
        one_rank.report(metrics, checkpoint)

    monkeypatch.setattr(ray.train, "report", report)

    one_rank.run(gpt2_pretraining.train, config | {"epochs": 1, "checkpoint_upload": "async"})

    (given,) = options
    assert given["checkpoint_upload_mode"] is ray.train.CheckpointUploadMode.ASYNC
    assert given["delete_local_checkpoint_after_upload"] is True


@pytest.mark.parametrize("key", ["parallel_strategy", "precision", "checkpoint_upload"])
def test_unknown_switch_is_an_error_that_lists_the_known_ones(
    one_rank: OneRank, config: dict[str, Any], key: str
) -> None:
    with pytest.raises(ValueError, match=f"{key}='zero' is unknown. Known: "):
        one_rank.run(gpt2_pretraining.train, config | {key: "zero"})


def test_more_blocks_for_a_step_than_there_are_is_an_error(
    one_rank: OneRank, config: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match="Lower batch_size"):
        one_rank.run(gpt2_pretraining.train, config | {"batch_size": 10_000})


def test_predictor_goes_on_with_each_prompt(one_rank: OneRank, config: dict[str, Any]) -> None:
    one_rank.run(gpt2_pretraining.train, config | {"epochs": 1})
    predictor = gpt2_predictor.TextGenerator()
    artifacts = {"checkpoint": str(one_rank.checkpoints[0])}
    context = PythonModelContext(artifacts, model_config={})  # type: ignore[no-untyped-call]
    frame, params = gpt2_pretraining.example(config)
    predict = functools.partial(predictor.predict, context, frame)

    predictor.load_context(context)
    greedy = predict(params | {"max_new_tokens": 4})["text"].tolist()
    sampled = predict({"max_new_tokens": 4, "temperature": 1.0, "seed": 1})["text"].tolist()

    assert len(greedy) == 2
    assert predict({"max_new_tokens": 4})["text"].tolist() == greedy
    assert predict({"max_new_tokens": 0})["text"].tolist() == ["", ""]
    assert sampled != greedy
    again = predict({"max_new_tokens": 4, "temperature": 1.0, "seed": 1})["text"].tolist()
    assert again == sampled
    longer_than_the_model = "a " * config["n_positions"]
    frame["prompt"] = longer_than_the_model
    assert len(predict({"max_new_tokens": 2})) == 2


def test_saved_encoding_is_the_one_of_training(config: dict[str, Any], tmp_path: Path) -> None:
    encoding = gpt2.encoding(config["source"], config["data_dir"])

    gpt2.save_encoding(encoding, tmp_path)

    text = "Hello world, naïve café 1234 日本\n = Title = \n"
    found = gpt2_predictor.load_encoding(str(tmp_path))
    assert found.encode_ordinary(text) == encoding.encode_ordinary(text)
    assert found.eot_token == 50256
