"""Faults at random moments: how soon each is seen, what it costs its trial, and what the others.

Each row is a sweep of trials of which every second is hit once. All numbers come from the ledger
and from what the trials themselves wrote down.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean, median
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.faulty import FILL_MIB, LEAK_MIB
from benchmarks.injections import (
    History,
    Injection,
    Other,
    injection,
    other,
    read_history,
    read_times,
    repeated,
    trial_problems,
)
from benchmarks.machine import PROJECT, facts, load_average, others_cpu_share
from benchmarks.timing import finish, scratch, start
from heats.lane.worker import log_path, retirement
from heats.trial import Fault, TrialState

STUDY = "faults"
RESULTS = PROJECT / "benchmarks" / "results"
BUSY_CPU_SHARE = 0.1
DRIVER_TRIALS = 4
_GONE_S = 30.0
"""How long processes have to be gone after their sweep, in seconds."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    `fault` is what an attempt is to be lost to, `act` a key of `benchmarks.faulty`'s faults, and
    `measure` tells from a sweep's history and its folder what the hit trials and the others did.
    """

    label: str
    fault: Fault
    act: str | None
    options: tuple[str, ...] = ()
    program: Path = PROJECT / "sweep.py"
    num_more_trials: int = 0
    env: Callable[[int], dict[str, str]] = lambda _: {}
    measure: Callable[[Row, History, Path], list[Injection]] | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """What a row's injections led to; `left`: processes that were there after the sweep."""

    injections: list[Injection]
    others: list[Other]
    left: int
    wall_s: float
    problems: list[str] = field(default_factory=list)


# --- rows -------------------------------------------------------------------------------------


def _hits(row: Row, history: History, folder: Path) -> list[Injection]:
    """Each trial that was hit knows when."""
    times = read_times(folder / "hits")
    return [injection(history, number, hit_s, row.fault) for number, hit_s in times.items()]


def _late_starts(row: Row, history: History, folder: Path) -> list[Injection]:
    """A lane that does not start does not know its trial: losses follow in the order of starts."""
    lost = [each for each in history.lost if each.fault is row.fault]
    found = []
    for hit_s, loss in zip(sorted(read_times(folder / "starts").values()), lost, strict=False):
        later = (each for each in history.epochs[loss.trial] if each.time_s > loss.time_s)
        back_s = next((each.time_s - hit_s for each in later), None)
        problems = trial_problems(history.record.trials[loss.trial])
        found.append(Injection(loss.trial, loss.time_s - hit_s, back_s, 0, problems))
    return found


def _retirements(row: Row, history: History, folder: Path) -> list[Injection]:
    """The trial's log tells that its lane was replaced after it, for which it does not pay."""
    found = []
    for number, hit_s in read_times(folder / "hits").items():
        log = log_path(str(_sweep_dir(folder) / str(number)), 0)
        problems = other(history, number).problems
        reason = retirement(log)
        if reason is None:
            problems.append(f"after trial {number} its lane was kept")
        detected_s = None if reason is None else log.stat().st_mtime - hit_s
        found.append(Injection(number, detected_s, None, 0, problems))
    return found


def _memory_threshold(_: int) -> dict[str, str]:
    """Ray may use so much more than is in use now, and half of what `fill_memory` takes."""
    memory = psutil.virtual_memory()
    used = memory.total - memory.available + FILL_MIB * 2**19
    return {
        "RAY_memory_usage_threshold": f"{used / memory.total:.4f}",
        "RAY_memory_monitor_refresh_ms": "100",
    }


_ONE = ("cluster.num_cpus=2",)
_TWO = ("cluster.num_cpus=4", "scaling.num_workers=2")
_AGAIN = ("lane.max_failures=1",)
_SOON = ("lane.hang_timeout_s=10",)

