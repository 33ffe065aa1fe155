"""A lock on a file that a dead owner cannot hold: the kernel drops it with the process."""

from __future__ import annotations

import fcntl
import os
import socket
import time
import weakref
from typing import TYPE_CHECKING, NamedTuple, Self

if TYPE_CHECKING:
    from pathlib import Path


class LockHeldError(OSError):
    """Another owner holds the lock; `owner` is what it wrote, such as `process 12 on box`."""

    def __init__(self, owner: str) -> None:
        super().__init__(owner)
        self.owner = owner


class FileLock:
    """An exclusive `flock`, held from construction to `release`.

    The file stays when the lock goes: removing it would let two owners hold two files of one name.
    """

    def __init__(self, path: Path, *, wait_s: float = 0.3) -> None:
        """Take the lock.

        Args:
            path: The lock file; it is made where it does not exist.
            wait_s: How long to try. Never 0: a reader that asks `is_locked` holds it for an
                instant.

        Raises:
            LockHeldError: Another owner has it still after `wait_s`.
        """
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        until = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as exc:
                if time.monotonic() >= until:
                    owner = os.pread(self._fd, 200, 0).decode(errors="replace").strip()
                    self.release()
                    raise LockHeldError(owner or "another process") from exc
                time.sleep(0.01)
            except BaseException:
                self.release()
                raise
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        _held.add(self)

    def release(self) -> None:
        """Give the lock back; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.release()


class Owner(NamedTuple):
    """Who took a lock last."""

    pid: int
    host: str


def read_owner(path: Path) -> Owner | None:
    """Who took the lock of `path` last, whether or not it still holds it."""
    try:
        _, pid, _, host = path.read_text().split()
        return Owner(int(pid), host)
    except (OSError, ValueError):
        return None


def is_locked(path: Path) -> bool:
    """Whether a living process holds the lock of `path`."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


# A forked child (a data loader's worker) shares its parent's lock and would hold it after the
# parent's death, so it lets go of its copy at once.
_held: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _release_in_child() -> None:
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_release_in_child)
