"""OmegaConf's grammar at a fraction of the price: the same few texts are parsed in every trial."""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from typing import Any

_MAX_TEXTS = 1024


def remember_interpolations() -> None:
    """Let OmegaConf parse each text with an interpolation in it once in this process.

    Each takes 0.3 ms otherwise, and a config has several. A parse tree depends on its text alone,
    and resolving only reads it.
    """
    base: Any = import_module("omegaconf.base")
    if not hasattr(base.parse, "cache_info"):
        base.parse = lru_cache(maxsize=_MAX_TEXTS)(base.parse)