ROWS = {
    "raise": Row("exception", Fault.error, "raise", (*_ONE, *_AGAIN)),
    "exit": Row("SystemExit", Fault.error, "exit", (*_ONE, *_AGAIN)),
    "interrupt": Row("KeyboardInterrupt in a worker", Fault.interrupted, "interrupt", _ONE),
    "memory_error": Row("MemoryError", Fault.out_of_memory, "memory_error", (*_ONE, *_AGAIN)),
    "kill": Row("kill -9 of a lone rank", Fault.rank_died, "kill", _ONE),
    "kill_one": Row("kill -9 of one rank of 2", Fault.rank_died, "kill", _TWO),
    "kill_lane": Row("kill -9 of a lane's process", Fault.lane_died, "kill_lane", _ONE),
    "terminate": Row(
        "SIGTERM of a rank", Fault.preempted, "terminate", (*_ONE, "lane.max_retries=0")
    ),
    "hang": Row("hang in a step (10 s allowed)", Fault.hang, "hang", (*_ONE, *_SOON)),
    "hang_one": Row("one of 2 in a collective (10 s)", Fault.hang, "hang", (*_TWO, *_SOON)),
    "uneven": Row(
        "2 ranks report unevenly (30 s)", Fault.uneven_reports, "uneven", (*_TWO, *_AGAIN)
    ),
    "oom": Row(
        "Ray's memory monitor", Fault.oom_killed, "fill_memory", _ONE, env=_memory_threshold
    ),
    "late": Row(
        "hang while the program loads (15 s)",
        Fault.start_timeout,
        None,
        # Fresh workers for each trial: so there are starts enough. One may be late several times.
        (*_ONE, "lane.isolation=process", "lane.start_timeout_s=15", "lane.max_retries=9"),
        program=PROJECT / "benchmarks" / "faulty.py",
        env=lambda repeats: {"HEATS_BENCH_HANGS": str(repeats)},
        measure=_late_starts,
    ),
    "leak": Row(
        f"a trial leaves {LEAK_MIB} MiB behind",
        Fault.retired,
        "leak",
        (*_ONE, f"lane.max_memory_growth_mib={LEAK_MIB // 2}"),
        num_more_trials=1,  # A lane's first turn is never hit, its second always: one is left over.
        measure=_retirements,
    ),
}
DRIVER = "driver"


# --- one row ----------------------------------------------------------------------------------


def run_row(row: Row, repeats: int, seed: int) -> Result:
    """One sweep, with so many faults."""
    with scratch() as folder:
        began_s = time.perf_counter()
        options = [*row.options, f"n_trials={2 * repeats + row.num_more_trials}"]
        if row.act is not None:
            options.append(f"+recipe.config.fault={row.act}")
        process = start(_sweep(row.program, folder, seed, options), folder, row.env(repeats))
        problems = _failure(process, folder)
        left = _processes_left(folder)
        history = read_history(_sweep_dir(folder), folder)
        found = (row.measure or _hits)(row, history, folder)
        wall_s = time.perf_counter() - began_s
    hit = {each.trial for each in found}
    others = [other(history, number) for number in history.record.trials if number not in hit]
    return Result(found, others, left, wall_s, problems)


def _sweep(program: Path, folder: Path, seed: int, options: list[str]) -> list[str]:
    return [
        str(program),
        "-m",
        "recipe._target_=benchmarks.faulty.train",
        "objective.metric=loss",
        "objective.direction=minimize",
        "scheduler=none",
        "scaling.use_gpu=false",
        "hydra/sweeper/sampler=random",
        "lane.max_concurrent=2",
        "stop.max_failures=null",
        f"study_name={STUDY}",
        "lr=interval(0.1,1)",
        f"seed={seed}",
        f"+recipe.config.folder={folder}",
        *options,
    ]


def _sweep_dir(folder: Path) -> Path:
    return folder / "mlruns" / "sweeps" / STUDY


def _failure(process: Any, folder: Path) -> list[str]:
    try:
        finish(process, folder)
    except SystemExit as exc:
        return str(exc).splitlines()
    return []


