"""Models and data of the Hugging Face hub: what was loaded, and what to do where there is none."""

from __future__ import annotations

import functools
import hashlib
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import requests
from huggingface_hub import constants

if TYPE_CHECKING:
    from collections.abc import Iterator

_ANSWERS_WITHIN_S = 5.0


class HubError(OSError):
    """Something of the hub could not be loaded."""


@contextmanager
def loading(name: str, offline: str) -> Iterator[None]:
    """Load `name` from the hub within, or from its cache where the hub does not answer.

    A folder is no business of the hub's. `offline` is the setting that needs no hub, as a user
    would type it: `recipe=glue`.

    Raises:
        HubError: The hub does not answer, or has no such thing; the message names `offline`.
    """
    if Path(name).is_dir():
        yield
        return
    if not _answers():
        _use_cache_only()
    try:
        yield
    except OSError as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        msg = (
            f"{name} could not be loaded from the Hugging Face hub ({reason}). "
            f"Where there is no hub, there is a setting on other data: {offline}"
        )
        raise HubError(msg) from error


@functools.cache
def _answers() -> bool:
    """Asked once for a process: the libraries themselves would try for a minute, for every file."""
    if constants.HF_HUB_OFFLINE:
        return False
    try:
        requests.head(constants.ENDPOINT, timeout=_ANSWERS_WITHIN_S)
    except requests.RequestException:
        return False
    return True


def _use_cache_only() -> None:
    constants.HF_HUB_OFFLINE = True
    if "datasets" in sys.modules:
        import datasets

        datasets.config.HF_HUB_OFFLINE = True


def tags(*, data: str, data_fingerprint: str, model: str, model_fingerprint: str) -> dict[str, str]:
    """What a run used, for `heats.set_tags`: nobody has to guess which setting it was."""
    return {
        "data": data,
        "data_fingerprint": data_fingerprint,
        "model": model,
        "model_fingerprint": model_fingerprint,
    }


def model_fingerprint(model: Any) -> str:
    """The hub's commit of a pretrained model, or the SHA-256 of its files; else "from config"."""
    if commit := getattr(model.config, "_commit_hash", None):
        return str(commit)
    folder = model.config._name_or_path
    files = sorted(Path(folder).glob("*.safetensors")) if folder else []
    return ", ".join(_sha256(file) for file in files) or "from config"


@functools.cache
def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()[:12]
