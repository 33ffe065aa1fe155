"""The process that `heats up` keeps for the next sweep: everything loaded, it waits for a program.

It runs one program as if that had been started from the client's shell, and ends with it.
"""

from __future__ import annotations

import array
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
from heats.locks import FileLock
from heats.service import BUSY, Up, folder, serve

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
_LOOK_EVERY_S = 1.0
_MAX_BYTES = 2**16


class _Ending:
    """Tells the client the exit code as the last thing that this process does."""

    def __init__(self) -> None:
        self.code = int(ExitCode.NOT_DONE)
        self.connection: socket.socket | None = None
        atexit.register(self._tell)  # What is registered first runs last.

    def _tell(self) -> None:
        if self.connection is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            with suppress(OSError):
                self.connection.sendall(json.dumps({"exit": self.code}).encode() + b"\n")


def main(number: int) -> int:
    """Wait at the listening socket with this file descriptor; the program's exit code."""
    up, ending, service = Up.read(), _Ending(), os.getppid()
    if up is None:
        return ExitCode.NOT_DONE
    serve(up)
    _load()
    with socket.socket(fileno=number) as listener:
        listener.settimeout(_LOOK_EVERY_S)
        while True:
            if os.getppid() != service:
                return ExitCode.NOT_DONE
            with suppress(TimeoutError):
                connection, _ = listener.accept()
                connection.settimeout(None)
                request, fds = _receive(connection)
                if request is not None:
                    break
    busy = FileLock(folder() / BUSY)
    ending.connection = connection
    connection.sendall(json.dumps({"pid": os.getpid()}).encode() + b"\n")
    threading.Thread(target=_watch, args=(connection,), daemon=True).start()
    _become(request, fds)
    ending.code = _run(request)
    del busy
    return ending.code


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


def _receive(connection: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """The client's request and its standard streams; None where it has left again."""
    line, fds, _, _ = socket.recv_fds(connection, _MAX_BYTES, 3)
    while line and not line.endswith(b"\n"):
        more = connection.recv(_MAX_BYTES)
        line = line + more if more else b""
    if not line or len(fds) != 3:
        for fd in array.array("i", fds):
            os.close(fd)
        connection.close()
        return None, []
    request: dict[str, Any] = json.loads(line)
    return request, list(fds)


def _become(request: dict[str, Any], fds: list[int]) -> None:
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=stream is sys.stderr or stream.isatty())  # type: ignore[union-attr]
    os.umask(request["umask"])
    os.chdir(request["cwd"])
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
