"""The text classification recipe on one rank with a BERT of a few thousand weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("transformers", reason="needs heats[examples]")

import transformers
from mlflow.pyfunc.model import PythonModelContext

from heats.recipes import hub, text_classification, text_predictor
from heats.recipes.offline import text as offline_text
from heats.recipes.offline.text import Rows

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.recipes.conftest import OneRank

pytestmark = pytest.mark.timeout(30)

WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] a film good bad dull fine and is the".split()
RUNTIME = ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Settings for a tiny model and 96 sentences that say their label."""
    model_dir = tmp_path / "tiny"
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    tokenizer = transformers.BertTokenizer(vocab=vocabulary)
    tokenizer.save_pretrained(model_dir)
    transformers.set_seed(0)
    transformers.BertModel(
        transformers.BertConfig(
            vocab_size=len(WORDS),
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=16,
            initializer_range=0.3,  # Larger than usual: so small a model then learns at once.
        )
    ).save_pretrained(model_dir)

    texts = [f"the film is {word}" for word in ("bad", "dull", "fine", "good")] * 24
    rows = Rows(texts, [0, 0, 4, 4] * 24)
    monkeypatch.setattr(offline_text, "movie_reviews", lambda _: {"train": rows, "test": rows})
    return {
        "lr": 1e-2,
        "batch_size": 8,
        "epochs": 3,
        "weight_decay": 0.01,
        "seed": 0,
        "model": str(model_dir),
        "dataset": offline_text.DATASET,
        "data_dir": str(tmp_path),
        "max_train_rows": None,
        "max_eval_rows": 24,
        "max_length": 8,
        "frozen_layers": 0,
        "warmup_ratio": 0.1,
    }


def without_times(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: m[key] for key in m if key not in RUNTIME} for m in metrics]


def test_training_beats_the_majority_class_and_reports_every_epoch(
    one_rank: OneRank, config: dict[str, Any]
) -> None:
    metrics = one_rank.run(text_classification.train, config)

    assert [m["epoch"] for m in metrics] == [1, 2, 3]
    assert metrics[-1]["eval_majority_accuracy"] == 0.5
    assert metrics[-1]["eval_accuracy"] > 0.9
    assert len(one_rank.checkpoints) == 3


def test_run_that_continues_equals_one_that_never_stopped(
    one_rank: OneRank, config: dict[str, Any]
) -> None:
    whole = one_rank.run(text_classification.train, config)
    first = one_rank.checkpoints[0]

    rest = one_rank.run(text_classification.train, config, continue_from=first)

    assert without_times(rest) == without_times(whole[1:])


def test_second_trial_of_a_process_equals_the_first(
    one_rank: OneRank, config: dict[str, Any]
) -> None:
    first = one_rank.run(text_classification.train, config)
    one_rank.run(text_classification.train, config | {"seed": 1, "lr": 1e-3})
    again = one_rank.run(text_classification.train, config)

    assert without_times(again) == without_times(first)


def test_evaluate_gives_exactly_what_was_reported(
    one_rank: OneRank, config: dict[str, Any]
) -> None:
    (reported,) = one_rank.run(text_classification.train, config | {"epochs": 1})

    found = text_classification.evaluate(config, str(one_rank.checkpoints[0]))

    assert set(found) == {"eval_accuracy", "eval_loss", "eval_majority_accuracy"}
    assert found == {key: reported[key] for key in found}


def test_frozen_layers_stay_as_they_are(config: dict[str, Any]) -> None:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(config["model"])

    text_classification.freeze(model, 1)

    trained = {name for name, weights in model.named_parameters() if weights.requires_grad}
    assert not any(".embeddings." in name or ".layer.0." in name for name in trained)
    assert any(".layer.1." in name for name in trained)


def test_corpus_is_tokenized_once_for_all_trials_of_a_process(config: dict[str, Any]) -> None:
    first = text_classification.load_corpus(config)

    assert text_classification.load_corpus(config | {"lr": 1.0, "seed": 5}) is first
    assert text_classification.load_corpus(config | {"max_length": 4}) is not first


def test_predictor_names_class_and_probability_and_cuts_where_training_did(
    one_rank: OneRank, config: dict[str, Any]
) -> None:
    one_rank.run(text_classification.train, config)
    predictor = text_predictor.TextClassifier()
    checkpoint = str(one_rank.checkpoints[-1])
    context = PythonModelContext({"checkpoint": checkpoint}, model_config={})  # type: ignore[no-untyped-call]
    frame = text_classification.example(config)
    frame["text"] = ["the film is good", "the film is bad", "the film is bad " * 9]

    predictor.load_context(context)
    answers = predictor.predict(context, frame)

    assert answers["label"].tolist()[:2] == ["very positive", "very negative"]
    assert answers["probability"].between(0.2, 1.0).all()
    assert predictor.tokenizer.model_max_length == config["max_length"]


def test_padding_is_to_the_longest_or_to_the_limit(config: dict[str, Any]) -> None:
    longest = text_classification.load_corpus(config)
    limit = text_classification.load_corpus(config | {"padding": "max_length"})

    assert {len(ids) for ids in longest.train["input_ids"]} == {6}
    assert {len(ids) for ids in limit.train["input_ids"]} == {config["max_length"]}


def test_without_a_hub_the_error_names_the_setting_that_needs_none(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    hub._answers.cache_clear()

    for key in ("model", "dataset"):
        with pytest.raises(hub.HubError, match="recipe=text_classification") as caught:
            text_classification.load_corpus(config | {key: "nobody/has-this"})
        assert "nobody/has-this" in str(caught.value)
