from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from heats.service import NotHereError, current
from heats.up.client import hand_over
from heats.up.driver import _receive, _run


def run(folder: Path, source: str) -> int:
    script = folder / "program.py"
    script.write_text(source)
    return _run({"script": str(script)})


@pytest.mark.parametrize(
    ("source", "code", "err"),
    [
        ("print(__name__)", 0, ""),
        ("import sys; sys.exit()", 0, ""),
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit('no data')", 1, "no data"),
        ("raise KeyboardInterrupt", 130, ""),
        ("raise ValueError('no data')", 1, "ValueError: no data"),
    ],
)
def test_program_ends_with_pythons_own_exit_code(
    source: str, code: int, err: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, source) == code
    out = capfd.readouterr()
    assert err in out.err
    if "print" in source:
        assert out.out == "__main__\n"


def test_sweep_that_cannot_run_here_goes_back(tmp_path: Path) -> None:
    source = "from heats.service import NotHereError; raise NotHereError('it needs another one')"
    with pytest.raises(NotHereError, match="it needs another one"):
        run(tmp_path, source)


def started_as(*typed: str) -> str:
    """What `_program` finds in a program that Python is started with."""
    done = subprocess.run([sys.executable, *typed], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_program_is_found_as_it_was_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = "from heats.up.client import _program; print(_program())"
    Path("app.py").write_text(source)
    Path("pkg").mkdir()
    Path("pkg/__main__.py").write_text(source)
    assert started_as("app.py", "a=1") == str({"script": str(tmp_path / "app.py")})
    assert started_as("-m", "pkg", "a=1") == "{'module': 'pkg'}"
    assert started_as("-m", "app") == "{'module': 'app'}"


def test_program_that_could_not_be_started_so_again_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = "from heats.up.client import _program; print(_program())"
    Path("app.py").write_text(source)
    Path("strips.py").write_text(f"import sys; sys.argv[1:] = sys.argv[2:]; {source}")
    Path("folder").mkdir()
    Path("folder/__main__.py").write_text(source)
    assert started_as("-O", "app.py") == "None"
    assert started_as("-c", source) == "None"
    assert started_as("strips.py", "--own", "a=1") == "None"
    assert started_as("folder") == "None"


def test_module_is_run_as_python_would(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").touch()
    (tmp_path / "pkg" / "__main__.py").write_text("import sys; print(__name__, sys.argv[1:])")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["-m", "a=1"])
    assert _run({"module": "pkg"}) == 0
    assert capfd.readouterr().out == "__main__ ['a=1']\n"


def test_request_longer_than_one_read_arrives_with_its_streams() -> None:
    client, driver = socket.socketpair()
    request: dict[str, Any] = {"argv": ["x" * 300_000]}
    line = json.dumps(request).encode() + b"\n"
    read, write = os.pipe()
    with client, driver:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**20)
        sent = socket.send_fds(client, [line], [read, write, write])
        client.sendall(line[sent:])
        received, fds = _receive(driver)
    assert received == request
    os.write(fds[1], b"through")
    assert os.read(read, 10) == b"through"
    for fd in (*fds, read, write):
        os.close(fd)


def test_client_that_leaves_at_once_is_no_request() -> None:
    client, driver = socket.socketpair()
    client.close()
    with driver:
        assert _receive(driver) == (None, [])


def test_nothing_is_handed_over_where_nothing_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "gettrace", lambda: None)
    assert current() is None
    assert hand_over() is None
    assert capfd.readouterr().err == ""
