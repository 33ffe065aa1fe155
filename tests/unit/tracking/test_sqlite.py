from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
import sqlalchemy

from heats.tracking import sqlite
from heats.tracking.sqlite import fold, write_ahead

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def no_listener() -> Iterator[None]:
    yield
    engine = sqlalchemy.engine.Engine
    if sqlalchemy.event.contains(engine, "connect", sqlite._on_connect):
        sqlalchemy.event.remove(engine, "connect", sqlite._on_connect)


def journal_mode(path: Path) -> str:
    engine = sqlalchemy.create_engine(f"sqlite:///{path}")
    try:
        with engine.connect() as connection:
            connection.execute(sqlalchemy.text("CREATE TABLE a (b)"))
            connection.execute(sqlalchemy.text("INSERT INTO a VALUES (1)"))
            connection.commit()
            return str(connection.execute(sqlalchemy.text("PRAGMA journal_mode")).scalar())
    finally:
        engine.dispose()


@pytest.mark.parametrize(("kind", "mode"), [("ext4", "wal"), ("nfs4", "delete"), ("", "delete")])
def test_log_is_kept_on_local_disks_only(
    kind: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "_file_system", lambda _: kind)
    write_ahead(tmp_path / "a.db")
    write_ahead(tmp_path / "a.db")
    assert journal_mode(tmp_path / "a.db") == mode


def test_file_system_is_that_of_the_nearest_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mount:
        def __init__(self, mountpoint: str, fstype: str) -> None:
            self.mountpoint, self.fstype = mountpoint, fstype

    mounts = [Mount("/", "ext4"), Mount(str(tmp_path / "far"), "nfs"), Mount("/tm", "tmpfs")]
    monkeypatch.setattr("psutil.disk_partitions", lambda **_: mounts)
    assert sqlite._file_system(tmp_path / "far" / "a") == "nfs"
    assert sqlite._file_system(tmp_path / "farther") == "ext4"


def test_folded_database_has_everything_in_one_file(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with closing(sqlite3.connect(path)) as writer:
        writer.execute("PRAGMA journal_mode=WAL")
        writer.execute("CREATE TABLE a (b)")
        writer.commit()
        assert (tmp_path / "a.db-wal").stat().st_size > 0
        fold(path)
        assert (tmp_path / "a.db-wal").stat().st_size == 0
        assert b"CREATE TABLE a" in path.read_bytes()


def test_folding_what_is_no_database_does_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.db").write_text("not a database, and long enough to be looked at" * 3)
    fold(tmp_path / "a.db")
