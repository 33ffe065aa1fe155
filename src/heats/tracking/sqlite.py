"""MLflow's SQLite store with a write-ahead log: readers and writer do not wait for each other.

By default whoever reads, such as MLflow's UI, keeps the writer out ("database is locked"), and each
commit waits for the disk several times. With the log the file stays whole through a power cut, and
may then lack the last moments, which the ledger has.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil

_LOCAL = frozenset("apfs btrfs ext2 ext3 ext4 f2fs hfs overlay tmpfs xfs zfs".split())
"""File systems on which processes can share the log; over a network they cannot."""


def write_ahead(path: Path) -> None:
    """Have this process's connections keep the log, where the file is on a local disk."""
    if _file_system(path.parent) not in _LOCAL:
        return
    from sqlalchemy import event
    from sqlalchemy.engine import Engine

    if not event.contains(Engine, "connect", _on_connect):
        event.listen(Engine, "connect", _on_connect)


def fold(path: Path) -> None:
    """Move what the log has into the database itself, so that this one file has everything."""
    with suppress(sqlite3.Error), closing(sqlite3.connect(path, timeout=1.0)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def _on_connect(connection: Any, _: Any) -> None:
    if isinstance(connection, sqlite3.Connection):
        with suppress(sqlite3.OperationalError):  # Somebody reads it just now: next time.
            connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")


def _file_system(folder: Path) -> str:
    """Type of the file system that a folder is in."""
    path = folder.resolve()
    above = {str(path), *map(str, path.parents)}
    mounts = [each for each in psutil.disk_partitions(all=True) if each.mountpoint in above]
    return max(mounts, key=lambda each: len(each.mountpoint)).fstype if mounts else ""
