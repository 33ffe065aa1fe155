"""`heats up` and `heats down`: a cluster and lanes that are kept between sweeps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from heats.errors import HeatsError

if TYPE_CHECKING:
    from pathlib import Path

    from heats.service import Up

_START_LIMIT_S = 120.0
_END_LIMIT_S = 20.0
_LOOK_EVERY_S = 0.1
_GIB = 2**30
_SHARE_OF_MEMORY = 0.25


def register(app: typer.Typer) -> None:
    """Add the commands to an app."""
    app.command("up")(up)
    app.command("down")(down)


def up(
    num_cpus: Annotated[
        int | None, typer.Option("--cpus", min=1, help="CPUs of the cluster. By default all.")
    ] = None,
    num_gpus: Annotated[
        int | None, typer.Option("--gpus", min=0, help="GPUs of the cluster. By default all.")
    ] = None,
    idle_timeout_min: Annotated[
        float, typer.Option("--idle-timeout", min=0.1, help="Minutes without a sweep to end after.")
    ] = 30.0,
    max_memory_gib: Annotated[
        float | None,
        typer.Option(
            "--max-memory",
            min=0.5,
            help="GiB that may be held between sweeps. By default a quarter of the machine's.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Keep a Ray cluster and the lanes of the last sweep, so that the next one starts at once.

    For sweeps of this Python environment with these environment variables; others start everything
    by themselves, as all do without it. Changed source files get new lanes. End it with heats down.
    """
    from rich.console import Console

    from heats.locks import is_locked
    from heats.service import LOCK, LOG, Up, folder

    console = Console(stderr=True)
    running = Up.read()
    if running is not None and running.refusal() is None:
        console.print(f"Up already: {_told(running)}", highlight=False)
        return
    if running is not None:
        console.print(f"Starting anew: {running.refusal()}.", highlight=False)
        _end(running, is_forced=False)
    log = folder() / LOG
    command = [sys.executable, "-P", "-m", "heats.up.daemon"]
    command += ["--idle-timeout-s", str(60 * idle_timeout_min)]
    command += ["--max-memory-gib", str(max_memory_gib or _SHARE_OF_MEMORY * _memory_gib())]
    command += [] if num_cpus is None else ["--num-cpus", str(num_cpus)]
    command += [] if num_gpus is None else ["--num-gpus", str(num_gpus)]
    with log.open("w") as out, console.status("Starting a Ray cluster"):
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            cwd=folder(),
        )
        until = time.monotonic() + _START_LIMIT_S
        while (started := _started(process.pid)) is None:
            if process.poll() is not None or time.monotonic() > until:
                process.kill()
                raise HeatsError(_failure(log, is_locked(folder() / LOCK)))
            time.sleep(_LOOK_EVERY_S)
    console.print(f"Up: {_told(started)}", highlight=False)


def down(
    force: Annotated[
        bool, typer.Option("--force", help="Also where a sweep runs there: it can be resumed.")
    ] = False,
) -> None:
    """End what heats up keeps."""
    from heats.service import Up

    running = Up.read()
    if running is None:
        typer.echo("Nothing is up.")
        return
    _end(running, is_forced=force)
    typer.echo("Down.")


def _started(pid: int) -> Up | None:
    from heats.service import Up

    up = Up.read()
    return up if up is not None and up.pid == pid else None


def _end(running: Up, *, is_forced: bool) -> None:
    """End the service and all that it has started.

    Raises:
        HeatsError: A sweep runs there.
    """
    import psutil

    from heats.locks import is_locked
    from heats.service import BUSY, LOCK, folder

    if is_locked(folder() / BUSY) and not is_forced:
        msg = "A sweep runs there. Wait for it, or interrupt it with: heats down --force"
        raise HeatsError(msg)
    with suppress(psutil.NoSuchProcess):
        service = psutil.Process(running.pid)
        if service.create_time() != running.created_s:
            return  # It has ended, and its number is another process's now.
        started = service.children(recursive=True)
        os.kill(running.pid, signal.SIGTERM)
        until = time.monotonic() + _END_LIMIT_S
        while is_locked(folder() / LOCK) and time.monotonic() < until:
            time.sleep(_LOOK_EVERY_S)
        for process in (service, *started):
            with suppress(psutil.NoSuchProcess):
                process.kill()


def _told(up: Up) -> str:
    gpus = f" and {up.num_gpus} GPUs" if up.num_gpus else ""
    return (
        f"a Ray cluster of {up.num_cpus} CPUs{gpus} (process {up.pid}). Sweeps of this environment"
        f" start in it, and their lanes wait there for the next one. It ends after"
        f" {up.idle_timeout_s / 60:g} minutes without a sweep, or with: heats down"
    )


def _failure(log: Path, is_taken: bool) -> str:
    if is_taken:
        return "Another `heats up` is starting."
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"It did not start: {lines[-1] if lines else 'no message'}. All of its log: {log}"


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / _GIB
