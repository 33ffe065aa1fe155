"""Milliseconds per further trivial trial, and microseconds per report, beside plain Ray.

The cost of one more trial is the slope of whole-command time over the number of trials, so what a
start costs once does not count; the times between successive ends of trials say how it is spread.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.machine import PROJECT, facts
from benchmarks.timing import Run, Slope, Timed, run_timed, scratch, slope
from heats.tracking.ledger import read_sweep

if TYPE_CHECKING:
    from collections.abc import Sequence

STUDY = "overhead"
RESULTS = PROJECT / "benchmarks" / "results"
BUSY_CPU_SHARE = 0.1
"""Above this share of the CPUs in use by others, timings say more about them than about us."""


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to run the trials; `run(count, folder)` gives the timing and the trials' ends."""

    name: str
    label: str
    counts: list[int]
    run: Callable[[int, Path], tuple[Timed, list[float]]]


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure: numbers of trials (`cold` of the slow peer), of workers and of reports."""

    trials: list[int]
    workers: list[int]
    cold: list[int]
    repeats: int
    peers: bool
    lane_reports: int
    stock_reports: int


# --- one run ----------------------------------------------------------------------------------


def run_heats(num_workers: int) -> Callable[[int, Path], tuple[Timed, list[float]]]:
    """Runs a sweep of the shipped app: TPE, MLflow, system metrics, every trial to its end."""
    space = "lr=tag(log,interval(1e-4,1e-1))"

    def run(count: int, folder: Path) -> tuple[Timed, list[float]]:
        own = (space, f"n_trials={count}", f"scaling.num_workers={num_workers}")
        timed = run_timed(_sweep(*own), folder)
        trials = read_sweep(folder / "mlruns" / "sweeps" / STUDY).trials.values()
        return timed, sorted(trial.ended_s for trial in trials if trial.ended_s is not None)

    return run


def run_stock(program: str) -> Callable[[int, Path], tuple[Timed, list[float]]]:
    """Runs a program of `benchmarks.stock`."""

    def run(count: int, folder: Path) -> tuple[Timed, list[float]]:
        out = folder / "out.json"
        timed = run_timed(["-m", "benchmarks.stock", program, str(count), str(out)], folder)
        return timed, sorted(json.loads(out.read_text(encoding="utf-8")))

    return run


def lane_report_s(count: int, folder: Path) -> list[float]:
    """Seconds that each of `count` reports took in one trial in a lane."""
    out = folder / "out.json"
    extra = (f"+recipe.config.num_reports={count}", f"+recipe.config.out={out}")
    run_timed(_sweep(*extra), folder)
    seconds: list[float] = json.loads(out.read_text(encoding="utf-8"))
    return seconds


def _sweep(*arguments: str) -> list[str]:
    return [
        str(PROJECT / "sweep.py"),
        "-m",
        "recipe._target_=benchmarks.trivial.train",
        "objective.metric=loss",
        "objective.direction=minimize",
        "scheduler=none",
        "scaling.use_gpu=false",
        f"study_name={STUDY}",
        *arguments,
    ]


# --- measuring --------------------------------------------------------------------------------


def measure_trials(contenders: list[Contender], repeats: int, console: Console) -> list[Run]:
    """Every contender at each of its numbers of trials, taking turns, so that noise is shared."""
    runs = []
    for repeat in range(repeats):
        for step in range(max(len(each.counts) for each in contenders)):
            for contender in contenders:
                if step >= len(contender.counts):
                    continue
                count = contender.counts[step]
                with scratch() as folder:
                    timed, ends = contender.run(count, folder)
                if len(ends) != count:
                    msg = f"{contender.label}: {len(ends)} of {count} trials ended."
                    raise SystemExit(msg)
                run = Run(
                    contender=contender.name,
                    repeat=repeat,
                    num_trials=count,
                    wall_s=timed.wall_s,
                    ends_s=[round(end - timed.began_s, 4) for end in ends],
                    load=timed.load,
                    others_cpu=timed.others_cpu,
                )
                runs.append(run)
                console.print(
                    f"{contender.label}, {count} trials: {run.wall_s:.1f} s, the first done after "
                    f"{run.ends_s[0]:.1f} s (before: load {run.load:.1f}, others used "
                    f"{run.others_cpu:.0%} of the CPUs)",
                    highlight=False,
                )
    return runs


def measure_reports(options: Options, console: Console) -> dict[str, list[float]]:
    """Seconds of each report to the training loop, by place."""
    measured: dict[str, list[float]] = {}
    with scratch() as folder:
        measured["heats"] = lane_report_s(options.lane_reports, folder)
    if options.peers:
        with scratch() as folder:
            _, measured["train"] = run_stock("reports")(options.stock_reports, folder)
    for name, seconds in measured.items():
        console.print(f"{name}: {len(seconds)} reports timed", highlight=False)
    return measured


def slopes_of(runs: list[Run]) -> dict[str, dict[str, Slope]]:
    """For each contender the slope of the whole command, and of the time between trials' ends."""
    result: dict[str, dict[str, Slope]] = {}
    for name in dict.fromkeys(run.contender for run in runs):
        own = [run for run in runs if run.contender == name]
        result[name] = {
            "wall": slope([(r.repeat, r.num_trials, r.wall_s) for r in own]),
            "ends": slope([(r.repeat, r.num_trials, r.ends_s[-1] - r.ends_s[0]) for r in own]),
        }
    return result


