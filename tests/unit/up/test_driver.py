from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from heats.service import current
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
    assert _receive(driver) == (None, [])


def test_nothing_is_handed_over_where_nothing_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "gettrace", lambda: None)
    assert current() is None
    assert hand_over() is None
    assert capfd.readouterr().err == ""
