"""The service of `heats up`: it keeps a Ray cluster, the lanes of the last sweep, and a driver.

It ends by `heats down`, or once no sweep has run for its idle time-out. The cluster listens on the
loopback address only, and to nobody without its token.
"""

from __future__ import annotations

import argparse
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from heats.config import ClusterConf
from heats.locks import FileLock, LockHeldError, is_locked
from heats.service import (
    BUSY,
    LANES,
    LOCK,
    SOCKET,
    Up,
    environ_digests,
    folder,
    path_with_own,
)
from heats.up.driver import LOAD_FAILED

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import FrameType

logger = logging.getLogger(__name__)

# By its name an option of other systems; it is what has Ray listen on 127.0.0.1 alone.
_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"

_LOOK_EVERY_S = 0.5
_MEASURE_EVERY_S = 10.0
_END_S = 10.0
_GIB = 2**30


class _Driver:
    """The process that waits for the next sweep, then runs it."""

    def __init__(self, listener: socket.socket) -> None:
        number = listener.fileno()
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "heats.up.driver", str(number)],
            pass_fds=[number],
            stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,
        )

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def end(self) -> None:
        """Interrupt the sweep that it runs, if it runs one, and wait."""
        self.process.terminate()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def main(arguments: list[str]) -> int:
    """Serve until told to end, or idle for too long."""
    options = _options(arguments)
    signal.signal(signal.SIGTERM, _end)
    own, started_s, environ = folder(), time.time(), environ_digests()
    token = secrets.token_hex(32)
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, _LOOPBACK: "0"}
    os.environ["PATH"] = path_with_own(os.environ.get("PATH", ""))
    from heats.cluster import local_node, ray_cluster

    conf = ClusterConf(num_cpus=options.num_cpus, num_gpus=options.num_gpus)
    with FileLock(own / LOCK), _forgotten(), ray_cluster(conf):
        import psutil
        import ray

        resources = local_node(conf).resources
        up = Up(
            pid=os.getpid(),
            created_s=psutil.Process().create_time(),
            started_s=started_s,
            address=ray.get_runtime_context().gcs_address,
            num_cpus=int(resources["CPU"]),
            num_gpus=int(resources.get("GPU", 0)),
            idle_timeout_s=options.idle_timeout_s,
            max_memory_gib=options.max_memory_gib,
            environ=environ,
        )
        (own / LANES).mkdir(exist_ok=True)
        try:
            with _listener(own / SOCKET) as listener:
                up.save()
                return _serve(up, listener, own)
        finally:
            (own / SOCKET).unlink(missing_ok=True)
            shutil.rmtree(own / LANES, ignore_errors=True)


@contextmanager
def _forgotten() -> Iterator[None]:
    """Nobody finds this service before it tells of itself, nor after its end."""
    Up.forget()
    try:
        yield
    finally:
        Up.forget()


def _serve(up: Up, listener: socket.socket, own: Path) -> int:
    from heats.lane.actors import end, end_all_but_standing

    driver, idle_since_s, measured_s = _Driver(listener), time.monotonic(), 0.0
    try:
        while True:
            time.sleep(_LOOK_EVERY_S)
            now = time.monotonic()
            if driver.has_ended:
                if driver.process.returncode == LOAD_FAILED:
                    logger.error("A driver could not load what it needs: see above.")
                    return 1
                end_all_but_standing()
                driver, idle_since_s = _Driver(listener), now
            elif is_locked(own / BUSY):
                idle_since_s = now
            elif now - idle_since_s > up.idle_timeout_s:
                logger.info("No sweep has run for %g s.", up.idle_timeout_s)
                return 0
            elif now - measured_s > _MEASURE_EVERY_S:
                measured_s = now
                if _memory_gib() > up.max_memory_gib:
                    # No sweep may begin meanwhile: its lanes do not wait for another one.
                    with suppress(LockHeldError), FileLock(own / BUSY):
                        if lanes := end_all_but_standing():
                            logger.info("Over %g GiB: the oldest lane ends.", up.max_memory_gib)
                            end(lanes[0][0])
    except KeyboardInterrupt:
        return 0
    finally:
        driver.end()


def _listener(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    return listener


def _memory_gib() -> float:
    """What this process and all that it started hold, pages that they share counted once."""
    import psutil

    total = 0
    own = psutil.Process()
    for process in (own, *own.children(recursive=True)):
        try:
            total += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return total / _GIB


def _end(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise KeyboardInterrupt


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m heats.up.daemon", description=__doc__)
    parser.add_argument("--num-cpus", type=int)
    parser.add_argument("--num-gpus", type=int)
    parser.add_argument("--idle-timeout-s", type=float, required=True)
    parser.add_argument("--max-memory-gib", type=float, required=True)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    sys.exit(main(sys.argv[1:]))
