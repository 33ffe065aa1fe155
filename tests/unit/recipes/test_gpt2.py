"""Text to blocks of GPT-2's tokens, and the model's size."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("transformers", reason="needs heats[examples]")
pytest.importorskip("tiktoken", reason="needs heats[examples]")

import torch
from tests.unit.recipes.gpt2_data import CONFIG, DATA_DIR, needs_packages

from heats.recipes import gpt2
from heats.recipes.offline import gpt2_bpe, wiki

if TYPE_CHECKING:
    import tiktoken

LINES = [
    " = Ann = \n",
    "Ann is here.\n",
    " = = Life = = \n",
    "\n",
    " = E = mc2 = \n",
    "No = title\n",
]


@pytest.fixture
def encoding() -> tiktoken.Encoding:
    return gpt2_bpe.encoding(str(DATA_DIR))


@needs_packages
def test_encoding_is_that_of_gpt2_and_leaves_the_environment_as_it_was(
    encoding: tiktoken.Encoding,
) -> None:
    assert encoding.encode("Hello world") == [15496, 995]
    assert encoding.encode_ordinary("naïve 日本") == [2616, 38776, 10545, 245, 98, 17312, 105]
    assert encoding.encode(gpt2.END_OF_TEXT, allowed_special="all") == [50256]
    assert encoding.n_vocab == 50257
    assert "TIKTOKEN_CACHE_DIR" not in os.environ


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (" = Valkyria Chronicles III = \n", True),
        (" = A = ", True),
        (" = E = mc2 = \n", True),
        (" = = Gameplay = = \n", False),
        (" = = = Story = = = \n", False),
        ("\n", False),
        (" = = \n", False),
        ("The sum = 4 = 2 + 2\n", False),
    ],
)
def test_title_is_told_from_section_and_text(line: str, *, expected: bool) -> None:
    assert gpt2.is_title(line) is expected


@needs_packages
def test_end_of_text_stands_before_each_title_and_only_there(encoding: tiktoken.Encoding) -> None:
    found = gpt2.tokens(pa.chunked_array([LINES]), encoding)

    expected = "".join(gpt2.END_OF_TEXT * (index in (0, 4)) + LINES[index] for index in range(6))
    assert encoding.decode(found) == expected
    assert found.count(50256) == 2


def test_blocks_lose_nothing_but_the_tail() -> None:
    found = gpt2.to_blocks(list(range(23)), 5)

    assert found.shape == (4, 5)
    assert found.dtype == np.int32
    assert found.ravel().tolist() == list(range(20))
    assert gpt2.to_blocks([1, 2], 5).shape == (0, 5)


@needs_packages
def test_parts_are_cut_by_themselves_in_the_order_of_the_text(encoding: tiktoken.Encoding) -> None:
    config = CONFIG | {"max_val_lines": 20, "lines_per_part": 8}
    lines = [
        line for article in wiki.articles(str(DATA_DIR))["validation"] for line in article.lines
    ]

    found = gpt2.blocks(config, "validation")

    parts = [lines[:8], lines[8:16], lines[16:20]]
    expected = [
        token
        for part in parts
        for ids in [gpt2.tokens(pa.chunked_array([part]), encoding)]
        for token in ids[: len(ids) // 16 * 16]
    ]
    assert found.ravel().tolist() == expected
    batches = list(gpt2.batches(config, "validation"))
    assert torch.equal(torch.cat(batches), torch.from_numpy(found).long())


@needs_packages
def test_no_article_is_in_both_parts_and_all_lines_open_with_a_title() -> None:
    parts = wiki.articles(str(DATA_DIR))

    titles = {split: {article.title for article in part} for split, part in parts.items()}
    assert (len(titles["train"]), len(titles["validation"])) == (87, 7)
    assert not titles["train"] & titles["validation"]
    for article in (*parts["train"], *parts["validation"]):
        first, *rest = article.lines
        assert gpt2.is_title(first)
        assert not any(map(gpt2.is_title, rest)), article.title


def test_wiki_markup_becomes_lines_as_in_wikitext() -> None:
    markup = (
        "{{Infobox|a={{b}}}}'''Ann''' was a [[City of London|Londoner]]&nbsp;once.<ref>x</ref>\n"
        "[[File:a.png|thumb|see [[this]]]]\n==Early life==\n* a list\n"
        "{| table\n|}\nBorn [http://a.b here].<!-- no -->\n===School===\nYes."
    )

    assert wiki.cleaned(markup).replace("\xa0", " ").split("\n") == [
        "Ann was a Londoner once.",
        " = = Early life = = ",
        "Born here.",
        " = = = School = = = ",
        "Yes.",
    ]


def test_text_of_a_hub_dataset_is_its_rows(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    pq.write_table(pa.table({"text": LINES}), tmp_path / "raw" / "validation.parquet")
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: raw-v1\n  data_files:\n"
        "  - split: validation\n    path: raw/validation.parquet\n---\n"
    )

    found = gpt2._text("validation", str(tmp_path), "raw-v1", "nowhere")

    assert found["text"].to_pylist() == LINES


@needs_packages
def test_unigram_loss_is_that_of_the_training_frequencies() -> None:
    config = CONFIG | {"max_val_lines": 20}
    train, val = (gpt2.blocks(config, split) for split in ("train", "validation"))

    counts = {int(token): int((train == token).sum()) + 1 for token in np.unique(val)}
    probabilities = [counts[token] / (train.size + 50257) for token in val[:, 1:].ravel().tolist()]
    assert gpt2.unigram_loss(config) == pytest.approx(-np.log(probabilities).mean())


def test_gpt2_small_has_123_8_million_parameters() -> None:
    sizes = {"n_positions": 256, "n_embd": 768, "n_layer": 12, "n_head": 12}

    with torch.device("meta"):
        model = gpt2.build_model({**sizes, "dropout": 0.1, "seed": 0})

    assert model.num_parameters() == 123_849_984
    assert model.config.vocab_size == 50257


def test_loss_is_of_each_token_after_the_first() -> None:
    tokens = torch.tensor([[3, 1, 2]])
    logits = torch.full((1, 3, 4), -1e9)
    logits[0, 0, 1] = logits[0, 1, 2] = 0.0  # Right after the first two; nobody asks the third.

    assert gpt2.next_token_loss(logits, tokens).item() == pytest.approx(0.0)
