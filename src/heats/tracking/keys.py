"""Names of parameters and metrics as MLflow accepts them, and back.

MLflow takes letters, digits and `_ - . / :` and space, up to 250 characters, and no name that a
path would simplify. Every other character becomes `_xHEX_`, so `layers[0]` is `layers_x5B_0_x5D_`.
"""

from __future__ import annotations

import hashlib
import posixpath
import re

MAX_KEY_CHARS = 250

_ILLEGAL = re.compile(r"[^\w.\- :/]")
_ILLEGAL_IN_BAD_PATH = re.compile(r"[^\w\- :]")
_ESCAPED = re.compile(r"_x([0-9A-F]*)_")
_LOOKS_ESCAPED = re.compile(r"_(?=x[0-9A-F]*(?:_|[^\w\- :]))")


def mlflow_key(key: str) -> str:
    """The name that MLflow gets for `key`; `original_key` is its inverse.

    Only a name that gets too long is cut: it ends in a hash that keeps it unique.
    """
    if key.isidentifier() and "_x" not in key and len(key) <= MAX_KEY_CHARS:
        return key
    illegal = _ILLEGAL
    if posixpath.normpath(key) != key or key.startswith(("/", "..")) or key == ".":
        illegal = _ILLEGAL_IN_BAD_PATH
    # A text that looks escaped already loses its looks first, so that the way back is unique.
    safe = _LOOKS_ESCAPED.sub("_x5F_", key)
    safe = illegal.sub(lambda match: f"_x{ord(match[0]):X}_", safe) or "_x_"
    if len(safe) <= MAX_KEY_CHARS:
        return safe
    digest = hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()[:12]
    return f"{safe[: MAX_KEY_CHARS - 13]}-{digest}"


def original_key(name: str) -> str:
    """The name that `mlflow_key` was given."""
    return _ESCAPED.sub(lambda match: chr(int(match[1], 16)) if match[1] else "", name)