def _processes(folder: Path) -> list[psutil.Process]:
    """Everything that runs in the sweep's folder, as its driver, Ray, and all workers do."""
    found = []
    for process in psutil.process_iter():
        try:
            if Path(process.cwd()).is_relative_to(folder):
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def _processes_left(folder: Path) -> int:
    """How many processes of a sweep outlive it; they are ended then."""
    until = time.monotonic() + _GONE_S
    while (left := _processes(folder)) and time.monotonic() < until:
        time.sleep(0.2)
    for process in left:
        process.kill()
    return len(left)


# --- the driver -------------------------------------------------------------------------------


def run_driver_kills(repeats: int, seed: int) -> Result:
    """`kill -9` of the driver at a random moment of a small sweep, then `heats resume`."""
    began_s = time.perf_counter()
    chance = random.Random(seed)
    with scratch() as folder:
        finish(start(_driver_sweep(folder, seed), folder), folder)
        reference = read_history(_sweep_dir(folder), folder)
    ends = [trial.ended_s or 0.0 for trial in reference.record.trials.values()]
    span_s = max(ends) - min(each[0].time_s for each in reference.epochs.values())
    found, left = [], 0
    for _ in range(repeats):
        with scratch() as folder:
            each, orphans = _kill_driver(folder, seed, chance.uniform(0, span_s), reference)
        found.append(each)
        left += orphans
    return Result(found, [], left, time.perf_counter() - began_s)


def _driver_sweep(folder: Path, seed: int) -> list[str]:
    return _sweep(PROJECT / "sweep.py", folder, seed, [*_ONE, f"n_trials={DRIVER_TRIALS}"])


def _kill_driver(
    folder: Path, seed: int, after_s: float, reference: History
) -> tuple[Injection, int]:
    driver = start(_driver_sweep(folder, seed), folder)
    while not any((folder / "epochs").glob("*")) and driver.poll() is None:
        time.sleep(0.05)
    time.sleep(after_s)
    driver.send_signal(signal.SIGKILL)
    problems = [] if driver.wait() == -signal.SIGKILL else ["the sweep ended before its driver"]
    left = _processes_left(folder)
    before = read_history(_sweep_dir(folder), folder)
    resumed_s = time.time()
    problems += _failure(
        start(["-c", "from heats.cli import main; main()", "resume", STUDY], folder), folder
    )
    left += _processes_left(folder)
    after = read_history(_sweep_dir(folder), folder)
    problems += [each for trial in after.record.trials.values() for each in trial_problems(trial)]
    problems += _differences(before, after, reference)
    if (num_runs := _num_runs(folder)) != DRIVER_TRIALS + 1:
        problems.append(f"MLflow has {num_runs} runs, not {DRIVER_TRIALS + 1}")
    known = {(number, e.number) for number, each in before.epochs.items() for e in each}
    new = (
        epoch.time_s
        for number, epochs in after.epochs.items()
        for epoch in epochs
        if (number, epoch.number) not in known
    )
    back_s = min(new, default=None)
    return Injection(
        trial=None,
        detected_s=None,
        back_s=None if back_s is None else back_s - resumed_s,
        repeated=max(repeated(epochs) for epochs in after.epochs.values()),
        problems=problems,
    ), left


def _differences(before: History, after: History, reference: History) -> list[str]:
    """How the resumed sweep is not what it would have been without its driver's death."""
    problems = []
    if _answer(after) != _answer(reference):
        problems.append("the resumed sweep has another answer than an undisturbed one")
    for number, trial in before.record.trials.items():
        is_done = trial.state is not TrialState.RUNNING
        if is_done and len(after.epochs[number]) != len(before.epochs[number]):
            problems.append(f"trial {number} was complete and ran again")
    return problems


def _answer(history: History) -> dict[int, tuple[TrialState, float | None, dict[str, Any]]]:
    trials = history.record.trials
    return {n: (each.state, each.value, each.params) for n, each in trials.items()}


def _num_runs(folder: Path) -> int:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder / 'mlruns' / 'mlflow.db'}")
    experiments = [each.experiment_id for each in client.search_experiments()]
    return len(client.search_runs(experiments))


# --- showing ----------------------------------------------------------------------------------


