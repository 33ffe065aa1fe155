"""The process that `heats up` keeps for the next sweep: everything loaded, it waits for a program.

It runs one program as if that had been started from the client's shell, and ends with it.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import threading
import traceback
from contextlib import suppress
from typing import Any

from heats.errors import ExitCode
from heats.locks import FileLock, LockHeldError
from heats.service import BUSY, NotHereError, Up, folder, is_of_a_shell, serve

_MODULES = (
    "hydra.main",
    "hydra.utils",
    "optuna",
    "ray.dag",
    "ray.tune",
    "ray.train",
    "rich.live",
    "heats.lane.actors",
    "heats.scheduler",
    "heats.sweeper",
    "heats.tune.loop",
    "heats.tune.scheduler",
    "heats.tune.search",
)
LOAD_FAILED = 70
"""Exit code of a driver that could not load what every sweep needs."""

_LOOK_EVERY_S = 1.0
_BUSY_WAIT_S = 10.0
_MAX_BYTES = 2**16


class _Ending:
    """Tells the client the exit code as the last thing that this process does.

    By then the next sweep may begin: its client waits for the next driver.
    """

    def __init__(self) -> None:
        self.message: dict[str, Any] = {"exit": int(ExitCode.NOT_DONE)}
        self.connection: socket.socket | None = None
        self.busy: FileLock | None = None
        atexit.register(self._tell)  # What is registered first runs last.

    def _tell(self) -> None:
        if self.connection is not None:
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):  # Whoever read it may have left.
                    stream.flush()
            if self.busy is not None:
                self.busy.release()
            with suppress(OSError):
                _send(self.connection, self.message)


def main(number: int) -> int:
    """Wait at the listening socket with this file descriptor, and run what a client asks for.

    Returns:
        This process's own exit code; the client is told that of its program.
    """
    up, ending, service = Up.read(), _Ending(), os.getppid()
    if up is None:
        return ExitCode.NOT_DONE
    serve(up)
    try:
        _load()
    except BaseException:  # noqa: BLE001 - whatever it is, the next one would fare the same
        traceback.print_exc()
        return LOAD_FAILED
    with socket.socket(fileno=number) as listener:
        listener.settimeout(_LOOK_EVERY_S)
        while True:
            if os.getppid() != service:
                return ExitCode.NOT_DONE
            with suppress(TimeoutError):
                connection, _ = listener.accept()
                connection.settimeout(None)
                request, fds = _receive(connection)
                if request is not None and (busy := _engage(connection)) is not None:
                    break
                _close(connection, fds)
    ending.connection, ending.busy = connection, busy
    threading.Thread(target=_watch, args=(connection,), daemon=True).start()
    _become(request, fds)
    try:
        ending.message = {"exit": _run(request)}
    except NotHereError as exc:
        ending.message = {"not_here": str(exc)}
    return ExitCode.DONE


def _load() -> None:
    """Load what every sweep needs; nothing that a program could want to configure before."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf

    from heats.tracking.provenance import installed_packages
    from heats.tracking.tracker import start_early

    start_early()
    for name in _MODULES:
        importlib.import_module(name)
    installed_packages()
    # Each parser learns its grammar with the first texts that it reads.
    parser = OverridesParser.create()
    parser.parse_overrides(["a=tag(log, interval(1e-5, 0.1))", "b=1,x,[2]", "c='${d.e:f}'"])
    OmegaConf.to_container(OmegaConf.create({"a": "${b.c}", "b": {"c": "x-${d}"}, "d": 1}))


def _engage(connection: socket.socket) -> FileLock | None:
    """Let no other sweep begin here, and tell the client; None where it has not waited so long."""
    try:
        busy = FileLock(folder() / BUSY, wait_s=_BUSY_WAIT_S)
    except LockHeldError:
        return None
    try:
        _send(connection, {"pid": os.getpid()})
    except OSError:
        busy.release()
        return None
    return busy  # It goes with this process at the latest.


def _receive(connection: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """The client's request and its standard streams; None where it has left again."""
    line, fds, _, _ = socket.recv_fds(connection, _MAX_BYTES, 3)
    while line and not line.endswith(b"\n"):
        more = connection.recv(_MAX_BYTES)
        line = line + more if more else b""
    if not line or len(fds) != 3:
        return None, list(fds)
    request: dict[str, Any] = json.loads(line)
    return request, list(fds)


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _close(connection: socket.socket, fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
    connection.close()


def _become(request: dict[str, Any], fds: list[int]) -> None:
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=stream is sys.stderr or stream.isatty())  # type: ignore[union-attr]
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    os.chdir(request["cwd"])
    for name in filter(is_of_a_shell, list(os.environ)):
        del os.environ[name]
    os.environ.pop("PYTHONPATH", None)  # By which this process found its modules.
    if request["python_path"] is not None:
        os.environ["PYTHONPATH"] = request["python_path"]
    os.environ.update(request["environ"])
    sys.argv, sys.path[:] = request["argv"], request["path"]


def _run(request: dict[str, Any]) -> int:
    """Run the program; its exit code, as Python's own would be."""
    try:
        if "module" in request:
            argv = list(sys.argv)
            runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
            sys.argv = argv
        else:
            runpy.run_path(request["script"], run_name="__main__")
    except SystemExit as exc:
        if exc.code is None or isinstance(exc.code, int):
            return exc.code or 0
        sys.stderr.write(f"{exc.code}\n")
        return 1
    except NotHereError:
        raise
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BaseException:  # noqa: BLE001 - shown, as Python shows it
        traceback.print_exc()
        return 1
    return 0


def _watch(connection: socket.socket) -> None:
    """End as after SIGTERM where the client is gone: nobody sees the sweep any more."""
    with suppress(OSError):
        connection.recv(1)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main(int(sys.argv[1])))
