"""The row of the fault table that ends the driver itself."""

from __future__ import annotations

import random
import signal
import time
from typing import TYPE_CHECKING, Any

from benchmarks.fault_rows import (
    ONE_WORKER,
    STUDY,
    Result,
    failure,
    processes_left,
    sweep_command,
    sweep_dir,
)
from benchmarks.injections import History, Injection, read_history, repeated, trial_problems
from benchmarks.machine import PROJECT
from benchmarks.timing import scratch, start
from heats.trial import TrialState

if TYPE_CHECKING:
    from pathlib import Path

LABEL = "kill -9 of the driver, heats resume"
_NUM_TRIALS = 4


def run_driver_row(repeats: int, seed: int) -> Result:
    """`kill -9` of the driver at a random moment of a small sweep, then `heats resume`."""
    began_s = time.perf_counter()
    chance = random.Random(seed)
    with scratch() as folder:
        problems = failure(start(_driver_sweep(folder, seed), folder), folder)
        if problems:
            return Result([], [], processes_left(folder), time.perf_counter() - began_s, problems)
        reference = read_history(sweep_dir(folder), folder)
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
    return sweep_command(
        PROJECT / "sweep.py", folder, seed, [*ONE_WORKER, f"n_trials={_NUM_TRIALS}"]
    )


def _kill_driver(
    folder: Path, seed: int, after_s: float, reference: History
) -> tuple[Injection, int]:
    """One kill and its resume: what it led to, and how many processes were left."""
    driver = start(_driver_sweep(folder, seed), folder)
    while not any((folder / "epochs").glob("*")) and driver.poll() is None:
        time.sleep(0.05)
    time.sleep(after_s)
    driver.send_signal(signal.SIGKILL)
    problems = [] if driver.wait() == -signal.SIGKILL else ["the sweep ended before its driver"]
    left = processes_left(folder)
    before = read_history(sweep_dir(folder), folder)
    resumed_s = time.time()
    problems += failure(
        start(["-c", "from heats.cli import main; main()", "resume", STUDY], folder), folder
    )
    left += processes_left(folder)
    after = read_history(sweep_dir(folder), folder)
    problems += [each for trial in after.record.trials.values() for each in trial_problems(trial)]
    problems += _differences(before, after, reference)
    if (num_runs := _num_runs(folder)) != _NUM_TRIALS + 1:
        problems.append(f"MLflow has {num_runs} runs, not {_NUM_TRIALS + 1}")
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
