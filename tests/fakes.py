"""Fakes that several tests share."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heats.config import Direction
from heats.lane.validation import TIMEOUT, Validated, ValidationTask
from heats.record import SweepRecord
from heats.tracking.ledger import Ledger
from heats.trial import (
    Event,
    Judged,
    LaneShape,
    Objective,
    Outcome,
    ParamValue,
    Report,
    Reported,
    RunCreated,
    SweepEnded,
    SweepStarted,
    TrialAsked,
    TrialEnded,
    TrialSpec,
    TrialState,
    TurnStarted,
    Verdict,
)

if TYPE_CHECKING:
    from heats.record import TrialRecord

_LONG_S = 5.0
SWEEP_START_S = 1_760_000_000.0
_DIMENSIONS: dict[str, Any] = {
    "lr": {
        "name": "FloatDistribution",
        "attributes": {"low": 1e-4, "high": 1.0, "log": True, "step": None},
    },
    "batch_size": {"name": "CategoricalDistribution", "attributes": {"choices": [16, 32, 64]}},
    "recipe.config.hidden": {
        "name": "IntDistribution",
        "attributes": {"low": 8, "high": 128, "log": True, "step": 1},
    },
    "recipe.config.optimizer": {
        "name": "CategoricalDistribution",
        "attributes": {"choices": ["sgd", "adam"]},
    },
}


class FakeRuns:
    """Makes runs in memory, with artifact directories below `root`; None while it `is_down`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.is_down = False
        self.created: list[int] = []

    def create_trial(self, trial: TrialRecord) -> Callable[[], RunCreated | None]:
        if self.is_down:
            return lambda: None
        self.created.append(trial.number)
        folder = self._root / f"run-{trial.number}"
        created = RunCreated(
            time_s=time.time(),
            trial=trial.number,
            run_id=f"{trial.number:032x}",
            artifact_dir=str(folder),
        )
        return lambda: created


