"""The rows of the fault table, each a sweep over `benchmarks.faulty`."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from benchmarks.faulty import FILL_MIB, LEAK_MIB
from benchmarks.injections import (
    History,
    Injection,
    Other,
    injection,
    other,
    read_history,
    read_times,
    trial_problems,
)
from benchmarks.machine import PROJECT
from benchmarks.timing import finish, scratch, start
from heats.lane.worker import log_path, retirement
from heats.trial import Fault

if TYPE_CHECKING:
    from subprocess import Popen

STUDY = "faults"
ONE_WORKER = ("cluster.num_cpus=2",)
_TWO_WORKERS = ("cluster.num_cpus=4", "scaling.num_workers=2")
"""Two lanes each; where most of the time is spent waiting for a deadline, there are three."""
_THREE_LANES = ("cluster.num_cpus=3",)
_THREE_LANES_OF_TWO = ("cluster.num_cpus=6", "scaling.num_workers=2")
_AGAIN = ("failure.max_failures=1",)
_SOON = ("lane.hang_timeout_s=10",)
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
        log = log_path(str(sweep_dir(folder) / str(number)), 0)
        problems = other(history, number).problems
        reason = retirement(log)
        if reason is None:
            problems.append(f"after trial {number} its lane was kept")
        detected_s = None if reason is None else log.stat().st_mtime - hit_s
        found.append(Injection(number, detected_s, None, 0, problems))
    return found


def _memory_threshold(_: int) -> dict[str, str]:
    """As much more than is in use now as a trial will take; about half is for the sweep itself."""
    memory = psutil.virtual_memory()
    used = memory.total - memory.available + FILL_MIB * 2**20
    return {
        "RAY_memory_usage_threshold": f"{used / memory.total:.4f}",
        "RAY_memory_monitor_refresh_ms": "100",
    }


ROWS = {
    "raise": Row("exception", Fault.error, "raise", (*ONE_WORKER, *_AGAIN)),
    "exit": Row("SystemExit", Fault.error, "exit", (*ONE_WORKER, *_AGAIN)),
    "interrupt": Row("KeyboardInterrupt in a worker", Fault.interrupted, "interrupt", ONE_WORKER),
    "memory_error": Row("MemoryError", Fault.out_of_memory, "memory_error", (*ONE_WORKER, *_AGAIN)),
    "kill": Row("kill -9 of a lone rank", Fault.rank_died, "kill", ONE_WORKER),
    "kill_one": Row("kill -9 of one rank of 2", Fault.rank_died, "kill", _TWO_WORKERS),
    "kill_lane": Row("kill -9 of a lane's process", Fault.lane_died, "kill_lane", ONE_WORKER),
    "terminate": Row(
        "SIGTERM of a rank", Fault.preempted, "terminate", (*ONE_WORKER, "failure.max_retries=0")
    ),
    "hang": Row("hang in a step (10 s allowed)", Fault.hang, "hang", (*_THREE_LANES, *_SOON)),
    "hang_one": Row(
        "one of 2 in a collective (10 s)", Fault.hang, "hang", (*_THREE_LANES_OF_TWO, *_SOON)
    ),
    "uneven": Row(
        "2 ranks report unevenly (30 s)",
        Fault.uneven_reports,
        "uneven",
        (*_THREE_LANES_OF_TWO, *_AGAIN),
    ),
    "oom": Row(
        "Ray's memory monitor", Fault.oom_killed, "fill_memory", ONE_WORKER, env=_memory_threshold
    ),
    "late": Row(
        "hang while the program loads (20 s)",
        Fault.start_timeout,
        None,
        # Fresh workers for each trial: so there are starts enough. One may be late several times.
        (*ONE_WORKER, "lane.isolation=process", "lane.start_timeout_s=20", "failure.max_retries=9"),
        program=PROJECT / "benchmarks" / "faulty.py",
        env=lambda repeats: {"HEATS_BENCH_HANGS": str(repeats)},
        measure=_late_starts,
    ),
    "leak": Row(
        f"a trial leaves {LEAK_MIB} MiB behind",
        Fault.retired,
        "leak",
        (*ONE_WORKER, f"lane.max_memory_growth_mib={LEAK_MIB // 2}"),
        num_more_trials=1,  # A lane's first turn is never hit, its second always: one is left over.
        measure=_retirements,
    ),
}


# --- one row ----------------------------------------------------------------------------------


def run_row(row: Row, repeats: int, seed: int) -> Result:
    """One sweep, with so many faults."""
    with scratch() as folder:
        began_s = time.perf_counter()
        options = [*row.options, f"n_trials={2 * repeats + row.num_more_trials}"]
        if row.act is not None:
            options.append(f"+recipe.config.fault={row.act}")
        process = start(sweep_command(row.program, folder, seed, options), folder, row.env(repeats))
        problems = failure(process, folder)
        left = processes_left(folder)
        history = read_history(sweep_dir(folder), folder)
        found = (row.measure or _hits)(row, history, folder)
        wall_s = time.perf_counter() - began_s
    hit = {each.trial for each in found}
    others = [other(history, number) for number in history.record.trials if number not in hit]
    return Result(found, others, left, wall_s, problems)


def sweep_command(program: Path, folder: Path, seed: int, options: list[str]) -> list[str]:
    """A sweep over `benchmarks.faulty`, of which every trial runs to its end."""
    return [
        str(program),
        "-m",
        "recipe._target_=benchmarks.faulty.train",
        "objective.metric=loss",
        "objective.direction=minimize",
        "scheduler=none",
        "scaling.use_gpu=false",
        "hydra/sweeper/sampler=random",
        "stop.max_failures=null",
        f"study_name={STUDY}",
        "lr=interval(0.1,1)",
        f"seed={seed}",
        f"+recipe.config.folder={folder}",
        *options,
    ]


def sweep_dir(folder: Path) -> Path:
    """Where the sweep in `folder` has its ledger."""
    return folder / "mlruns" / "sweeps" / STUDY


def failure(process: Popen[bytes], folder: Path) -> list[str]:
    """Wait for a program; the end of what it printed where it failed."""
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


def processes_left(folder: Path) -> int:
    """How many processes of the sweep in `folder` outlive it; they are ended then."""
    until = time.monotonic() + _GONE_S
    while (left := _processes(folder)) and time.monotonic() < until:
        time.sleep(0.2)
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    return len(left)
