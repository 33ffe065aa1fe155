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
import threading
import time
from contextlib import suppress
from functools import cache
from typing import Any

from heats.locks import is_locked
from heats.service import BUSY, SOCKET, Up, current, first_environ, folder, shell_environ

_START_LIMIT_S = 30.0
"""A driver may have to load everything first: as long as a sweep takes without one."""

_BUSY_AFTER_S = 1.0
_BUSY, _SILENT = "another sweep runs there", "it does not answer"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@cache
def hand_over() -> int | None:
    """Have the running program run again, by a driver that `heats up` keeps.

    A program asks once: what was refused at its start is not asked for again by its sweeper.

    Returns:
        Its exit code, or None where this process is to run the sweep itself.
    """
    program = _program()
    if current() is not None or program is None or sys.gettrace() is not None:
        return None
    if threading.current_thread() is not threading.main_thread():
        return None  # Signals could not be passed on.
    up = Up.read()
    if up is None:
        return None
    reason = up.refusal()
    if reason is None and is_locked(folder() / BUSY):
        reason = _BUSY
    if reason is None:
        with socket.socket(socket.AF_UNIX) as connection:
            answer = _connect(connection, program)
            if isinstance(answer, int):
                answer = _wait(connection, answer)
            if isinstance(answer, int):
                return answer
            reason = answer
    if sys.stderr is not None:
        sys.stderr.write(f"Not run by `heats up`: {reason}. This sweep starts all by itself.\n")
    return None


def _program() -> dict[str, str] | None:
    """The script or module that Python was started with, if it can be started so again.

    Not where Python has options of its own, or the program has changed its command line.
    """
    main = sys.modules["__main__"]
    spec, typed = getattr(main, "__spec__", None), sys.orig_argv[1:]
    if spec is None:
        is_script = typed == sys.argv and getattr(main, "__file__", None) is not None
        return {"script": os.path.abspath(sys.argv[0])} if is_script else None
    name = spec.name.removesuffix(".__main__")
    is_module = typed[:2] == ["-m", name] and typed[2:] == sys.argv[1:]
    return {"module": name} if is_module else None


def _connect(connection: socket.socket, program: dict[str, str]) -> int | str:
    """Ask for a driver and give it everything; its process id, or why there is none."""
    request = {
        **program,
        "argv": sys.argv,
        "path": sys.path,
        "cwd": os.getcwd(),
        "environ": shell_environ(),
        "python_path": first_environ().get("PYTHONPATH"),
        "ignored": [number for number in _SIGNALS if _is_ignored(number)],
    }
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    with suppress(OSError, ValueError):
        connection.connect(str(folder() / SOCKET))
        line = json.dumps(request).encode() + b"\n"
        num_sent = socket.send_fds(connection, [line], [0, 1, 2])
        connection.sendall(line[num_sent:])
        until, busy_since = time.monotonic() + _START_LIMIT_S, None
        while (now := time.monotonic()) < until:
            if select.select([connection], [], [], 0.1)[0]:
                answer = _read(connection)
                return _SILENT if answer is None else int(answer["pid"])
            if not is_locked(folder() / BUSY):
                busy_since = None
            elif busy_since is None:
                busy_since = now
            elif now - busy_since > _BUSY_AFTER_S:
                return _BUSY  # Another one's sweep came first.
    return _SILENT


def _wait(connection: socket.socket, driver: int) -> int | str:
    """The driver's exit code, or why it cannot run the sweep; it gets the signals meanwhile."""

    def forward(number: int, _: object) -> None:
        with suppress(ProcessLookupError):
            os.kill(driver, number)

    heard = [number for number in _SIGNALS if not _is_ignored(number)]
    saved = {number: signal.signal(number, forward) for number in heard}
    try:
        answer = _read(connection)
    finally:
        for number, handler in saved.items():
            signal.signal(number, handler)
    if answer is None:
        if sys.stderr is not None:
            sys.stderr.write(f"The sweep's process ({driver}) that `heats up` kept has died.\n")
        return 1
    return str(answer["not_here"]) if "not_here" in answer else int(answer["exit"])


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


def _is_ignored(number: int) -> bool:
    """Whether a signal is to do nothing, as SIGHUP after `nohup`; a sweep hears the other two."""
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN
