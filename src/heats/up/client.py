"""A sweep's first process where `heats up` runs: it has another one run it, and stays its face.

That one has loaded everything already. It gets this one's arguments, directory, terminal and
signals, and gives its exit code.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import Any

from heats.locks import is_locked
from heats.service import BUSY, SOCKET, Up, current, folder, is_of_a_shell

_START_LIMIT_S = 30.0
"""A driver may have to load everything first: as long as a sweep takes without one."""

_BUSY_AFTER_S = 1.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def hand_over() -> int | None:
    """Have the running program run again, by a driver that `heats up` keeps.

    Returns:
        Its exit code, or None where this process is to run the sweep itself.
    """
    program = _program()
    if current() is not None or program is None or sys.gettrace() is not None:
        return None
    up = Up.read()
    if up is None:
        return None
    reason = up.refusal()
    if reason is None and is_locked(folder() / BUSY):
        reason = "another sweep runs there"
    if reason is None:
        with socket.socket(socket.AF_UNIX) as connection:
            driver = _connect(connection, program)
            if driver is not None:
                return _wait(connection, driver)
        reason = "it does not answer"
    sys.stderr.write(f"Not run by `heats up`: {reason}. This sweep starts everything by itself.\n")
    return None


def _program() -> dict[str, str] | None:
    main = sys.modules["__main__"]
    spec, script = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:
        return {"module": spec.name.removesuffix(".__main__")}
    return None if script is None else {"script": os.path.abspath(script)}


def _connect(connection: socket.socket, program: dict[str, str]) -> int | None:
    """Ask for a driver and give it everything; its process id, or None where none answers."""
    request = {
        **program,
        "argv": sys.argv,
        "path": sys.path,
        "cwd": os.getcwd(),
        "umask": _umask(),
        "environ": {name: value for name, value in os.environ.items() if is_of_a_shell(name)},
    }
    sys.stdout.flush()
    sys.stderr.flush()
    with suppress(OSError, ValueError):
        connection.connect(str(folder() / SOCKET))
        line = json.dumps(request).encode() + b"\n"
        num_sent = socket.send_fds(connection, [line], [0, 1, 2])
        connection.sendall(line[num_sent:])
        until, busy_since = time.monotonic() + _START_LIMIT_S, None
        while (now := time.monotonic()) < until:
            if select.select([connection], [], [], 0.1)[0]:
                answer = _read(connection)
                return None if answer is None else int(answer["pid"])
            if not is_locked(folder() / BUSY):
                busy_since = None
            elif busy_since is None:
                busy_since = now
            elif now - busy_since > _BUSY_AFTER_S:
                return None  # Another one's sweep came first.
    return None


def _wait(connection: socket.socket, driver: int) -> int:
    """The driver's exit code; it gets the signals meanwhile."""

    def forward(number: int, _: object) -> None:
        with suppress(ProcessLookupError):
            os.kill(driver, number)

    saved = {number: signal.signal(number, forward) for number in _SIGNALS}
    try:
        answer = _read(connection)
    finally:
        for number, handler in saved.items():
            signal.signal(number, handler)
    if answer is None:
        sys.stderr.write(f"The sweep's process ({driver}) that `heats up` kept has died.\n")
        return 1
    return int(answer["exit"])


def _read(connection: socket.socket) -> dict[str, Any] | None:
    """The next message; None where the other end is gone."""
    line = b""
    with suppress(ConnectionError):
        while not line.endswith(b"\n"):
            read = connection.recv(1)
            if not read:
                return None
            line += read
        message: dict[str, Any] = json.loads(line)
        return message
    return None


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
