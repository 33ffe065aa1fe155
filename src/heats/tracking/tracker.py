"""MLflow in a process of its own: it makes the sweep's runs, and sends them what the ledger says.

What MLflow's client costs is so never taken from the driver, which Ray Tune and the study keep
busy, and the driver need not load it. The process ends with the driver, whatever ends that; what it
had not sent by then is sent by the next driver, or by `heats sync`.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswerError
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from heats.tracking.provenance import redact_url

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from heats.trial import RunCreated, SweepStarted

logger = logging.getLogger(__name__)

# How long the driver waits at most for the sweep's run, for a trial's, and beyond the time that the
# process was given for its end. The process itself gives up sooner, so this is for a stuck one.
_FIRST_LIMIT_S = 150.0
_LIMIT_S = 5.0
_EXTRA_S = 1.0


@dataclass(frozen=True, slots=True)
class Sweep:
    """First message to the process; `log_level` is that of the driver's own log."""

    start: SweepStarted
    sweep_dir: Path
    root: Path
    log_level: int
    cwd: str
    environ: dict[str, str] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Make:
    """Make the run of a trial that was asked at `asked_s`; `trial` None: the sweep's own."""

    trial: int | None
    asked_s: float


@dataclass(frozen=True, slots=True)
class Made:
    """The answer to `Make`; `run` None: MLflow did not answer in time."""

    trial: int | None
    run: RunCreated | None


@dataclass(frozen=True, slots=True)
class Ship:
    """From now on send what the ledger says."""


@dataclass(frozen=True, slots=True)
class Close:
    """Send the rest, for `timeout_s` at most, and end."""

    timeout_s: float


@dataclass(frozen=True, slots=True)
class Closed:
    """The last answer: whether MLflow has everything."""

    is_complete: bool


@dataclass(frozen=True, slots=True)
class Told:
    """A line for the driver's log."""

    logger: str
    level: int
    text: str


def start_early() -> None:
    """Start the process of this process's next sweep, to load MLflow until then."""
    _early.append(_start())


_early: list[tuple[subprocess.Popen[bytes], Connection]] = []


def _start() -> tuple[subprocess.Popen[bytes], Connection]:
    own, theirs = socket.socketpair()
    with theirs:
        number = theirs.fileno()
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "heats.tracking", str(number)],
            pass_fds=[number],
            stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, sys.path))},
            start_new_session=True,  # Ctrl-C is the driver's; this one may finish.
        )
    return process, Connection(own.detach())


class Tracker:
    """The driver's end: asks for runs, and never waits long for them."""

    def __init__(self, start: SweepStarted, sweep_dir: Path, root: Path) -> None:
        """Start the process; it loads MLflow while the driver goes on.

        Args:
            start: First event of the sweep's ledger.
            sweep_dir: Holds the ledger.
            root: The tracking root.
        """
        self.shown_uri = redact_url(start.tracking_uri)
        self._lock = threading.Lock()
        self._asked: dict[int | None, Future[RunCreated | None]] = {}
        self._closed: Future[bool] = Future()
        self._process, self._connection = _early.pop() if _early else _start()
        level, environ = logger.getEffectiveLevel(), dict(os.environ)
        self._send(Sweep(start, sweep_dir, root, level, os.getcwd(), environ))
        threading.Thread(target=self._listen, name="heats-tracker", daemon=True).start()

    def create_parent(self) -> RunCreated | None:
        """The sweep's own run; None where MLflow does not answer."""
        return self._ask(Make(None, 0.0), _FIRST_LIMIT_S)()

    def create_trial(self, trial: int, asked_s: float) -> Callable[[], RunCreated | None]:
        """Have the run of a trial made that was asked at `asked_s`.

        Returns:
            What waits for it, and gives None where MLflow does not answer.
        """
        return self._ask(Make(trial, asked_s), _LIMIT_S)

    def start(self) -> None:
        """Begin to send what the ledger says."""
        self._send(Ship())

    def close(self, timeout_s: float) -> bool:
        """End the process once MLflow has everything; False where that takes longer."""
        self._send(Close(timeout_s))
        with suppress(NoAnswerError):
            self._closed.result(timeout_s + _EXTRA_S)
        is_complete = self._end(is_complete=False)
        self._process.kill()
        self._process.wait()
        return is_complete

    def _ask(self, make: Make, limit_s: float) -> Callable[[], RunCreated | None]:
        made: Future[RunCreated | None] = Future()
        with self._lock:
            if self._closed.done():
                made.set_result(None)
            else:
                self._asked[make.trial] = made
        self._send(make)

        def wait() -> RunCreated | None:
            try:
                return made.result(limit_s)
            except NoAnswerError:
                return None

        return wait

    def _send(self, message: object) -> None:
        with suppress(OSError), self._lock:  # Where it is gone, `_listen` says so.
            self._connection.send(message)

    def _listen(self) -> None:
        try:
            while True:
                match self._connection.recv():
                    case Made(trial, run):
                        with self._lock:
                            made = self._asked.pop(trial, None)
                        if made is not None:
                            made.set_result(run)
                    case Told(name, level, text):
                        logging.getLogger(name).log(level, "%s", text)
                    case Closed(is_complete):
                        self._end(is_complete=is_complete)
        except (EOFError, OSError):
            pass
        if not self._closed.done():
            logger.warning(
                "The process that sends to MLflow at %s is gone. Nothing is lost: the ledger keeps "
                "it, and `heats sync` sends it.",
                self.shown_uri,
            )
        self._end(is_complete=False)
        self._connection.close()

    def _end(self, *, is_complete: bool) -> bool:
        """Wait for no answer any more; whether MLflow has everything, as the first call said."""
        with self._lock:
            if not self._closed.done():
                self._closed.set_result(is_complete)
            left, self._asked = self._asked, {}
        for made in left.values():
            made.set_result(None)
        return self._closed.result()
