"""The tracker's process: it serves the driver's requests and ships the ledger (tracker.py)."""

from __future__ import annotations

import logging
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from heats.tracking.runs import Runs
from heats.tracking.shipper import Shipper
from heats.tracking.tracker import Close, Closed, Made, Make, Ship, Sweep, Told

if TYPE_CHECKING:
    from collections.abc import Callable

_WATCH_S = 1.0
"""How often it looks whether the driver still lives."""


class _Teller(logging.Handler):
    """Passes what is logged on to the driver."""

    def __init__(self, send: Callable[[object], None]) -> None:
        super().__init__()
        self._tell = send

    def emit(self, record: logging.LogRecord) -> None:
        self._tell(Told(record.name, record.levelno, self.format(record)))


class _Process:
    """The other end: serves requests in their order, beside the thread that ships."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        if not connection.poll():  # There is no sweep yet: be ready for it.
            import mlflow.store.tracking.sqlalchemy_store
            import mlflow.tracking  # noqa: F401

        sweep: Sweep = connection.recv()
        os.chdir(sweep.cwd)
        os.environ.update(sweep.environ)
        own = logging.getLogger("heats")
        own.setLevel(sweep.log_level)
        own.addHandler(_Teller(self._send))
        self._runs = Runs(sweep.start, root=sweep.root)
        self._shipper = Shipper(sweep.sweep_dir, self._runs)

    def serve(self) -> None:
        """Return once the driver is gone, or has hung up."""
        driver = os.getppid()
        making, closing = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        # A child that the driver forked may hold the connection open, so its death is no news.
        while os.getppid() == driver:
            if not self._connection.poll(_WATCH_S):
                continue
            match self._connection.recv():
                case Make() as make:
                    making.submit(self._make, make)
                case Ship():
                    self._shipper.start()
                case Close(timeout_s):
                    closing.submit(self._close, timeout_s)

    def _make(self, make: Make) -> None:
        if make.trial is None:
            run = self._runs.create_parent()
        else:
            run = self._runs.create_trial(make.trial, make.asked_s)
        self._send(Made(make.trial, run))

    def _close(self, timeout_s: float) -> None:
        self._send(Closed(self._shipper.close(timeout_s)))

    def _send(self, message: object) -> None:
        with suppress(OSError), self._lock:
            self._connection.send(message)


def main(number: int) -> None:
    """Serve the driver at the other end of the socket with this file descriptor."""
    with suppress(EOFError, OSError):
        _Process(Connection(number)).serve()
    os._exit(0)  # Without waiting for requests to an MLflow that does not answer.


if __name__ == "__main__":
    main(int(sys.argv[1]))
