"""The image classification recipe on one rank with a ViT of a few thousand weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

pytest.importorskip("transformers", reason="needs heats[examples]")
pytest.importorskip("PIL", reason="needs heats[examples]")

import torch
import transformers
from mlflow.pyfunc.model import PythonModelContext
from PIL import Image

from heats.recipes import hub, image_classification, image_predictor
from heats.recipes.offline import images as offline_images
from heats.recipes.offline.images import Images

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.recipes.conftest import OneRank

pytestmark = pytest.mark.timeout(30)

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "patch_size": 4,
    "initializer_range": 0.3,  # Larger than usual: so small a model then learns at once.
}
RUNTIME = ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second")


def stripes(num: int, height: int, width: int) -> Images:
    """Images that are bright on top (label 0, every other one), on the left (1) or all over (2)."""
    labels = np.array([0, 1, 2, 0] * (num // 4), dtype=np.uint8)
    images = np.random.default_rng(0).integers(0, 60, (num, height, width), dtype=np.uint8)
    images[labels != 1, : height // 2] += 180
    images[labels == 1, :, : width // 2] += 180
    images[labels == 2, height // 2 :] += 180
    return Images(images, labels)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Settings for a tiny model and grey images that say their label."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(offline_images, "fashion_mnist", lambda *_: stripes(64, 12, 10))
    image_classification._load_corpus.cache_clear()
    return {
        "lr": 2e-2,
        "batch_size": 8,
        "epochs": 3,
        "weight_decay": 0.01,
        "seed": 0,
        "model": "vit",
        "vit": SIZES,
        "image_size": 8,
        "freeze_backbone": False,
        "dataset": offline_images.DATASET,
        "data_dir": str(tmp_path),
        "eval_split": "test",
        "classes": 3,
        "max_train_rows": None,
        "max_eval_rows": 24,
        "loader_workers": 0,
        "warmup_ratio": 0.1,
    }


@pytest.fixture
def hub_config(config: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """The same with a pretrained model and coloured images, of two sizes, in folders."""
    for split, num in (("train", 24), ("validation", 12)):
        for index, (image, label) in enumerate(zip(*stripes(num, 20, 16), strict=True)):
            folder = tmp_path / "leaves" / split / ("healthy", "rust", "spot")[label]
            folder.mkdir(parents=True, exist_ok=True)
            rgb = np.stack([image, image // 2, 255 - image], axis=-1)
            Image.fromarray(rgb[: 20 - index % 2]).save(folder / f"{index:02}.png")
    model_dir = tmp_path / "pretrained"
    transformers.set_seed(1)
    model = transformers.ViTModel(transformers.ViTConfig(image_size=8, **SIZES))
    model.save_pretrained(model_dir)
    transformers.ViTImageProcessor(size={"height": 8, "width": 8}).save_pretrained(model_dir)
    return config | {
        "model": str(model_dir),
        "image_size": None,
        "dataset": str(tmp_path / "leaves"),
        "eval_split": "validation",
        "classes": None,
    }


def without_times(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: m[key] for key in m if key not in RUNTIME} for m in metrics]


def test_training_beats_the_majority_class_and_reports_every_epoch(
    one_rank: OneRank, config: dict[str, Any]
) -> None:
    metrics = one_rank.run(image_classification.train, config)

    assert [m["epoch"] for m in metrics] == [1, 2, 3]
    assert metrics[-1]["eval_majority_accuracy"] == 0.5
    assert metrics[-1]["eval_accuracy"] > 0.9
    assert len(one_rank.checkpoints) == 3


def test_run_that_continues_equals_one_that_never_stopped(
    one_rank: OneRank, config: dict[str, Any]
) -> None:
    config["epochs"] = 2
    whole = one_rank.run(image_classification.train, config)
    first, last = one_rank.checkpoints[0], one_rank.checkpoints[-1]

    rest = one_rank.run(image_classification.train, config, continue_from=first)

    assert without_times(rest) == without_times(whole[1:])
    assert weights(one_rank.checkpoints[-1]).keys() == weights(last).keys()
    for name, tensor in weights(last).items():
        assert torch.equal(weights(one_rank.checkpoints[-1])[name], tensor), name


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    source = checkpoint / image_classification.CHECKPOINT_NAME
    model = transformers.AutoModelForImageClassification.from_pretrained(source)
    return dict(model.state_dict())


def test_checkpoint_gives_a_model_all_weights(one_rank: OneRank, config: dict[str, Any]) -> None:
    one_rank.run(image_classification.train, config | {"epochs": 1})
    source = one_rank.checkpoints[0] / image_classification.CHECKPOINT_NAME
    transformers.set_seed(7)
    model = image_classification.build_model(config, ("a", "b", "c"))

    image_classification.load_weights(model, source)

    saved = weights(one_rank.checkpoints[0])
    assert all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items())


def test_checkpoint_that_lacks_weights_is_refused(config: dict[str, Any], tmp_path: Path) -> None:
    model = image_classification.build_model(config, ("a", "b", "c"))
    half = {name: each for name, each in model.state_dict().items() if "layers.1" not in name}
    model.save_pretrained(tmp_path / "half", state_dict=half)

    with pytest.raises(ValueError, match=r"no weights for .*layers\.1"):
        image_classification.load_weights(model, tmp_path / "half")


def test_second_trial_of_a_process_equals_the_first(
    one_rank: OneRank, config: dict[str, Any]
) -> None:
    config["epochs"] = 1
    first = one_rank.run(image_classification.train, config)
    one_rank.run(image_classification.train, config | {"seed": 1, "lr": 1e-3})
    again = one_rank.run(image_classification.train, config)

    assert without_times(again) == without_times(first)


def test_evaluate_gives_exactly_what_was_reported(
    one_rank: OneRank, config: dict[str, Any]
) -> None:
    (reported,) = one_rank.run(image_classification.train, config | {"epochs": 1})

    found = image_classification.evaluate(config, str(one_rank.checkpoints[0]))

    assert set(found) == {"eval_accuracy", "eval_loss", "eval_majority_accuracy"}
    assert found == {key: reported[key] for key in found}


def test_frozen_backbone_stays_as_it_is(one_rank: OneRank, config: dict[str, Any]) -> None:
    config |= {"freeze_backbone": True, "epochs": 2}

    one_rank.run(image_classification.train, config)

    before, after = map(weights, one_rank.checkpoints)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"classifier.weight", "classifier.bias"}


def test_images_are_decoded_once_for_a_node(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    splits = []

    def fashion_mnist(_data_dir: str, split: str) -> Images:
        splits.append(split)
        return stripes(64, 12, 10)

    monkeypatch.setattr(offline_images, "fashion_mnist", fashion_mnist)
    first = image_classification.load_corpus(config)
    assert image_classification.load_corpus(config | {"lr": 1.0, "seed": 5}) is first
    image_classification._load_corpus.cache_clear()  # As in another process.

    again = image_classification.load_corpus(config)

    assert again.fingerprint == first.fingerprint
    assert splits == ["train", "test"]


def test_grey_images_become_normalized_rgb(config: dict[str, Any]) -> None:
    corpus = image_classification.load_corpus(config | {"image_size": 12})
    (image, *_), _ = stripes(64, 12, 10)

    batch = image_classification.collate([corpus.train[index] for index in range(4)])

    assert batch["labels"].tolist() == [0, 1, 2, 0]
    assert batch["pixel_values"].shape == (4, 3, 12, 12)
    wide = np.asarray(Image.fromarray(image).resize((12, 12), Image.Resampling.BILINEAR))
    for channel in batch["pixel_values"][0]:
        np.testing.assert_allclose(channel, wide / 127.5 - 1, atol=1e-6)


def test_classes_are_the_first_ones(config: dict[str, Any]) -> None:
    corpus = image_classification.load_corpus(config | {"classes": 2, "max_train_rows": 20})

    assert corpus.label_names == list(offline_images.LABELS[:2])
    assert len(corpus.train) == 20
    assert set(corpus.train.with_format(None)["labels"]) == {0, 1}


def test_folder_of_images_and_pretrained_model_train_the_same_way(
    one_rank: OneRank, hub_config: dict[str, Any]
) -> None:
    metrics = one_rank.run(image_classification.train, hub_config)

    assert metrics[-1]["eval_accuracy"] > metrics[-1]["eval_majority_accuracy"]
    corpus = image_classification.load_corpus(hub_config)
    assert corpus.label_names == ["healthy", "rust", "spot"]
    assert (len(corpus.train), len(corpus.eval)) == (24, 12)
    assert sorted(corpus.train.with_format(None)["shape"])[::23] == [[19, 16, 3], [20, 16, 3]]


def test_processes_that_load_data_change_nothing(one_rank: OneRank, config: dict[str, Any]) -> None:
    alone = one_rank.run(image_classification.train, config | {"epochs": 1})
    helped = one_rank.run(image_classification.train, config | {"epochs": 1, "loader_workers": 1})

    assert without_times(helped) == without_times(alone)


@pytest.mark.parametrize("kind", ["config", "hub_config"])
def test_predictor_names_class_and_probability(
    one_rank: OneRank, kind: str, request: pytest.FixtureRequest
) -> None:
    config: dict[str, Any] = request.getfixturevalue(kind)
    one_rank.run(image_classification.train, config)
    predictor = image_predictor.ImageClassifier()
    checkpoint = str(one_rank.checkpoints[-1])
    context = PythonModelContext({"checkpoint": checkpoint}, model_config={})  # type: ignore[no-untyped-call]
    frame = image_classification.example(config)

    predictor.load_context(context)
    answers = predictor.predict(context, frame)

    assert answers.columns.tolist() == ["label", "probability"]
    assert answers["probability"].between(1 / 3, 1.0).all()
    corpus = image_classification.load_corpus(config)
    pixel_values = torch.stack([row["pixel_values"] for row in corpus.eval.select([0, 1])])
    with torch.no_grad():
        best = predictor.model(pixel_values=pixel_values).logits.softmax(dim=-1).max(dim=-1)
    assert answers["label"].tolist() == [corpus.label_names[i] for i in best.indices.tolist()]
    assert answers["probability"].tolist() == pytest.approx(best.values.tolist())


@pytest.mark.parametrize("shape", [(5, 4), (5, 4, 3)])
def test_predictor_takes_lists_and_arrays_of_arrays(shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(0).integers(0, 256, shape)
    rows = np.empty(len(array), dtype=object)
    for index, row in enumerate(array):
        rows[index] = row
    cells = np.empty(len(array), dtype=object)
    for index, row in enumerate(array.tolist()):
        cells[index] = np.empty(len(row), dtype=object)
        for column, cell in enumerate(row):
            cells[index][column] = np.asarray(cell)

    for nested in (array.tolist(), array, rows, cells):
        assert np.array_equal(np.asarray(image_predictor.to_image(nested)), array)


def test_without_a_hub_the_error_names_the_setting_that_needs_none(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    hub._answers.cache_clear()

    for key in ("model", "dataset"):
        with pytest.raises(hub.HubError, match="recipe=image_classification") as caught:
            image_classification.load_corpus(config | {key: "nobody/has-this"})
        assert "nobody/has-this" in str(caught.value)
