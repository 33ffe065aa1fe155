"""Memory, threads and time per turn of one lane over hundreds of turns: all of it should be flat.

Each trial trains a small network for a moment and reports what its process holds.
"""

from __future__ import annotations

import argparse
import json
from datetime import UTC, datetime
from statistics import linear_regression, median
from typing import TYPE_CHECKING, Any

import psutil
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.machine import PROJECT, facts
from benchmarks.timing import run_timed, scratch
from heats.tracking.ledger import read_sweep

if TYPE_CHECKING:
    from pathlib import Path

    from heats.record import TrialRecord

STUDY = "turns"
RESULTS = PROJECT / "benchmarks" / "results"
_MIB = 1024 * 1024
_SHOWN = {
    "memory, MiB": "rss_mib",
    "threads": "threads",
    "child processes": "children",
    "turn, ms": "turn_ms",
}


def train(config: dict[str, Any]) -> None:
    """Train a network of 80,000 weights for 20 steps, and report what this process holds.

    It is a recipe for `sweep.py`; `config` needs `lr`.
    """
    import ray.train

    layers = torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256)
    model = torch.nn.Sequential(*layers, torch.nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    loss = torch.zeros(())
    for _ in range(20):
        images, labels = torch.randn(128, 64), torch.randint(10, (128,))
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    process = psutil.Process()
    ray.train.report(
        {
            "loss": loss.item(),
            "rss_mib": process.memory_info().rss / _MIB,
            "threads": process.num_threads(),
            "children": len(process.children(recursive=True)),
        }
    )


def main(arguments: list[str]) -> None:
    """Run the turns, print them in tenths, and write every one to `benchmarks/results`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks turns", description=__doc__)
    parser.add_argument("--turns", type=int, default=500, help="turns of the lane")
    num_turns = parser.parse_args(arguments).turns
    console = Console()
    with scratch() as folder:
        run_timed(_command(num_turns), folder)
        turns = _turns(folder)
    if len(turns) < num_turns:
        console.print(f"Only {len(turns)} of {num_turns} trials are complete.")
        raise SystemExit(1)
    console.print(_table(turns))
    growth = {name: linear_regression(*_series(turns, key))[0] for name, key in _SHOWN.items()}
    told = ", ".join(f"{name} {100 * each:+.3f}" for name, each in growth.items())
    console.print(f"Slope over 100 turns, after the first tenth: {told}", highlight=False)
    path = RESULTS / f"turns-{datetime.now(UTC):%Y-%m-%d}.json"
    result = {
        "command": f"python -m benchmarks turns --turns {num_turns}",
        "machine": facts(),
        "slope_per_100_turns": {name: round(100 * each, 4) for name, each in growth.items()},
        "turns": turns,
    }
    path.write_text(json.dumps(result) + "\n", encoding="utf-8")
    console.print(f"Written to {path.relative_to(PROJECT)}", highlight=False)


def _command(num_turns: int) -> list[str]:
    return [
        str(PROJECT / "sweep.py"),
        "-m",
        "recipe._target_=benchmarks.turns.train",
        "objective.metric=loss",
        "objective.direction=minimize",
        "scheduler=none",
        "scaling.use_gpu=false",
        "lane.max_concurrent=1",
        f"study_name={STUDY}",
        "lr=tag(log,interval(1e-4,1e-1))",
        f"n_trials={num_turns}",
        "hydra/sweeper/sampler=random",
    ]


def _turns(folder: Path) -> list[dict[str, float]]:
    """What each complete trial reported, and how long its turn took, in order."""
    trials = read_sweep(folder / "mlruns" / "sweeps" / STUDY).trials
    return [_turn(trials[number]) for number in sorted(trials) if trials[number].value is not None]


def _turn(trial: TrialRecord) -> dict[str, float]:
    assert trial.last is not None  # noqa: S101 - it has a value
    held = {key: trial.last.metrics[key] for key in ("rss_mib", "threads", "children")}
    return {**held, "turn_ms": round(1000 * (trial.duration_s() or 0.0), 1)}


def _series(turns: list[dict[str, float]], key: str) -> tuple[list[float], list[float]]:
    first = len(turns) // 10  # Until then libraries are loaded and pools filled.
    return [float(index) for index in range(first, len(turns))], [t[key] for t in turns[first:]]


def _table(turns: list[dict[str, float]]) -> Table:
    table = Table(title="One lane, turn after turn (medians)", title_justify="left")
    table.add_column("turns")
    for name in _SHOWN:
        table.add_column(name, justify="right")
    tenth = max(1, len(turns) // 10)
    for first in range(0, len(turns), tenth):
        part = turns[first : first + tenth]
        values = (median(turn[key] for turn in part) for key in _SHOWN.values())
        table.add_row(f"{first + 1} to {first + len(part)}", *(f"{value:,.1f}" for value in values))
    return table
