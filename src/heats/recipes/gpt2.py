"""What gpt2_pretraining and causal_lm share: blocks of GPT-2's tokens, and the model by config."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch
import transformers
from torch.nn.functional import cross_entropy

from heats.recipes import hub
from heats.recipes.offline import gpt2_bpe, wiki

if TYPE_CHECKING:
    from collections.abc import Iterator

    import ray.data
    import tiktoken
    from numpy.typing import NDArray
    from torch import Tensor

# Column of the datasets; the name that transformers' models take.
TOKENS = "input_ids"
END_OF_TEXT = "<|endoftext|>"
# In a checkpoint: what the predictor needs beside the model.
ENCODING_FILE = "encoding.json"

_TITLE = re.compile(r"= (?!= ).+(?<! =) =")


def quiet() -> None:
    """No progress bars: a sweep would repeat them for every trial."""
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]


# --- text to blocks ---------------------------------------------------------------------------


def dataset(
    *,
    split: str,
    source: str,
    name: str | None,
    data_dir: str,
    block_size: int,
    lines_per_part: int,
    max_lines: int | None = None,
    ray_remote_args: dict[str, Any] | None = None,
) -> ray.data.Dataset:
    """Blocks of tokens, for `data.datasets` of a sweep or `datasets` of a `TorchTrainer`.

    A row has `input_ids`, an array of `block_size` int32. The text is made to tokens in parts of so
    many lines, one task each; what is left at the end of a part is no whole block, and lost.

    Args:
        split: `train` or `validation`.
        source: `wikipedia-gensim` of the package, otherwise a dataset of the Hugging Face hub (or a
            folder that `load_dataset` takes) whose rows have a `text` each.
        name: The dataset's configuration on the hub: `wikitext-103-raw-v1`.
        data_dir: Where the packages of offline/ are.
        block_size: Tokens of a block.
        lines_per_part: Lines of text for one task.
        max_lines: The first lines only; None: all.
        ray_remote_args: For the tasks: `{resources: {cpu_node: 0.001}}` puts them on nodes that
            have such a resource. None: wherever a CPU is free.

    Raises:
        HubError: The dataset cannot be loaded from the hub.
        FileNotFoundError: A package is not in `data_dir`; the message tells how to get it.
    """
    import ray.data

    parts = list(_parts(split, source, name, data_dir, lines_per_part, max_lines))
    return ray.data.from_arrow(parts).map_batches(
        _blocks_of_part,
        batch_size=None,  # A part is one batch.
        batch_format="pyarrow",
        fn_kwargs={"encoding": encoding(source, data_dir), "block_size": block_size},
        **(ray_remote_args or {}),
    )


def blocks(config: dict[str, Any], split: str) -> NDArray[np.int32]:
    """All that `dataset` gives, in its order, made in this process: (blocks, block_size).

    Args:
        config: Of a recipe; `max_val_lines` holds for the split `validation`.
        split: `train` or `validation`.
    """
    max_lines = config["max_val_lines"] if split == "validation" else None
    keys = ("source", "name", "data_dir", "block_size", "lines_per_part")
    found: NDArray[np.int32] = _blocks(
        split=split, max_lines=max_lines, **{key: config[key] for key in keys}
    )
    return found


def batches(config: dict[str, Any], split: str) -> Iterator[Tensor]:
    """`blocks` as the loop takes them: (`batch_size`, block_size) int64, the last one shorter."""
    found = torch.from_numpy(blocks(config, split)).long()
    for start in range(0, len(found), config["batch_size"]):
        yield found[start : start + config["batch_size"]]


@functools.lru_cache(maxsize=2)
def _blocks(
    *,
    split: str,
    source: str,
    name: str | None,
    data_dir: str,
    block_size: int,
    lines_per_part: int,
    max_lines: int | None,
) -> NDArray[np.int32]:
    found = encoding(source, data_dir)
    parts = _parts(split, source, name, data_dir, lines_per_part, max_lines)
    return np.concatenate([to_blocks(tokens(part["text"], found), block_size) for part in parts])


def _parts(
    split: str,
    source: str,
    name: str | None,
    data_dir: str,
    lines_per_part: int,
    max_lines: int | None,
) -> Iterator[pa.Table]:
    """Lines of text in tables of one column, `text`."""
    table = _text(split, source, name, data_dir).slice(0, max_lines)
    for start in range(0, len(table), lines_per_part):
        yield table.slice(start, lines_per_part)


def _text(split: str, source: str, name: str | None, data_dir: str) -> pa.Table:
    if source == wiki.DATASET:
        articles = wiki.articles(data_dir)[split]
        return pa.table({"text": [line for article in articles for line in article.lines]})

    from datasets import load_dataset

    with hub.loading(source, "recipe=gpt2_pretraining"):
        found = load_dataset(source, name, split=split)
    table: pa.Table = found.data.table.select(["text"])
    return table


def _blocks_of_part(part: pa.Table, encoding: tiktoken.Encoding, block_size: int) -> dict[str, Any]:
    return {TOKENS: to_blocks(tokens(part["text"], encoding), block_size)}


def tokens(lines: pa.ChunkedArray, encoding: tiktoken.Encoding) -> list[int]:
    """The text as one sequence, with `<|endoftext|>` (50256) before each title of an article."""
    texts = lines.to_pylist()
    found: list[int] = []
    for text, ids in zip(texts, encoding.encode_ordinary_batch(texts, num_threads=1), strict=True):
        if is_title(text):
            found.append(encoding.eot_token)
        found += ids
    return found


def is_title(line: str) -> bool:
    """Whether an article starts here: ` = Title = `, not ` = = Section = = `."""
    return _TITLE.fullmatch(line.strip()) is not None


def to_blocks(sequence: list[int], block_size: int) -> NDArray[np.int32]:
    """A sequence cut into (blocks, block_size); what is left at its end is no whole block."""
    num_blocks = len(sequence) // block_size
    whole = np.asarray(sequence[: num_blocks * block_size], dtype=np.int32)
    return whole.reshape(num_blocks, block_size)


def fingerprint(config: dict[str, Any]) -> str:
    """What tells one set of data from another: the package's, or SHA-256 of the first lines."""
    first = _text("train", config["source"], config["name"], config["data_dir"]).slice(0, 1000)
    digest = hashlib.sha256("".join(first["text"].to_pylist()).encode()).hexdigest()[:12]
    return f"first lines {digest}, blocks of {config['block_size']}"


