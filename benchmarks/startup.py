"""Seconds from Enter to the first report of the first trial, beside plain Ray.

Each run is a command of its own with as many trivial trials as there are CPUs, in a new folder; in
that of the sweep before with `heats up`. The contenders take turns. The trial itself notes when it
comes to its first report.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.machine import PROJECT, facts, load_average, num_cpus, others_cpu_share
from benchmarks.timing import finish, scratch, start

HEATS = str(Path(sys.executable).with_name("heats"))
RESULTS = PROJECT / "benchmarks" / "results"
REST_S = 12.0
"""Between two runs: `heats up` loads another driver after each of its own."""

Command = Callable[[Path], list[str]]


def of_heats(folder: Path) -> list[str]:
    """A sweep of the shipped app, MLflow and system metrics on."""
    return [
        str(PROJECT / "sweep.py"),
        "-m",
        "recipe._target_=benchmarks.trivial.train",
        f"+recipe.config.first={folder / 'first'}",
        "objective.metric=loss",
        "objective.direction=minimize",
        "scheduler=none",
        "scaling.use_gpu=false",
        f"n_trials={num_cpus()}",
        "lr=tag(log,interval(1e-4,1e-1))",
    ]


def of_stock(program: str) -> Command:
    """A program of `benchmarks.stock`."""

    def command(folder: Path) -> list[str]:
        own = [program, str(num_cpus()), str(folder / "out.json"), str(folder / "first")]
        return ["-m", "benchmarks.stock", *own]

    return command


def first_report_s(command: Command, folder: Path, env: dict[str, str]) -> float:
    """Seconds until the first report of a program that runs in a folder."""
    began_s = time.time()
    first = folder / "first"
    first.unlink(missing_ok=True)
    finish(start(command(folder), folder, env), folder)
    return float(first.read_text()) - began_s


@contextmanager
def heats_up() -> Iterator[tuple[Path, dict[str, str]]]:
    """Folder and environment of a shell in which `heats up` was typed, and one sweep was run."""
    folder = tempfile.mkdtemp(prefix="hb-")  # Sockets are in it, whose paths must be short.
    env = {"TMPDIR": folder}
    with scratch() as own:
        try:
            finish(start([HEATS, "up"], own, env), own)
            first_report_s(of_heats, own, env)
            yield own, env
        finally:
            finish(start([HEATS, "down", "--force"], own, env), own)
            shutil.rmtree(folder, ignore_errors=True)


def main(arguments: list[str]) -> None:
    """Measure, show a table, and write a file to `benchmarks/results/`."""
    parser = argparse.ArgumentParser("python -m benchmarks startup", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="runs of each (5)")
    repeats = max(1, parser.parse_args(arguments).repeats)
    console = Console(width=None if sys.stdout.isatty() else 120)
    programs: dict[str, tuple[str, Command]] = {
        "up": ("heats, after `heats up` and a sweep", of_heats),
        "heats": ("heats", of_heats),
        "reused": ("Tune functions", of_stock("reused")),
        "cold": ("Tune + TorchTrainer", of_stock("cold")),
    }
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    others: list[float] = []
    with heats_up() as (own, env):
        for _ in range(repeats):
            for name, (label, command) in programs.items():
                time.sleep(REST_S)
                load, busy = load_average(), others_cpu_share()
                others.append(busy)
                with scratch() as folder:
                    here = (own, env) if name == "up" else (folder, {})
                    took_s = first_report_s(command, *here)
                seconds[name].append(took_s)
                console.print(f"{label}: {took_s:.2f} s (load {load:.1f})", highlight=False)
    table = Table(title="Enter to first report, in s", title_justify="left")
    for column in ("", "median", "lowest", "highest"):
        table.add_column(column, justify="right" if column else "left")
    for name, (label, _) in programs.items():
        each = seconds[name]
        table.add_row(label, *(f"{value:.2f}" for value in (median(each), min(each), max(each))))
    console.print(table)
    machine = facts()
    now = datetime.now(UTC)
    result = {
        "benchmark": "startup",
        "time": now.isoformat(timespec="seconds"),
        "command": " ".join(["python -m benchmarks startup", *arguments]),
        "machine": machine,
        "others_cpu": others,
        "first_report_s": seconds,
    }
    path = RESULTS / f"startup-{now.date()}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    console.print(f"Written to {path.relative_to(PROJECT)}", highlight=False)
