"""From a training run to an answer over HTTP, with the commands that a user types."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

SERVER_START_S = 120.0


@pytest.mark.timeout(600)
def test_promoted_model_answers_over_http(project_dir: Path) -> None:
    _run("sweep.py", "lane.isolation=inline", "epochs=3", "study_name=served")
    promoted = _run("-c", "import heats.cli; heats.cli.main()", "promote", "served", "--json")
    promotion = json.loads(promoted)
    assert promotion["tracking_uri"] == f"sqlite:///{project_dir / 'mlruns' / 'mlflow.db'}"

    with _server("models:/digits@champion", promotion["tracking_uri"]) as url:
        request = urllib.request.Request(
            f"{url}/invocations",
            data=promotion["request"].encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            answer = json.load(response)
    assert answer.keys() == {"predictions"}
    assert answer["predictions"][0] in range(10)


def _run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextlib.contextmanager
def _server(model_uri: str, tracking_uri: str) -> Iterator[str]:
    """URL of `mlflow models serve` for a model, on this machine only."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # MLflow finds uvicorn by the path.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    server = subprocess.Popen(
        [
            *(sys.executable, "-m", "mlflow", "models", "serve", "-m", model_uri),
            *("--env-manager", "local", "--host", "127.0.0.1", "-p", str(port)),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "MLFLOW_TRACKING_URI": tracking_uri, "PATH": path},
    )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline_s = time.monotonic() + SERVER_START_S
        while not _answers(f"{url}/ping"):
            assert server.poll() is None, "the server ended"
            assert time.monotonic() < deadline_s, "the server did not start"
            time.sleep(0.2)
        yield url
    finally:
        server.terminate()
        server.wait(timeout=30)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except (urllib.error.URLError, ConnectionError):
        return False
