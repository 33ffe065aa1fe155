"""What is known of a sweep, built by applying its events one by one.

The driver keeps one and applies each event as it writes it; every reader replays the ledger into
another. So the live view, a resume and a report can never disagree.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from heats.trial import (
    AttemptLost,
    CheckpointDropped,
    Exploited,
    Judged,
    Reported,
    RunCreated,
    SweepEnded,
    SweepResumed,
    SweepStarted,
    SystemSampled,
    TrialAsked,
    TrialEnded,
    TrialState,
    TurnPaused,
    TurnStarted,
    Verdict,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from heats.trial import Event, Objective, ParamValue


@dataclass(slots=True)
class TrialRecord:
    """One trial so far; times are wall-clock seconds since the epoch.

    `spans` holds when each attempt began and when the last was heard of it. `is_open`: the last one
    may still go on. `is_starting`: nothing was heard of it, and its workers may have to start.
    `is_paused`: its scheduler says whether it goes on. `params` and `overrides` are those it has
    now, `asked_overrides` those it began with; `exploited` says how they changed in a population.
    """

    number: int
    params: dict[str, ParamValue]
    overrides: tuple[str, ...]
    asked_s: float
    state: TrialState = TrialState.RUNNING
    spans: list[tuple[float, float]] = field(default_factory=list)
    is_open: bool = False
    is_starting: bool = False
    is_paused: bool = False
    asked_overrides: tuple[str, ...] = ()
    exploited: list[Exploited] = field(default_factory=list)
    ended_s: float | None = None
    value: float | None = None
    error: str | None = None
    log: str | None = None
    run_id: str | None = None
    artifact_dir: str | None = None
    job_dir: str | None = None
    attempts: int = 0
    reports: list[Reported] = field(default_factory=list)
    judged: list[Judged] = field(default_factory=list)
    checkpoints: dict[str, Reported] = field(default_factory=dict)

    @property
    def started_s(self) -> float | None:
        """When the first attempt began."""
        return self.spans[0][0] if self.spans else None

    def duration_s(self, now_s: float | None = None) -> float | None:
        """Seconds of all attempts, without the pauses between them; None before the first.

        `now_s` is the time that a running trial has come to, by default that of its last event.
        """
        if not self.spans:
            return None
        ends = [end for _, end in self.spans]
        if now_s is not None and self.is_open:
            ends[-1] = max(now_s, ends[-1])
        return sum(end - begin for (begin, _), end in zip(self.spans, ends, strict=True))

    def heard_of(self, time_s: float) -> None:
        """Let the last attempt reach until now, where it is open."""
        self.is_starting = False
        if self.is_open:
            began_s, last_s = self.spans[-1]
            self.spans[-1] = (began_s, max(last_s, time_s))

    @property
    def last(self) -> Reported | None:
        """The latest report."""
        return self.reports[-1] if self.reports else None

    def best_report(self, objective: Objective) -> Reported | None:
        """The report with the best finite objective; None where there is none."""
        return _best(self.reports, objective)

    def best_checkpoint(self, objective: Objective) -> Reported | None:
        """Among the checkpoints that still exist, the report whose objective is best."""
        return _best(self.checkpoints.values(), objective)

    def best_checkpoints(self, score: Objective) -> list[tuple[str, Reported]]:
        """The checkpoints that still exist, best first; those without a score last, newest first.

        Of equal ones the earlier is better.
        """
        rest = list(self.checkpoints.items())
        ranked: list[tuple[str, Reported]] = []
        while best := _best([report for _, report in rest], score):
            ranked += [each for each in rest if each[1] is best]
            rest = [each for each in rest if each[1] is not best]
        return ranked + rest[::-1]

    @property
    def last_checkpoint(self) -> Reported | None:
        """The newest checkpoint that still exists: where the trial would continue.

        One that it was given of another trial is newer than its own of the same report.
        """
        newest_first = reversed(self.checkpoints.values())
        return max(newest_first, key=lambda report: report.index, default=None)


def _best(reports: Iterable[Reported], objective: Objective) -> Reported | None:
    best: Reported | None = None
    best_value: float | None = None
    for report in reports:
        value = report.metrics.get(objective.name)
        if objective.is_better(value, best_value):
            best, best_value = report, value
    return best


def config_file(sweep_dir: Path, number: int, job_dir: str | None) -> Path:
    """Where Hydra wrote a trial's config: in its job folder, which may be anywhere.

    In an app that sets `hydra.sweep.dir` as the shipped one does, and in a sweep whose folder was
    moved with all that is in it, that is a folder of the sweep's own.
    """
    name = Path(".hydra", "config.yaml")
    file = Path(job_dir or "") / name
    return file if job_dir is not None and file.is_file() else sweep_dir / str(number) / name


@dataclass(slots=True)
class SweepRecord:
    """One sweep so far. `start` is the first event; `ended` is None while a driver should live.

    `began_s` is when the last driver took it up, `argv` its command line, `earlier_s` how long
    those before it had the sweep.
    """

    start: SweepStarted
    trials: dict[int, TrialRecord] = field(default_factory=dict)
    run_id: str | None = None
    artifact_dir: str | None = None
    ended: SweepEnded | None = None
    last_time_s: float = 0.0
    began_s: float = 0.0
    earlier_s: float = 0.0
    argv: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Begin with the first event."""
        self.argv = self.start.argv
        self.last_time_s = self.began_s = self.start.time_s

    @property
    def wall_s(self) -> float:
        """Seconds that drivers have had the sweep, from the first event of each to its last."""
        return self.earlier_s + self.last_time_s - self.began_s

    @property
    def objective(self) -> Objective:
        """The study's objective."""
        return self.start.objective

    def apply(self, event: Event) -> None:
        """Take one more event into account.

        Raises:
            KeyError: The event is of a trial that was never asked.
        """
        if isinstance(event, SweepResumed):
            self.earlier_s, self.began_s = self.wall_s, max(self.last_time_s, event.time_s)
        self.last_time_s = max(self.last_time_s, event.time_s)
        match event:
            case TrialAsked():
                self.trials[event.trial] = TrialRecord(
                    number=event.trial,
                    params=dict(event.params),
                    overrides=event.overrides,
                    asked_overrides=event.overrides,
                    asked_s=event.time_s,
                )
            case RunCreated(trial=None):
                self.run_id, self.artifact_dir = event.run_id, event.artifact_dir
            case RunCreated(trial=int() as number):
                self.trials[number].run_id = event.run_id
                self.trials[number].artifact_dir = event.artifact_dir
            case TurnStarted():
                trial = self.trials[event.trial]
                trial.attempts = event.attempt + 1
                trial.job_dir = event.job_dir
                trial.spans.append((event.time_s, event.time_s))
                trial.is_open = trial.is_starting = True
                trial.is_paused = False
            case SystemSampled():
                trial = self.trials[event.trial]
                if trial.is_starting:  # Rank 0 takes its first sample when it begins.
                    trial.spans[-1] = (event.time_s, event.time_s)
                trial.heard_of(event.time_s)
            case Reported():
                trial = self.trials[event.trial]
                trial.reports.append(event)
                trial.heard_of(event.time_s)
                if event.checkpoint is not None:
                    trial.checkpoints[event.checkpoint] = event
            case Judged():
                trial = self.trials[event.trial]
                trial.judged.append(event)
                trial.is_paused = event.verdict is Verdict.PAUSE
            case Exploited():
                trial = self.trials[event.trial]
                trial.exploited.append(event)
                trial.params, trial.overrides = dict(event.params), event.overrides
                report = self.trials[event.donor].checkpoints[event.checkpoint]
                trial.checkpoints.pop(event.checkpoint, None)  # It is to be the newest again.
                trial.checkpoints[event.checkpoint] = replace(report, index=event.index)
            case TurnPaused():
                self.trials[event.trial].heard_of(event.time_s)
                self.trials[event.trial].is_open = False
            case CheckpointDropped():
                self.trials[event.trial].checkpoints.pop(event.checkpoint, None)
            case TrialEnded():
                trial = self.trials[event.trial]
                trial.state, trial.value, trial.error = event.state, event.value, event.error
                trial.log, trial.ended_s = event.log, event.time_s
                trial.heard_of(event.time_s)
                trial.is_open = trial.is_paused = False
            case SweepEnded():
                self.ended = event
                self._close_attempts()
            case SweepResumed():
                self.ended, self.argv = None, event.argv or self.argv
                self._close_attempts()
            case AttemptLost():
                self.trials[event.trial].heard_of(event.time_s)
                self.trials[event.trial].is_open = False
            case SweepStarted():
                pass

    def _close_attempts(self) -> None:
        for trial in self.trials.values():
            trial.is_open = False

    def best(self) -> TrialRecord | None:
        """The COMPLETE trial with the best finite value; the earlier one where two are equal."""
        best: TrialRecord | None = None
        for trial in self.trials.values():
            if trial.state is TrialState.COMPLETE and self.objective.is_better(
                trial.value, best.value if best else None
            ):
                best = trial
        return best

    def counts(self) -> dict[TrialState, int]:
        """Number of trials in each state."""
        counts = dict.fromkeys(TrialState, 0)
        for trial in self.trials.values():
            counts[trial.state] += 1
        return counts
