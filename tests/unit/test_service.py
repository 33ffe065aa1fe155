from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from heats import service
from heats.errors import HeatsError
from heats.locks import FileLock
from heats.service import LOCK, Up, environ_digests, folder


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment that this process seems to have been started with."""
    environ = {"HOME": "/home/ada"}
    monkeypatch.setattr(service, "first_environ", lambda: environ)
    return environ


@pytest.fixture(autouse=True)
def own_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def an_up(**changes: object) -> Up:
    values: dict[str, Any] = {
        "pid": os.getpid(),
        "created_s": 1.0,
        "started_s": time.time() + 60,
        "address": "127.0.0.1:6379",
        "num_cpus": 2,
        "num_gpus": 0,
        "idle_timeout_s": 60.0,
        "max_memory_gib": 1.0,
        "environ": environ_digests(),
        **changes,
    }
    return Up(**values)


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


def test_folder_of_somebody_else_is_no_service(own_tmp: Path) -> None:
    (own_tmp / f"heats-{os.getuid()}").write_text("in the way")
    assert Up.read() is None


def test_forgotten_service_is_not_found() -> None:
    an_up().save()
    Up.forget()
    Up.forget()
    with FileLock(folder() / LOCK):
        assert Up.read() is None


def test_folder_that_is_a_link_is_refused(own_tmp: Path) -> None:
    (own_tmp / "elsewhere").mkdir(mode=0o700)
    (own_tmp / f"heats-{os.getuid()}").symlink_to(own_tmp / "elsewhere")
    with pytest.raises(HeatsError):
        folder()


def test_sweep_of_the_same_environment_is_not_refused(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    up = an_up()
    environ |= {"COLUMNS": "40", "SSH_TTY": "/dev/pts/7"}
    monkeypatch.setenv("SET_BY_THE_PROGRAM", "1")
    assert up.refusal() is None


def test_environment_is_the_one_that_a_process_was_started_with() -> None:
    program = (
        "import os; os.environ['LATE'] = '1'; from heats.service import environ_digests as found; "
        "print('EARLY' in found(), 'LATE' in found())"
    )
    command = [sys.executable, "-c", program]
    environ = {**os.environ, "EARLY": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]


def test_other_environment_is_refused_by_name_without_its_values(environ: dict[str, str]) -> None:
    environ["API_KEY"] = "s3cret"
    up = an_up()
    assert "s3cret" not in str(up)
    environ |= {"API_KEY": "other", "CUDA_VISIBLE_DEVICES": "1"}
    assert up.refusal() == (
        "the environment is another one than there: API_KEY, CUDA_VISIBLE_DEVICES"
    )


def test_other_limits_are_another_environment(environ: dict[str, str]) -> None:
    up = an_up()
    mask = os.umask(0o027)
    try:
        assert up.refusal() == "the environment is another one than there: (umask)"
    finally:
        os.umask(mask)


def test_packages_that_have_changed_since_are_refused() -> None:
    newest = max(path.stat().st_ctime for path in Path(service.__file__).parent.rglob("*.py"))
    assert an_up(started_s=newest - 1).refusal() == "packages have changed since it started"


def test_whether_the_virtual_environment_is_activated_makes_no_difference(
    environ: dict[str, str],
) -> None:
    environ["PATH"] = "/usr/bin:/bin"
    up = an_up()
    own = str(Path(sys.prefix, "bin"))
    environ |= {"PATH": f"{own}:/usr/bin:/bin", "VIRTUAL_ENV": sys.prefix, "PYENV_SHELL": "bash"}
    assert up.refusal() is None
    environ["PATH"] = f"{own}:/bin"
    assert "PATH" in (up.refusal() or "")