# --- the encoding -----------------------------------------------------------------------------


def encoding(source: str, data_dir: str) -> tiktoken.Encoding:
    """GPT-2's encoding: from the package for the package's text, else tiktoken downloads it."""
    return gpt2_bpe.encoding(data_dir) if source == wiki.DATASET else gpt2_bpe.published()


def save_encoding(encoding: tiktoken.Encoding, directory: str | Path) -> None:
    """Write all that makes the encoding, for a predictor where tiktoken cannot download it."""
    by_rank = [base64.b64encode(each).decode() for each in encoding.token_byte_values()]
    ranks = {each: encoding.encode_single_token(base64.b64decode(each)) for each in by_rank}
    content = {
        "name": encoding.name,
        "pat_str": encoding._pat_str,
        "mergeable_ranks": ranks,
        "special_tokens": {END_OF_TEXT: encoding.eot_token},
    }
    Path(directory, ENCODING_FILE).write_text(json.dumps(content), encoding="utf-8")


# --- the model --------------------------------------------------------------------------------


def build_model(config: dict[str, Any]) -> transformers.GPT2LMHeadModel:
    """A GPT-2 with random weights, the same for the same `seed`.

    Args:
        config: `n_positions`, `n_embd`, `n_layer`, `n_head`, as transformers names them, `dropout`
            (of all three kinds), `seed`.
    """
    torch.manual_seed(config["seed"])
    sizes = {key: config[key] for key in ("n_positions", "n_embd", "n_layer", "n_head")}
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), config["dropout"])
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, **dropouts, use_cache=False)
    )


def next_token_loss(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Mean cross-entropy of each token after the first of its block, in nats.

    Args:
        logits: (batch, block_size, vocabulary).
        token_ids: (batch, block_size) int64, what the logits were computed from.
    """
    return cross_entropy(logits[:, :-1].float().flatten(0, 1), token_ids[:, 1:].flatten())


def unigram_loss(config: dict[str, Any]) -> float:
    """Loss of the baseline on the validation blocks: how frequent a token is in the training ones.

    Every token of the vocabulary counts once more than it occurs.
    """
    counts = np.bincount(blocks(config, "train").ravel(), minlength=50257) + 1.0
    predicted = blocks(config, "validation")[:, 1:]
    return float(-np.log(counts / counts.sum())[predicted].mean())
