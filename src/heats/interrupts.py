"""Ctrl-C and SIGTERM: the first ends the sweep so that it can be resumed, the second at once."""

from __future__ import annotations

import logging
import signal
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)


class Interrupts:
    """While entered, SIGINT and SIGTERM call `on_first(reason)`.

    The main thread gets a KeyboardInterrupt if it has not left `grace_s` seconds later, or at the
    second signal. Outside the main thread (a notebook's worker, a test) nothing is installed.
    """

    def __init__(self, on_first: Callable[[str], None], *, grace_s: float) -> None:
        self._on_first, self._grace_s = on_first, grace_s
        self._saved: dict[int, Any] = {}
        self._num_signals = 0

    def __enter__(self) -> None:
        """Install the handlers."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._saved[number] = signal.signal(number, self._handle)
            self._saved[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._raise)

    def __exit__(self, *_: object) -> None:
        """Put the earlier handlers back."""
        if self._saved:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._saved.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: object) -> None:
        self._num_signals += 1
        if self._num_signals > 1:
            self._raise(number, frame)
        reason = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
        self._on_first(reason)
        logger.warning(
            "%s: running trials stop at their next report; again to leave at once.", reason
        )
        signal.setitimer(signal.ITIMER_REAL, self._grace_s)

    def _raise(self, number: int, frame: object) -> None:
        del number, frame
        raise KeyboardInterrupt