# --- showing ----------------------------------------------------------------------------------


def gaps_of(runs: list[Run]) -> dict[str, list[float]]:
    """Seconds between successive ends of trials, in each contender's runs with most trials."""
    result: dict[str, list[float]] = {}
    for name in dict.fromkeys(run.contender for run in runs):
        own = [run for run in runs if run.contender == name]
        most = max(run.num_trials for run in own)
        result[name] = [gap for run in own if run.num_trials == most for gap in run.gaps_s]
    return result


def trials_table(contenders: list[Contender], runs: list[Run]) -> Table:
    """What one more trial costs, and what the first one waits for."""
    slopes, gaps = slopes_of(runs), gaps_of(runs)
    table = Table(
        title="One more trial of 5 reports, no training, in ms",
        title_justify="left",
        caption="whole command: slope of its time over the number of trials. between ends: from one"
        " trial's end to the next one's, whichever lane it ran in, in the runs with most trials.",
        caption_justify="left",
    )
    table.add_column("")
    for column in ("whole command", "spread", "between ends: median", "p99", "x heats", "first, s"):
        table.add_column(column, justify="right")
    for contender in contenders:
        wall, own_gaps = slopes[contender.name]["wall"], gaps[contender.name]
        starts = [run.ends_s[0] for run in runs if run.contender == contender.name]
        ratio = wall.fitted / slopes[contenders[0].name]["wall"].fitted
        table.add_row(
            f"{contender.label}\n({', '.join(map(str, contender.counts))} trials)",
            f"{1e3 * wall.fitted:,.1f}",
            f"{1e3 * wall.low:,.1f} to {1e3 * wall.high:,.1f}"
            if wall.low < wall.high
            else "one pair",
            f"{1e3 * median(own_gaps):,.1f}",
            f"{1e3 * _p99(own_gaps):,.1f}",
            f"{ratio:,.1f}",
            f"{median(starts):.1f} ({min(starts):.1f} to {max(starts):.1f})",
        )
    return table


def reports_table(measured: dict[str, list[float]]) -> Table:
    """What a report costs the training loop."""
    labels = {"heats": "heats lane", "train": "TorchTrainer"}
    table = Table(title="ray.train.report({'loss': x}), back to back", title_justify="left")
    table.add_column("")
    for column in ("reports", "median, us", "p99, us", "largest, us"):
        table.add_column(column, justify="right")
    for name, seconds in measured.items():
        values = (median(seconds), _p99(seconds), max(seconds))
        cells = (f"{1e6 * value:,.0f}" for value in values)
        table.add_row(labels[name], str(len(seconds)), *cells)
    return table


def _p99(seconds: Sequence[float]) -> float:
    return float(np.percentile(seconds, 99))


def _spread_note(repeats: int) -> str:
    if repeats > 1:
        return f"Spread: smallest and largest of {repeats} repeats, each with its own fit."
    return "One repeat. Spread: slopes between neighbouring numbers of trials."


# --- the command ------------------------------------------------------------------------------


