"""What became of trials that a fault hit, and of the others, from a sweep's own records."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.faulty import next_loss, num_epochs
from heats.record import SweepRecord
from heats.tracking.ledger import read_events
from heats.trial import AttemptLost, Fault, SweepStarted, TrialState

if TYPE_CHECKING:
    from heats.record import TrialRecord


@dataclass(frozen=True, slots=True)
class Epoch:
    """An epoch that a trial has trained, in its first, second, ... attempt (from 0), and when."""

    attempt: int
    number: int
    time_s: float


@dataclass(frozen=True, slots=True)
class Injection:
    """What one fault led to; times in seconds since it struck.

    `detected_s`: until the driver wrote it down. `back_s`: until the trial had trained an epoch
    that it had not before. `repeated`: epochs trained twice. `problems`: what was not as expected.
    """

    trial: int | None
    detected_s: float | None
    back_s: float | None
    repeated: int
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Other:
    """A trial that was not hit: how much its longest epoch took beyond its median one."""

    trial: int
    delay_s: float
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class History:
    """What a sweep left: its record, the attempts it lost, and when each trial trained what."""

    record: SweepRecord
    lost: list[AttemptLost]
    epochs: dict[int, list[Epoch]]

    def lost_of(self, number: int) -> list[AttemptLost]:
        """The attempts of a trial that were lost."""
        return [each for each in self.lost if each.trial == number]


def read_history(sweep_dir: Path, folder: Path) -> History:
    """The history of a sweep over `benchmarks.faulty`, whose `folder` this is."""
    events = [event for event, _ in read_events(sweep_dir / "ledger.jsonl")]
    start = events[0]
    if not isinstance(start, SweepStarted):
        msg = f"The ledger of {sweep_dir} does not begin with its sweep."
        raise TypeError(msg)
    record = SweepRecord(start)
    for event in events[1:]:
        record.apply(event)
    lost = [event for event in events if isinstance(event, AttemptLost)]
    files = {int(path.stem): path for path in (folder / "epochs").glob("*.jsonl")}
    return History(record, lost, {number: _epochs(path) for number, path in files.items()})


def _epochs(path: Path) -> list[Epoch]:
    attempt, epochs = -1, []
    for line in path.read_text(encoding="utf-8").splitlines():
        told = json.loads(line)
        if told["epoch"] == 0:
            attempt += 1
        else:
            epochs.append(Epoch(attempt, told["epoch"], told["time_s"]))
    return epochs


def read_times(folder: Path) -> dict[int, float]:
    """The times in `folder`'s files `NUMBER.json`, without those that are empty."""
    texts = {int(path.stem): path.read_text(encoding="utf-8") for path in folder.glob("*.json")}
    return {number: json.loads(text)["time_s"] for number, text in texts.items() if text}


# --- what became of them ----------------------------------------------------------------------


def repeated(epochs: list[Epoch]) -> int:
    """How many epochs were trained again."""
    return len(epochs) - len({epoch.number for epoch in epochs})


def back_at(epochs: list[Epoch], hit_s: float) -> float | None:
    """When an attempt after the one that was hit had trained a new epoch; None: it never did."""
    attempt = max((each.attempt for each in epochs if each.time_s <= hit_s), default=0)
    known = max((each.number for each in epochs if each.attempt <= attempt), default=0)
    later = (each for each in epochs if each.attempt > attempt and each.number > known)
    return next((each.time_s for each in later if each.time_s > hit_s), None)


def delay_s(epochs: list[Epoch]) -> float:
    """How much the longest time between two epochs of an attempt exceeds the median one."""
    gaps = [b.time_s - a.time_s for a, b in pairwise(epochs) if a.attempt == b.attempt]
    return max(gaps) - median(gaps) if gaps else 0.0


def trial_problems(trial: TrialRecord) -> list[str]:
    """What is wrong with how a trial ended: its state, its reports, or their losses."""
    if trial.state is not TrialState.COMPLETE:
        last = (trial.error or "").strip().splitlines()[-1:]
        return [" ".join([f"trial {trial.number} is {trial.state.value}", *last])]
    expected, loss = [], 1.0
    for epoch in range(1, num_epochs(trial.number) + 1):
        loss = next_loss(loss, float(trial.params["lr"] or 0.0), epoch)
        expected.append((epoch, epoch, loss))
    told = [(each.index, each.resource, each.metrics["loss"]) for each in trial.reports]
    if told != expected:
        return [f"trial {trial.number} has other reports than an undisturbed one"]
    return []


def injection(history: History, number: int, hit_s: float, fault: Fault) -> Injection:
    """What a fault of this kind led to in the trial that it hit."""
    trial, epochs = history.record.trials[number], history.epochs.get(number, [])
    problems = trial_problems(trial)
    lost = [each for each in history.lost_of(number) if each.time_s >= hit_s]
    names = [each.fault.value if each.fault else "unknown" for each in lost]
    if names != [fault.value]:
        problems.append(f"trial {number} was lost to {names or 'nothing'}, not to {fault.value}")
    back = back_at(epochs, hit_s)
    return Injection(
        trial=number,
        detected_s=lost[0].time_s - hit_s if lost else None,
        back_s=None if back is None else back - hit_s,
        repeated=repeated(epochs),
        problems=problems,
    )


def other(history: History, number: int) -> Other:
    """What became of a trial that no fault hit."""
    trial, epochs = history.record.trials[number], history.epochs.get(number, [])
    # A turn that never began, as its lane had just ended, takes nothing from the trial.
    lost = [each for each in history.lost_of(number) if each.fault is not Fault.retired]
    problems = trial_problems(trial)
    problems += [f"trial {number} was lost: {each.fault}" for each in lost]
    if repeated(epochs):
        problems.append(f"trial {number} trained {repeated(epochs)} epochs twice")
    return Other(number, delay_s(epochs), problems)
