"""Timing whole programs, and the cost of one more trial as a slope."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import linear_regression, median
from typing import TYPE_CHECKING

from benchmarks.machine import PROJECT, load_average, others_cpu_share

if TYPE_CHECKING:
    from collections.abc import Iterator

TIMEOUT_S = 1200.0
OUTPUT = "output.txt"


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a program with so many trials.

    `ends_s` are when its trials ended, in order and in seconds since the command started; `load`
    and `others_cpu` are the machine's state just before.
    """

    contender: str
    repeat: int
    num_trials: int
    wall_s: float
    ends_s: list[float]
    load: float
    others_cpu: float

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between successive ends of trials."""
        return [later - earlier for earlier, later in pairwise(self.ends_s)]


@dataclass(frozen=True, slots=True)
class Slope:
    """Seconds per further trial.

    `fitted` is the least-squares slope over all runs; `pairwise` are the slopes between the medians
    of neighbouring numbers of trials; `repeats` is one fitted slope for each repeat. `low` and
    `high` are the extremes of the latter, or of `pairwise` where there is one repeat.
    """

    fitted: float
    pairwise: dict[str, float]
    repeats: list[float]
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Timed:
    """How long a command took, when it began (since the epoch), and the machine just before."""

    began_s: float
    wall_s: float
    load: float
    others_cpu: float


def slope(points: list[tuple[int, int, float]]) -> Slope:
    """The slope of seconds over trials, from points of (repeat, number of trials, seconds)."""
    by_count: dict[int, list[float]] = {}
    by_repeat: dict[int, list[tuple[int, float]]] = {}
    for repeat, count, seconds in points:
        by_count.setdefault(count, []).append(seconds)
        by_repeat.setdefault(repeat, []).append((count, seconds))
    medians = sorted((count, median(seconds)) for count, seconds in by_count.items())
    pairs = {f"{a}-{b}": (tb - ta) / (b - a) for (a, ta), (b, tb) in pairwise(medians)}
    repeats = [linear_regression(*zip(*each, strict=True)).slope for each in by_repeat.values()]
    spread = repeats if len(repeats) > 1 else list(pairs.values())
    fitted = linear_regression([p[1] for p in points], [p[2] for p in points]).slope
    return Slope(fitted, pairs, repeats, min(spread), max(spread))


@contextmanager
def scratch() -> Iterator[Path]:
    """A new empty folder, gone at the end."""
    with tempfile.TemporaryDirectory(prefix="heats-bench-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def run_timed(arguments: list[str], folder: Path) -> Timed:
    """Run a Python program in `folder` as a user would and time it from start to exit.

    Raises:
        SystemExit: It failed or took longer than `TIMEOUT_S`; with the end of what it printed.
    """
    load, others = load_average(), others_cpu_share()
    began_s, clock_s = time.time(), time.perf_counter()
    finish(start(arguments, folder), folder)
    return Timed(began_s, time.perf_counter() - clock_s, load, others)


def start(
    arguments: list[str], folder: Path, env: dict[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a Python program in `folder` as a user would; what it prints goes to `output.txt`."""
    path = [str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])]
    with (folder / OUTPUT).open("w", encoding="utf-8") as output:
        return subprocess.Popen(
            [sys.executable, *arguments],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path)} | (env or {}),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def finish(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Wait for what `start` started in `folder`.

    Raises:
        SystemExit: It failed or took longer than `TIMEOUT_S`; with the end of what it printed.
    """
    try:
        code: int | str = process.wait(TIMEOUT_S)
    except BaseException as exc:
        os.killpg(process.pid, signal.SIGTERM)
        if not isinstance(exc, subprocess.TimeoutExpired):
            raise
        code = f"no end after {TIMEOUT_S:g} s"
    if code != 0:
        told = (folder / OUTPUT).read_text(encoding="utf-8", errors="replace")
        command = " ".join(map(str, process.args)) if isinstance(process.args, list) else ""
        sys.exit("\n".join([f"{command} failed ({code}):", *told.splitlines()[-20:]]))
