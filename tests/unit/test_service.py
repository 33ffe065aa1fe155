from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from heats import service
from heats.errors import HeatsError
from heats.locks import FileLock
from heats.service import LOCK, Up, environ_digests, folder


@pytest.fixture(autouse=True)
def own_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def an_up(**changes: object) -> Up:
    values = {
        "pid": os.getpid(),
        "started_s": time.time() + 60,
        "address": "127.0.0.1:6379",
        "num_cpus": 2,
        "num_gpus": 0,
        "idle_timeout_s": 60.0,
        "max_memory_gib": 1.0,
        "environ": environ_digests(),
        **changes,
    }
    return Up(**values)  # type: ignore[arg-type]


def test_service_is_read_only_while_it_holds_its_lock() -> None:
    up = an_up()
    up.save()
    assert Up.read() is None
    with FileLock(folder() / LOCK):
        assert Up.read() == up
        (folder() / "up.json").write_text('{"pid": 1}')
        assert Up.read() is None


def test_folder_is_its_users_alone(own_tmp: Path) -> None:
    assert folder().stat().st_mode & 0o077 == 0
    (own_tmp / f"heats-{os.getuid()}").chmod(0o755)
    with pytest.raises(HeatsError, match="others may use it"):
        folder()


def test_folder_that_is_a_link_is_refused(own_tmp: Path) -> None:
    (own_tmp / "elsewhere").mkdir(mode=0o700)
    (own_tmp / f"heats-{os.getuid()}").symlink_to(own_tmp / "elsewhere")
    with pytest.raises(HeatsError):
        folder()


def test_sweep_of_the_same_environment_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    up = an_up()
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("SSH_TTY", "/dev/pts/7")
    assert up.refusal() is None


def test_other_environment_is_refused_by_name_without_its_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("API_KEY", "s3cret")
    up = an_up()
    assert "s3cret" not in str(up)
    monkeypatch.setenv("API_KEY", "other")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert up.refusal() == (
        "environment variables are other than there: API_KEY, CUDA_VISIBLE_DEVICES"
    )


def test_packages_that_have_changed_since_are_refused() -> None:
    newest = max(path.stat().st_ctime for path in Path(service.__file__).parent.rglob("*.py"))
    assert an_up(started_s=newest - 1).refusal() == "packages have changed since it started"