def table(results: dict[str, Result]) -> Table:
    """One row for each fault."""
    shown = Table(title="Faults at random moments; seconds since each", title_justify="left")
    shown.add_column("")
    for column in (
        "faults",
        "seen\nmedian / max",
        "at work again\nmedian / max",
        "epochs\nrepeated",
        "others\ndelayed, max",
        "as\nexpected",
        "others as\nexpected",
        "processes\nleft",
    ):
        shown.add_column(column, justify="right")
    for name, result in results.items():
        found, others = result.injections, result.others
        shown.add_row(
            label(name),
            str(len(found)),
            _median_and_max([each.detected_s for each in found]),
            _median_and_max([each.back_s for each in found]),
            str(max((each.repeated for each in found), default=0)),
            f"{max(each.delay_s for each in others):.2f}" if others else "-",
            f"{sum(not each.problems for each in found)}/{len(found)}",
            f"{sum(not each.problems for each in others)}/{len(others)}" if others else "-",
            str(result.left),
        )
    return shown


def label(name: str) -> str:
    """What a row is called in the table."""
    return "kill -9 of the driver, heats resume" if name == DRIVER else ROWS[name].label


def problems(results: dict[str, Result]) -> list[str]:
    """Everything that was not as expected, with its row."""
    found = []
    for name, result in results.items():
        told = [result.problems, *(each.problems for each in result.injections)]
        told += [each.problems for each in result.others]
        found += [f"{label(name)}: {problem}" for each in told for problem in each]
    return found


def _median_and_max(seconds: list[float | None]) -> str:
    known = [each for each in seconds if each is not None]
    return f"{median(known):.1f} / {max(known):.1f}" if known else "-"


# --- the command ------------------------------------------------------------------------------


def main(arguments: list[str]) -> None:
    """Run the rows one after the other, print the table, and write all of it to a file."""
    names, repeats, seed = _options(arguments)
    console = Console(width=None if sys.stdout.isatty() else 140)
    results: dict[str, Result] = {}
    loads, busy = [], []
    for name in names:
        loads.append(load_average())
        busy.append(others_cpu_share())
        if name == DRIVER:
            results[name] = run_driver_kills(repeats, seed)
        else:
            results[name] = run_row(ROWS[name], repeats, seed)
        missing = repeats - len(results[name].injections)
        if missing:
            results[name].problems.append(f"{missing} of {repeats} faults did not happen")
        console.print(
            f"{label(name)}: {results[name].wall_s:.0f} s (before: load {loads[-1]:.1f}, others "
            f"used {busy[-1]:.0%} of the CPUs)",
            highlight=False,
        )
    console.print(table(results))
    for problem in problems(results):
        console.print(problem, highlight=False, markup=False)
    is_busy = mean(busy) > BUSY_CPU_SHARE
    if is_busy:
        console.print("The machine was busy: do not quote this, run it again on an idle one.")
    if len(names) <= len(ROWS) or repeats < 10:
        console.print("Not the whole table, so no file was written.")
        return
    now = datetime.now(UTC)
    path = RESULTS / f"faults-{now.date()}.json"
    path.parent.mkdir(exist_ok=True)
    result = {
        "benchmark": "faults",
        "time": now.isoformat(timespec="seconds"),
        "command": " ".join(["python -m benchmarks faults", *arguments]),
        "machine": facts(),
        "is_busy": is_busy,
        "rows": {
            name: {"label": label(name), **dataclasses.asdict(each)}
            for name, each in results.items()
        },
    }
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    console.print(f"Written to {path.relative_to(PROJECT)}", highlight=False)


def _options(arguments: list[str]) -> tuple[list[str], int, int]:
    parser = argparse.ArgumentParser("python -m benchmarks faults", description=__doc__)
    known = [*ROWS, DRIVER]
    parser.add_argument(
        "--rows", nargs="+", choices=known, default=known, metavar="ROW", help=", ".join(known)
    )
    parser.add_argument("--repeats", type=int, default=10, help="faults of each row (10)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (0)")
    told = parser.parse_args(arguments)
    return told.rows, max(1, told.repeats), told.seed