class FakeValidator:
    """Validates when the test says so."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self._ends: dict[str, Validated] = {}
        self._changed = threading.Condition()

    def __call__(self, task: ValidationTask, uri: str, is_cancelled: threading.Event) -> Validated:
        with self._changed:
            self.began.append(uri)
            self._changed.wait_for(lambda: uri in self._ends or is_cancelled.is_set(), _LONG_S)
            return self._ends.get(uri, Validated(TIMEOUT))

    def ends(self, uri: str, end: Validated) -> None:
        with self._changed:
            self._ends[uri] = end
            self._changed.notify_all()


class FakeCoordinator:
    """Hands out `specs`, gives every report the same verdict, and notes what it is told."""

    def __init__(self, specs: list[TrialSpec], *, verdict: Verdict = Verdict.CONTINUE) -> None:
        self.specs, self._verdict = specs, verdict
        self.is_over = False
        self.recorded: list[tuple[int, list[Report]]] = []
        self.ended: list[tuple[int, Outcome]] = []

    def next_trial(self) -> TrialSpec | None:
        return self.specs.pop(0) if self.specs else None

    def is_done(self) -> bool:
        return self.is_over

    def record(self, number: int, reports: list[Report]) -> Verdict:
        self.recorded.append((number, reports))
        return self._verdict

    def end(self, number: int, outcome: Outcome) -> None:
        self.ended.append((number, outcome))


def fake_spec(number: int = 0, **changes: Any) -> TrialSpec:
    """The first attempt at a trial, with an empty config."""
    values: dict[str, Any] = {
        "number": number,
        "attempt": 0,
        "config": b"",
        "shape": LaneShape(changes.pop("num_workers", 1), False, {"CPU": 1.0}),
        "run_id": None,
        "artifact_dir": "artifacts",
        "job_dir": "jobs",
        "checkpoint": None,
    }
    return TrialSpec(**{**values, **changes})


def fake_start(study_name: str = "digits", **changes: Any) -> SweepStarted:
    """The first event of a sweep over four parameters of a digits classifier."""
    values: dict[str, Any] = {
        "time_s": SWEEP_START_S,
        "study_name": study_name,
        "argv": ("sweep.py", "-m", "lr=tag(log,interval(1e-4,1))", "batch_size=16,32,64"),
        "cwd": "project",
        "script": "sweep.py",
        "module": None,
        "objective": Objective("val_loss", Direction.minimize),
        "space": {"dimensions": _DIMENSIONS, "texts": {}, "fixed": ["epochs=27"]},
        "fixed": ("epochs=27",),
        "settings": {
            "n_trials": 40,
            "scheduler": "asha",
            "promotion": {"evaluate": "digits.evaluate", "predictor": "digits.Predictor"},
        },
        "config_yaml": "lr: 0.001\nepochs: 27\n",
        "experiment": "digits",
        "tracking_uri": "sqlite:///mlruns/mlflow.db",
        "tags": {"mlflow.source.git.commit": "0123456789abcdef0123456789abcdef01234567"},
    }
    return SweepStarted(**{**values, **changes})


def fake_events(
    num_trials: int = 40, *, study_name: str = "digits", num_lanes: int = 4, is_ended: bool = True
) -> list[Event]:
    """The ledger of a plausible ASHA sweep, in order of time; the same at every call.

    Trials run 27 epochs with rungs at 1, 3 and 9. Trial 7 raises and trial 11 reports NaN. Without
    `is_ended` the last `num_lanes` trials still run and the driver has not left.
    """
    rng = random.Random(3)
    free_at = [SWEEP_START_S + 8.0] * num_lanes
    events: list[Event] = [fake_start(study_name)]
    rungs: dict[int, list[float]] = {1: [], 3: [], 9: []}
    for number in range(num_trials):
        lane = free_at.index(min(free_at))
        is_running = not is_ended and number >= num_trials - num_lanes
        trial = _fake_trial(number, free_at[lane], rng, rungs, is_running=is_running)
        events += trial
        free_at[lane] = trial[-1].time_s + 0.1
    events[1:] = sorted(events[1:], key=lambda event: event.time_s)
    if num_trials:
        run = RunCreated(time_s=SWEEP_START_S, trial=None, run_id="f" * 32, artifact_dir="run-f")
        events.insert(1, run)
    if is_ended:
        end_s = max(free_at)
        events.append(SweepEnded(time_s=end_s, reason="all trials ended", finished=True))
    return events


def fake_sweep(num_trials: int = 40, **options: Any) -> SweepRecord:
    """The record that `fake_events` leads to; the same options."""
    return replay(fake_events(num_trials, **options))


def write_ledger(root: Path, events: Sequence[Event]) -> Path:
    """Write events as the ledger of their sweep under a tracking root, and give its folder."""
    start = events[0]
    assert isinstance(start, SweepStarted)
    sweep_dir = root / "sweeps" / start.study_name
    with Ledger.create(sweep_dir, start) as ledger:
        for event in events[1:]:
            ledger.append(event)
    return sweep_dir


def replay(events: Sequence[Event]) -> SweepRecord:
    """The record after these events, the first of which starts the sweep."""
    start = events[0]
    assert isinstance(start, SweepStarted)
    record = SweepRecord(start=start)
    for event in events:
        record.apply(event)
    return record


def _fake_trial(
    number: int,
    start_s: float,
    rng: random.Random,
    rungs: dict[int, list[float]],
    *,
    is_running: bool,
) -> list[Event]:
    lr = 10 ** rng.uniform(-4, 0)
    params: dict[str, ParamValue] = {
        "lr": lr,
        "batch_size": rng.choice([16, 32, 64]),
        "recipe.config.hidden": round(8 * 16 ** rng.random()),
        "recipe.config.optimizer": rng.choice(["sgd", "adam"]),
    }
    overrides = tuple(f"{name}={value}" for name, value in params.items())
    run_id = f"{number:032x}"
    now = start_s
    events: list[Event] = [
        TrialAsked(time_s=now, trial=number, params=params, overrides=overrides),
        RunCreated(time_s=now, trial=number, run_id=run_id, artifact_dir=f"run-{number}"),
        TurnStarted(time_s=now + 0.05, trial=number, attempt=0),
    ]
    floor = 0.08 + 0.25 * (math.log10(lr) + 1.7) ** 2 + rng.uniform(0, 0.05)
    speed = rng.uniform(0.5, 1.5)
    epoch_s = rng.uniform(0.4, 0.9)
    values: list[float] = []
    ending: tuple[TrialState, str | None] = (TrialState.COMPLETE, None)
    for epoch in range(1, 28):
        now += epoch_s
        value = floor + (2.3 - floor) * math.exp(-speed * epoch / 4) + rng.gauss(0, 0.01)
        if number == 11 and epoch >= 5:
            value = math.nan
        values.append(value)
        metrics = {"epoch": float(epoch), "val_loss": value, "val_accuracy": 1 - value / 3}
        checkpoint = f"run-{number}/checkpoint_{epoch:06d}" if epoch in (9, 27) else None
        events.append(
            Reported(
                time_s=now,
                trial=number,
                index=epoch,
                resource=epoch,
                metrics=metrics,
                checkpoint=checkpoint,
            )
        )
        if number == 7 and epoch == 6:
            ending = (TrialState.FAIL, "Traceback ...\n  <rank 0>\nRuntimeError: <shape> [4, 3]")
            break
        if is_running and epoch == 5:
            return events
        if epoch in rungs:
            # The best half goes on, so that some trials reach every rung of so small a sweep.
            rung = rungs[epoch]
            stops = not is_running and (
                math.isnan(value) or sum(value > other for other in rung) > len(rung) / 2
            )
            rung.append(value)
            verdict = Verdict.STOP if stops else Verdict.CONTINUE
            judged = Judged(
                time_s=now, trial=number, rung=epoch, resource=epoch, value=value, verdict=verdict
            )
            events.append(judged)
            if stops:
                ending = (TrialState.PRUNED, None)
                break
    state, error = ending
    finite = [value for value in values if math.isfinite(value)]
    log = f"logs/trial_{number}.log" if error else None
    value_at_end = min(finite) if finite else None
    events.append(
        TrialEnded(time_s=now, trial=number, state=state, value=value_at_end, error=error, log=log)
    )
    return events
