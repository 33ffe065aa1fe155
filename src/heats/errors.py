"""Errors a caller of heats can handle, one class for each thing to handle.

Every message says what happened, where, and what to do next. All of them survive pickling, because
they cross process borders.
"""

from __future__ import annotations

import difflib
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class ExitCode(IntEnum):
    """What the programs of heats end with."""

    DONE = 0
    NOT_DONE = 1
    """No trial is complete, a promotion was refused, or MLflow still lacks something."""
    BAD_INPUT = 2
    INTERRUPTED = 130


class HeatsError(Exception):
    """Base of every error that heats raises on purpose."""


class ConfigError(HeatsError):
    """A setting, an override or a search space is wrong; nothing was started or created."""


class LedgerError(HeatsError):
    """A ledger cannot be read or written; the message names the file and the line."""


class SweepLockedError(LedgerError):
    """Another living process writes this sweep."""


class SweepNotFoundError(HeatsError):
    """No sweep of that name exists; the message lists the known ones, nearest first."""


class LaneLostError(HeatsError):
    """The worker group of a lane died or cannot go on; the trial may restart on another lane."""


class TrackingError(HeatsError):
    """The tracking server refused or did not answer, and the caller asked for an answer now."""


class PromotionRefusedError(HeatsError):
    """A promotion gate did not pass; the message says which, with both values."""


class TrialStoppedError(BaseException):
    """Raised inside a rank at a report when its trial is to stop.

    A `BaseException`, so that `except Exception` in user code does not swallow it.
    """


def unknown_name(what: str, name: str, known: Iterable[str]) -> ConfigError:
    """The error for a misspelt name: it lists the known names, nearest first."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    rest = [other for other in names if other not in near]
    hint = f" Did you mean {near[0]!r}?" if near else ""
    listed = ", ".join([*near, *rest]) or "none"
    return ConfigError(f"Unknown {what}: {name!r:.80}.{hint} Known: {listed}.")
