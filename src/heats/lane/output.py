"""A turn's output goes to its trial's log."""

from __future__ import annotations

import io
import os
import sys
from contextlib import contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def output_to(path: Path) -> Iterator[None]:
    """Send this process's standard output and error, C code's included, to the end of a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    saved = os.dup(1), os.dup(2)
    with path.open("ab") as log:
        for number in (1, 2):
            os.dup2(log.fileno(), number)
    before = sys.stdout, sys.stderr
    if any(stream.closed for stream in _streams()):  # By a trial.
        _streams.cache_clear()
    streams = _streams()
    sys.stdout, sys.stderr = streams
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr, *streams):
            with suppress(ValueError, OSError):
                stream.flush()
        sys.stdout, sys.stderr = before
        for descriptor, number in zip(saved, (1, 2), strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)


@cache
def _streams() -> tuple[TextIO, TextIO]:
    """Streams that write wherever output goes at that time.

    They outlive a turn, because so do handlers that hold one of them: a library that was imported
    in a trial goes on logging in the next.
    """
    out, err = (
        io.TextIOWrapper(
            io.BufferedWriter(io.FileIO(number, "w", closefd=False)),
            encoding="utf-8",
            errors="replace",
            line_buffering=True,
        )
        for number in (1, 2)
    )
    return out, err
