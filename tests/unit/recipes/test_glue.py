"""The glue recipe on one rank with a BERT of a few thousand weights; Ray Data is stood in for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

pytest.importorskip("transformers", reason="needs heats[examples]")

import pyarrow as pa
import ray.train
import torch
import transformers
from mlflow.pyfunc.model import PythonModelContext
from ray.data.block import BlockAccessor
from scipy.stats import pearsonr  # type: ignore[import-untyped]
from sklearn.metrics import matthews_corrcoef

from heats.recipes import glue, glue_data, glue_predictor, hub
from heats.recipes.offline import glue as offline_glue
from heats.recipes.offline.glue import Rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray
    from tests.unit.recipes.conftest import OneRank

pytestmark = pytest.mark.timeout(60)

WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] a film good bad dull fine and is the".split()
NO_TIMES = ("runtime", "per_second")


class Shard:
    """Rows as a `ray.data.DataIterator` gives them."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def iter_torch_batches(
        self,
        *,
        batch_size: int,
        collate_fn: Callable[[dict[str, NDArray[Any]]], Any],
        drop_last: bool = False,
        local_shuffle_buffer_size: int | None = None,
        local_shuffle_seed: int | None = None,
    ) -> Iterator[Any]:
        num_rows = self._table.num_rows
        order = np.arange(num_rows)
        if local_shuffle_buffer_size:
            np.random.default_rng(local_shuffle_seed).shuffle(order)
        end = num_rows - num_rows % batch_size if drop_last else num_rows
        for start in range(0, end, batch_size):
            rows = self._table.take(order[start : start + batch_size])
            yield collate_fn(BlockAccessor.for_block(rows).to_batch_format("numpy"))


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Settings for a tiny model, and texts that say their label, of one task of each kind."""
    model_dir = tmp_path / "tiny"
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    transformers.BertTokenizer(vocab=vocabulary).save_pretrained(model_dir)
    transformers.set_seed(0)
    transformers.BertModel(
        transformers.BertConfig(
            vocab_size=len(WORDS),
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=24,
            initializer_range=0.3,  # Larger than usual: so small a model then learns at once.
        )
    ).save_pretrained(model_dir)

    def load(task: str, split: str, data_dir: str) -> Rows:
        del data_dir
        number = 90 if split == "train" else 45
        steps = [at % 3 for at in range(number)]
        texts = [f"the film is {('bad', 'fine', 'good')[step]}" for step in steps]
        is_pair = len(glue_data.TASKS[task].columns) == 2
        columns = (texts, ["and the film"] * number) if is_pair else (texts,)
        num_labels = glue_data.TASKS[task].num_labels
        return Rows(
            columns, [1.0 * s if num_labels == 1 else min(s, num_labels - 1) for s in steps]
        )

    monkeypatch.setattr(offline_glue, "load", load)
    config: dict[str, Any] = {
        "lr": 1e-2,
        "batch_size": 8,
        "epochs": 2,
        "weight_decay": 0.01,
        "seed": 0,
        "task": "sst2",
        "source": "offline",
        "data_dir": str(tmp_path),
        "model": str(model_dir),
        "max_length": 12,
        "max_train_rows": None,
        "max_eval_rows": 45,
        "shuffle_buffer_rows": 64,
    }

    def shard(name: str) -> Shard:
        rows = glue_data.load(**glue._source(config, name))
        model, max_length = config["model"], config["max_length"]
        return Shard(glue_data.tokenized(rows, model=model, max_length=max_length))

    monkeypatch.setattr(ray.train, "get_dataset_shard", shard)
    yield config
    for cached in (glue_data.load, glue_data.fingerprint, glue_data.load_tokenizer):
        cached.cache_clear()


def without_times(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: m[key] for key in m if not key.endswith(NO_TIMES)} for m in metrics]


@pytest.mark.parametrize(
    ("task", "metric"),
    [
        ("cola", "eval_matthews_correlation"),
        ("sst2", "eval_accuracy"),
        ("mrpc", "eval_accuracy"),
        ("mnli", "eval_accuracy"),
        ("stsb", "eval_pearson"),
    ],
)
def test_every_kind_of_task_learns_and_reports_every_epoch(
    one_rank: OneRank, config: dict[str, Any], task: str, metric: str
) -> None:
    config |= {"task": task, "epochs": 3}

    metrics = one_rank.run(glue.train, config)

    assert [m["epoch"] for m in metrics] == [1, 2, 3]
    assert metrics[-1][metric] > 0.9
    assert len(one_rank.checkpoints) == 3
    found = glue.evaluate(config, str(one_rank.checkpoints[-1]))
    assert set(found) == {"eval_loss", metric}
    assert found == pytest.approx({key: metrics[-1][key] for key in found}, rel=1e-6)


def test_steps_are_the_full_batches_of_all_epochs(
    one_rank: OneRank, config: dict[str, Any]
) -> None:
    one_rank.run(glue.train, config)

    state = one_rank.checkpoints[-1] / glue.CHECKPOINT_NAME / "trainer_state.json"
    assert transformers.TrainerState.load_from_json(str(state)).global_step == 2 * (90 // 8)


def test_run_that_continues_equals_one_that_never_stopped(
    one_rank: OneRank, config: dict[str, Any]
) -> None:
    config["epochs"] = 3
    whole = one_rank.run(glue.train, config)
    first = one_rank.checkpoints[0]

    rest = one_rank.run(glue.train, config, continue_from=first)

    assert without_times(rest) == without_times(whole[1:])


def test_second_trial_of_a_process_equals_the_first(
    one_rank: OneRank, config: dict[str, Any]
) -> None:
    first = one_rank.run(glue.train, config)
    one_rank.run(glue.train, config | {"seed": 1, "lr": 1e-3})
    again = one_rank.run(glue.train, config)

    assert without_times(again) == without_times(first)


def test_order_follows_from_seed_and_epoch(one_rank: OneRank, config: dict[str, Any]) -> None:
    del one_rank

    def order(seed: int, epoch: int) -> list[int]:
        batches = glue.TrainBatches(
            config | {"seed": seed}, ray.train.get_dataset_shard("train"), num_rows=90
        )
        batches.set_epoch(epoch)
        found = list(batches)
        assert len(found) == len(batches) == 11
        return [int(label) for batch in found for label in batch["labels"]]

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4


def test_dataset_that_is_not_the_one_of_the_config_is_an_error(
    one_rank: OneRank, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = glue_data.load(**glue._source(config, "train")).slice(0, 80)
    short = Shard(glue_data.tokenized(rows, model=config["model"], max_length=12))
    whole = ray.train.get_dataset_shard
    monkeypatch.setattr(ray.train, "get_dataset_shard", lambda _: short)

    with pytest.raises(ValueError, match="11 batches to an epoch, but got 10"):
        one_rank.run(glue.train, config)

    monkeypatch.setattr(
        ray.train, "get_dataset_shard", lambda name: whole("train") if name == "train" else short
    )
    with pytest.raises(ValueError, match="45 validation rows, but 80 came"):
        one_rank.run(glue.train, config)


def test_too_few_rows_for_a_batch_are_an_error(one_rank: OneRank, config: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="do not fill one batch of batch_size=91"):
        one_rank.run(glue.train, config | {"batch_size": 91})


@pytest.mark.parametrize("num_rows", [1, 2, 7, 8, 9])
def test_shares_are_equal_and_hold_every_row_in_order(num_rows: int) -> None:
    rows = {"label": np.arange(num_rows), "input_ids": np.arange(num_rows) + 10}

    for world_size in (1, 2, 3):
        parts = [glue.share(rows, rank, world_size) for rank in range(world_size)]
        assert len({len(part["label"]) for part in parts}) == 1
        gathered = np.concatenate([part["label"] for part in parts])
        assert gathered[:num_rows].tolist() == list(range(num_rows))
        assert len(gathered) - num_rows < world_size
        assert (parts[-1]["input_ids"] - parts[-1]["label"] == 10).all()


def test_metrics_equal_those_of_sklearn_and_scipy() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        labels = rng.integers(0, 2, 40)
        answers = np.where(rng.random(40) < 0.3, labels, rng.integers(0, 2, 40))
        expected = matthews_corrcoef(labels, answers)
        assert glue_data.matthews_correlation(answers, labels) == pytest.approx(expected, abs=1e-12)
        outputs, scores = rng.normal(size=40).astype(np.float32), rng.random(40) * 5
        expected = pearsonr(outputs.astype(np.float64), scores).statistic
        assert glue_data.pearson(outputs, scores) == pytest.approx(expected, abs=1e-12)


def test_answer_that_is_always_the_same_is_worth_nothing() -> None:
    labels = np.array([0, 1, 1, 0])

    assert glue_data.matthews_correlation(np.ones(4), labels) == 0.0
    assert glue_data.pearson(np.full(4, 0.3, np.float32), labels) == 0.0
    assert glue_data.score("accuracy", np.array([[0.0, 1.0]] * 4), labels) == 0.5


def test_loss_is_the_mean_over_all_rows(config: dict[str, Any]) -> None:
    outputs = torch.randn(9, 3, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 1, 2] * 3)

    of_classes = glue.metrics(config | {"task": "mnli"}, outputs.numpy(), labels.numpy())
    of_scores = glue.metrics(config | {"task": "stsb"}, outputs[:, :1].numpy(), labels.numpy())

    assert of_classes["loss"] == pytest.approx(
        torch.nn.functional.cross_entropy(outputs, labels).item(), rel=1e-6
    )
    assert of_scores["loss"] == pytest.approx(
        torch.nn.functional.mse_loss(outputs[:, 0], labels.float()).item(), rel=1e-6
    )


def test_tasks_are_those_of_glue() -> None:
    columns = {
        "cola": ("sentence",),
        "mnli": ("premise", "hypothesis"),
        "mnli-mm": ("premise", "hypothesis"),
        "mrpc": ("sentence1", "sentence2"),
        "qnli": ("question", "sentence"),
        "qqp": ("question1", "question2"),
        "rte": ("sentence1", "sentence2"),
        "sst2": ("sentence",),
        "stsb": ("sentence1", "sentence2"),
        "wnli": ("sentence1", "sentence2"),
    }
    tasks = glue_data.TASKS

    assert {name: task.columns for name, task in tasks.items()} == columns
    expected = dict.fromkeys(columns, 2) | {"mnli": 3, "mnli-mm": 3, "stsb": 1}
    assert {name: task.num_labels for name, task in tasks.items()} == expected
    metrics = {"cola": "matthews_correlation", "stsb": "pearson"}
    assert {name: task.metric for name, task in tasks.items()} == {
        **dict.fromkeys(columns, "accuracy"),
        **metrics,
    }
    splits = {"mnli": "validation_matched", "mnli-mm": "validation_mismatched"}
    assert {name: task.validation for name, task in tasks.items()} == {
        **dict.fromkeys(columns, "validation"),
        **splits,
    }
    for name, labels in offline_glue.LABELS.items():
        assert glue_data.task_named(name, "offline").num_labels == (len(labels) or 1)
        assert tasks[name].num_labels == (len(labels) or 1)


@pytest.mark.parametrize("name", glue_data.TASKS)
def test_rows_of_the_hub_come_by_the_names_of_the_task(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    datasets = pytest.importorskip("datasets")
    task = glue_data.TASKS[name]
    asked = []

    def load_dataset(source: str, config: str, *, split: str) -> Any:
        asked.append((source, config, split))
        rows = {**{column: [column] * 4 for column in task.columns}, "label": [0, 1, 0, 1]}
        return datasets.Dataset.from_dict({"idx": [0, 1, 2, 3], **rows})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(hub, "_answers", lambda: True)
    source = f"nobody/{name}"
    arguments: dict[str, Any] = {"task": name, "source": source, "data_dir": "", "max_rows": 3}

    parts = [glue_data.load(split=split, **arguments) for split in ("train", "validation")]

    config = "mnli" if name == "mnli-mm" else name
    assert asked == [(source, config, "train"), (source, config, task.validation)]
    for table in parts:
        assert table.column_names == [*task.columns, "label"]
        assert table.num_rows == 3
        assert pa.types.is_floating(table["label"].type) == (name == "stsb")


def test_unknown_task_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"Known: cola, mnli, .*wnli"):
        glue_data.task_named("boolq", "offline")


def test_tokens_are_those_of_both_texts_and_cut(config: dict[str, Any]) -> None:
    rows = glue_data.load(**glue._source(config | {"task": "mrpc"}, "train"))

    table = glue_data.tokenized(rows, model=config["model"], max_length=7)

    tokenizer = transformers.AutoTokenizer.from_pretrained(config["model"])
    expected = tokenizer("the film is bad", "and the film", truncation=True, max_length=7)
    assert table["input_ids"][0].as_py() == expected["input_ids"]
    assert table["token_type_ids"][0].as_py() == expected["token_type_ids"]
    assert table["label"].to_pylist() == rows["label"].to_pylist()


@pytest.mark.parametrize("task", ["mrpc", "stsb"])
def test_predictor_answers_each_row_of_the_example(
    one_rank: OneRank, config: dict[str, Any], task: str
) -> None:
    config |= {"task": task, "epochs": 3}
    one_rank.run(glue.train, config)
    checkpoint = str(one_rank.checkpoints[-1])
    context = PythonModelContext({"checkpoint": checkpoint}, model_config={})  # type: ignore[no-untyped-call]
    predictor = glue_predictor.GlueModel()
    frame = glue.example(config)

    predictor.load_context(context)
    answers = predictor.predict(context, frame)

    assert list(frame.columns) == ["sentence1", "sentence2"]
    if task == "stsb":
        assert answers["score"].tolist() == pytest.approx([0, 1, 2], abs=0.7)
    else:
        assert answers["label"].tolist() == ["two films", "one film", "one film"]
        assert answers["probability"].between(0.5, 1.0).all()


def test_without_a_hub_the_error_names_the_setting_that_needs_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    hub._answers.cache_clear()
    arguments: dict[str, Any] = {"task": "cola", "split": "train", "data_dir": "", "max_rows": 9}

    with pytest.raises(hub.HubError, match="recipe=glue") as caught:
        glue_data.load(source="nobody/has-this", **arguments)

    assert "nobody/has-this" in str(caught.value)
