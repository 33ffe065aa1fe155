"""Errors a caller of heats can handle, one class for each thing to handle.

Every message says what happened, where, and what to do next. All of them survive pickling, because
they cross process borders.
"""


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


class TrialFailedError(HeatsError):
    """User code of a trial raised; the message holds the traceback and the ranks that raised it."""


class TrackingError(HeatsError):
    """The tracking server refused or did not answer, and the caller asked for an answer now."""


class PromotionRefusedError(HeatsError):
    """A promotion gate did not pass; the message says which, with both values."""


class TrialStoppedError(BaseException):
    """Raised inside a rank at a report when its trial is to stop.

    A `BaseException`, so that `except Exception` in user code does not swallow it.
    """