def main(arguments: list[str]) -> None:
    """Measure, show two tables, and write a file to `benchmarks/results/`."""
    options, is_quick = _options(arguments)
    console = Console(width=None if sys.stdout.isatty() else 120)
    contenders = [
        Contender(
            "heats" if num_workers == 1 else f"heats-{num_workers}",
            f"heats, {num_workers} worker{'s' * (num_workers > 1)} a trial",
            options.trials,
            run_heats(num_workers),
        )
        for num_workers in options.workers
    ]
    if options.peers:
        contenders += [
            Contender(
                "reused", "Tune function, actors reused", options.trials, run_stock("reused")
            ),
            Contender("cold", "Tune + TorchTrainer", options.cold, run_stock("cold")),
        ]
    runs = measure_trials(contenders, options.repeats, console)
    reports = measure_reports(options, console)

    machine = facts()
    others, loads = [run.others_cpu for run in runs], [run.load for run in runs]
    console.print(trials_table(contenders, runs))
    console.print(reports_table(reports))
    console.print(
        f"{_spread_note(options.repeats)} {machine['cpus']} CPUs ({machine['cpu']}), so "
        f"{machine['cpus']} trials of one worker at once. Before the runs the load was "
        f"{min(loads):.1f} to {max(loads):.1f} and others used {mean(others):.0%} of the CPUs.",
        highlight=False,
    )
    if mean(others) > BUSY_CPU_SHARE:
        console.print("The machine was busy: do not quote this, run it again on an idle one.")
    if is_quick:
        console.print("Quick: too few trials to quote, so no file was written.")
        return
    now = datetime.now(UTC)
    path = RESULTS / f"overhead-{now.date()}.json"
    path.parent.mkdir(exist_ok=True)
    result = {
        "benchmark": "overhead",
        "time": now.isoformat(timespec="seconds"),
        "command": " ".join(["python -m benchmarks overhead", *arguments]),
        "machine": machine,
        "is_busy": mean(others) > BUSY_CPU_SHARE,
        "slopes": {
            name: {kind: dataclasses.asdict(each) for kind, each in own.items()}
            for name, own in slopes_of(runs).items()
        },
        "gap_ms": {
            name: {
                "count": len(gaps),
                "median": round(1e3 * median(gaps), 2),
                "p99": round(1e3 * _p99(gaps), 2),
                "largest": round(1e3 * max(gaps), 2),
            }
            for name, gaps in gaps_of(runs).items()
        },
        "report_us": {
            name: {
                "count": len(seconds),
                "median": round(1e6 * median(seconds), 1),
                "p99": round(1e6 * _p99(seconds), 1),
                "largest": round(1e6 * max(seconds), 1),
            }
            for name, seconds in reports.items()
        },
        "runs": [dataclasses.asdict(run) for run in runs],
        "report_s": {name: [round(s, 7) for s in seconds] for name, seconds in reports.items()},
    }
    path.write_text(_to_json(result), encoding="utf-8")
    console.print(f"Written to {path.relative_to(PROJECT)}", highlight=False)


def _to_json(result: dict[str, Any]) -> str:
    """JSON with each run, and each long list of reports, on one line."""
    runs, reports = result.pop("runs"), result.pop("report_s")
    text = json.dumps(result, indent=2)
    run_lines = ",\n".join(f"    {json.dumps(run)}" for run in runs)
    lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(s)}" for name, s in reports.items())
    parts = [text[:-2], f'  "runs": [\n{run_lines}\n  ]', f'  "report_s": {{\n{lines}\n  }}']
    return ",\n".join(parts) + "\n}\n"


def _options(arguments: list[str]) -> tuple[Options, bool]:
    parser = argparse.ArgumentParser("python -m benchmarks overhead", description=__doc__)
    counts: dict[str, Any] = {"type": _counts, "metavar": "N,N,..."}
    parser.add_argument("--trials", **counts, help="numbers of trials (default: 10,40,160,640)")
    parser.add_argument(
        "--workers", type=_workers, metavar="N,...", help="workers of a trial (default: 1,2)"
    )
    parser.add_argument("--cold-trials", **counts, help="same for Tune + TorchTrainer (2,6)")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each (default: 1)")
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--quick", action="store_true", help="a minute or two, nothing written")
    told = parser.parse_args(arguments)
    is_quick: bool = told.quick
    options = Options(
        trials=told.trials or ([4, 12] if is_quick else [10, 40, 160, 640]),
        workers=told.workers or ([1] if is_quick else [1, 2]),
        cold=told.cold_trials or ([1, 3] if is_quick else [2, 6]),
        repeats=max(1, told.repeats),
        peers=told.peers,
        lane_reports=200 if is_quick else 2000,
        stock_reports=3 if is_quick else 10,
    )
    return options, is_quick


def _counts(text: str) -> list[int]:
    """Two or more different numbers of trials, smallest first."""
    try:
        counts = sorted({int(each) for each in text.split(",")})
    except ValueError:
        counts = []
    if len(counts) < 2 or counts[0] < 1:
        msg = f"{text!r} is not two or more different numbers, such as 10,40"
        raise argparse.ArgumentTypeError(msg)
    return counts


def _workers(text: str) -> list[int]:
    """Different numbers of workers, smallest first."""
    try:
        numbers = sorted({int(each) for each in text.split(",")})
    except ValueError:
        numbers = []
    if not numbers or numbers[0] < 1:
        msg = f"{text!r} is not one or more numbers, such as 1,2"
        raise argparse.ArgumentTypeError(msg)
    return numbers
