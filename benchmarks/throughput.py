"""Samples per second of a fixed model in a lane, beside the bare loop under torchrun.

The same loop with the same model, data and number of ranks runs in both, each time in a new
process, taking turns; in the lane it reports to heats once a second, with MLflow and system metrics
on.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from benchmarks.machine import PROJECT, facts
from benchmarks.timing import run_timed, scratch

if TYPE_CHECKING:
    from collections.abc import Callable

RESULTS = PROJECT / "benchmarks" / "results"
WARM_UP_S = 3.0
_BATCH, _LENGTH, _TOKENS, _WIDTH = 8, 64, 512, 128


def train_loop(seconds: float, report: Callable[[float], None]) -> float:
    """Train a small transformer on every rank; samples per second of all ranks together.

    Args:
        seconds: How long to measure, after `WARM_UP_S`.
        report: Called with the loss about once a second, on every rank.
    """
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    layer = torch.nn.TransformerEncoderLayer(_WIDTH, 4, 4 * _WIDTH, batch_first=True)
    network = torch.nn.Sequential(
        torch.nn.Embedding(_TOKENS, _WIDTH),
        torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False),
        torch.nn.Linear(_WIDTH, _TOKENS),
    ).to(device)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, _TOKENS, (_BATCH, _LENGTH + 1), device=device)
    steps_between = _steps_in_a_second(model, optimizer, tokens)
    began, first_step = 0.0, 0
    for step in count():
        loss = _step(model, optimizer, tokens)
        if step % steps_between == 0:
            report(float(loss))
            if began == 0.0 and step >= WARM_UP_S * steps_between:
                began, first_step = time.perf_counter(), step
            if began and step - first_step >= seconds * steps_between:
                break
    num_samples = (step - first_step) * _BATCH * dist.get_world_size()
    return num_samples / (time.perf_counter() - began)


def _steps_in_a_second(model: Any, optimizer: Any, tokens: torch.Tensor) -> int:
    for _ in range(3):
        _step(model, optimizer, tokens)
    began = time.perf_counter()
    for _ in range(5):
        _step(model, optimizer, tokens)
    steps = torch.tensor(max(1, round(5 / (time.perf_counter() - began))), device=tokens.device)
    dist.broadcast(steps, 0)  # Rank 0 counts for all: they report equally often.
    return int(steps)


def _step(model: Any, optimizer: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss


def train(config: dict[str, Any]) -> None:
    """The loop as a trial: `seconds` to measure, `out` takes samples per second."""
    import ray.train

    speed = train_loop(config["seconds"], lambda loss: ray.train.report({"loss": loss}))
    if ray.train.get_context().get_world_rank() == 0:
        Path(config["out"]).write_text(json.dumps(speed), encoding="utf-8")


def bare(seconds: float, out: str) -> None:
    """The loop under torchrun."""
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)  # As a lane's worker with one CPU has it.
    speed = train_loop(seconds, lambda loss: None)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(speed), encoding="utf-8")
    dist.destroy_process_group()


# --- the command ------------------------------------------------------------------------------


def main(arguments: list[str]) -> None:
    """Run both in turns, print the ratio, and write the numbers to `benchmarks/results`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks throughput", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="runs of each")
    parser.add_argument("--seconds", type=float, default=20.0, help="measured time of a run")
    parser.add_argument("--ranks", type=int, default=2, help="workers, one CPU or GPU each")
    options = parser.parse_args(arguments)
    compare(
        "throughput",
        "samples",
        arguments,
        options.repeats,
        options.ranks,
        lambda name, out: _command(name, options, out),
    )


def compare(
    benchmark: str,
    unit: str,
    arguments: list[str],
    repeats: int,
    ranks: int,
    command: Callable[[str, Path], list[str]],
    facts_of: Callable[[dict[str, list[float]]], dict[str, Any]] = lambda speeds: {},
) -> None:
    """Run a loop bare and in a lane, in turns; print the ratio and write it to `RESULTS`.

    Args:
        benchmark: Name of the benchmark.
        unit: What is counted in a second.
        arguments: Of the command line.
        repeats: Runs of each.
        ranks: Workers of a run.
        command: The Python program that runs `bare` or `lane` and writes its speed to a file.
        facts_of: What else to write, from the speeds.
    """
    console = Console()
    speeds: dict[str, list[float]] = {"bare": [], "lane": []}
    for repeat in range(repeats):
        # The first of a pair has the cooler machine: they change places.
        order = list(speeds) if repeat % 2 == 0 else list(reversed(speeds))
        for name in order:
            with scratch() as folder:
                out = folder / "speed.json"
                run_timed(command(name, out), folder)
                speeds[name].append(float(json.loads(out.read_text(encoding="utf-8"))))
            console.print(f"{name}: {speeds[name][-1]:,.1f} {unit}/s", highlight=False)
    ratios = [lane / bare for lane, bare in zip(speeds["lane"], speeds["bare"], strict=True)]
    title = f"{ranks} rank{'s' * (ranks > 1)}, {unit} per second"
    table = Table(title=title, title_justify="left")
    for column in ("", "median", "lowest", "highest"):
        table.add_column(column, justify="right" if column else "left")
    for name, values in (*speeds.items(), ("lane / bare", ratios)):
        table.add_row(
            name, *(f"{each:,.3f}" for each in (median(values), min(values), max(values)))
        )
    console.print(table)
    path = RESULTS / f"{benchmark}-{datetime.now(UTC):%Y-%m-%d}.json"
    result = {
        "command": " ".join([f"python -m benchmarks {benchmark}", *arguments]),
        "machine": facts(),
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        f"{unit}_per_s": speeds,
        "ratio": {"median": median(ratios), "all": ratios},
        **facts_of(speeds),
    }
    path.write_text(json.dumps(result) + "\n", encoding="utf-8")
    console.print(f"Written to {path.relative_to(PROJECT)}", highlight=False)


def torchrun(ranks: int, call: str) -> list[str]:
    """Arguments of Python that run a statement on so many ranks."""
    runner = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    return [*runner, "--no-python", sys.executable, "-c", call]


def _command(name: str, options: argparse.Namespace, out: Path) -> list[str]:
    if name == "bare":
        call = f"from benchmarks.throughput import bare; bare({options.seconds}, {str(out)!r})"
        return torchrun(options.ranks, call)
    return [
        str(PROJECT / "sweep.py"),
        "recipe._target_=benchmarks.throughput.train",
        f"+recipe.config.seconds={options.seconds}",
        f"+recipe.config.out={out}",
        "objective.metric=loss",
        "objective.direction=minimize",
        "scheduler=none",
        f"scaling.num_workers={options.ranks}",
        "study_name=throughput",
        *(() if torch.cuda.is_available() else ("scaling.resources_per_worker={CPU:1}",)),
    ]
