"""What each event means in MLflow: pure translation, no MLflow in it.

A trial's run is FINISHED when COMPLETE or PRUNED (it ended as planned; a red cross would say that
something is wrong), FAILED when FAIL, KILLED when the driver left it unfinished. Its tag
`heats.state` says `running`, `finished`, `pruned`, `failed` or `interrupted`. MLflow shows the last
value of a metric, so trial and sweep also have their best value, as the metric `best_<objective>`.
"""

from __future__ import annotations

import hashlib
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from heats.record import config_file
from heats.tracking.keys import mlflow_key
from heats.tracking.provenance import Provenance, redact_text, redact_value
from heats.trial import (
    Exploited,
    Reported,
    SweepEnded,
    SweepResumed,
    SweepStarted,
    SystemSampled,
    TrialAsked,
    TrialEnded,
    TrialState,
    TurnStarted,
)

if TYPE_CHECKING:
    from heats.trial import Event, Objective

PROVENANCE = "provenance.json"
MAX_PARAM_CHARS = 6000
MAX_TAG_CHARS = 5000
MAX_TEXT_BYTES = 1_000_000

_ENDS = {
    TrialState.COMPLETE: ("FINISHED", "finished"),
    TrialState.PRUNED: ("FINISHED", "pruned"),
    TrialState.FAIL: ("FAILED", "failed"),
}


class MetricRow(NamedTuple):
    """One value of a metric; an equal row sent twice is stored once."""

    key: str
    value: float
    timestamp_ms: int
    step: int


@dataclass(slots=True)
class RunWrites:
    """What one run is to get; `status` is MLflow's, and `ended_ms` goes with a final one.

    `best_trial` is the trial that the parent shall name as its best.
    """

    started_s: float
    metrics: list[MetricRow] = field(default_factory=list)
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    status: str | None = None
    ended_ms: int | None = None
    best_trial: int | None = None

    def set_params(self, values: dict[str, str]) -> None:
        """Add parameters under names MLflow takes; of a long one the hash, and an artifact."""
        for key, value in values.items():
            name, value = mlflow_key(key), redact_value(key, value)
            if len(value) > MAX_PARAM_CHARS:
                path = f"params/{name}.txt"
                self.texts[path] = value
                digest = hashlib.sha256(value.encode(errors="replace")).hexdigest()
                value = f"sha256:{digest}, in the artifact {path}"
            self.params[name] = value


Writes = dict[int | None, RunWrites]


class Translator:
    """Turns a sweep's events, taken in order from the first, into what its runs are to get."""

    def __init__(self, sweep_dir: Path) -> None:
        """Start before the first event of the ledger in `sweep_dir`."""
        self._dir = sweep_dir
        self._start: SweepStarted | None = None
        self._asked_s: dict[int, float] = {}
        self._job_dirs: dict[int, str | None] = {}
        self._running: set[int] = set()
        self._best: float | None = None
        self._best_trial: int | None = None

    def asked_s(self, trial: int) -> float:
        """When a trial was asked."""
        return self._asked_s[trial]

    def take(self, event: Event, writes: Writes) -> None:
        """Add to `writes` what an event means."""
        match event:
            case SweepStarted():
                self._start = event
                self._describe_sweep(event, self._run(writes, None))
            case TrialAsked():
                self._asked_s[event.trial] = event.time_s
                self._running.add(event.trial)
                run = self._run(writes, event.trial)
                run.set_params({key: str(value) for key, value in event.params.items()})
                lines = [*(self._start.fixed if self._start else ()), *event.overrides]
                run.texts["overrides.txt"] = redact_text("\n".join(lines) + "\n")
            case TurnStarted():
                self._job_dirs[event.trial] = event.job_dir
                if event.trial not in self._running:
                    self._running.add(event.trial)
                    run = self._run(writes, event.trial)
                    run.tags["heats.state"] = "running"
                    run.status, run.ended_ms = "RUNNING", None
            case Reported():
                tags = {mlflow_key(key): redact_value(key, tag) for key, tag in event.tags.items()}
                self._run(writes, event.trial).tags |= tags
                self._measure(writes, event.trial, event.metrics, event.time_s, event.resource)
            case Exploited():
                told = {"donor": event.donor, **event.params}
                metrics = {
                    f"population/{key}": float(value)
                    for key, value in told.items()
                    if isinstance(value, int | float)
                }
                self._measure(writes, event.trial, metrics, event.time_s, event.resource)
            case SystemSampled():
                metrics = {
                    key if key.startswith("system/") else f"system/{key}": value
                    for key, value in event.metrics.items()
                }
                self._measure(writes, event.trial, metrics, event.time_s, event.step)
            case TrialEnded():
                self._end_trial(event, writes)
            case SweepResumed():
                parent = self._run(writes, None)
                parent.status, parent.ended_ms = "RUNNING", None
            case SweepEnded():
                self._end_sweep(event, writes)
            case _:
                pass

    def _run(self, writes: Writes, trial: int | None) -> RunWrites:
        if trial not in writes:
            started_s = self._start.time_s if self._start else 0.0
            writes[trial] = RunWrites(started_s if trial is None else self._asked_s[trial])
        return writes[trial]

    def _describe_sweep(self, start: SweepStarted, run: RunWrites) -> None:
        settings = start.settings
        scheduler = settings.get("scheduler")
        fixed = (override.partition("=") for override in start.fixed)
        run.set_params(
            {
                "objective": start.objective.name,
                "direction": start.objective.direction.value,
                "resource": start.objective.resource,
                "n_trials": str(settings.get("n_trials")),
                "sampler": str(settings.get("sampler")),
                "scheduler": str(getattr(scheduler, "value", scheduler)),
            }
            | {key: value for key, _, value in fixed}
        )
        run.tags |= {mlflow_key(key): redact_value(key, tag) for key, tag in start.tags.items()}
        run.texts["config.yaml"] = redact_text(start.config_yaml)
        command = [shlex.join(start.argv), *start.fixed]
        run.texts["overrides.txt"] = redact_text("\n".join(command) + "\n")
        origin = Provenance.load(self._dir / PROVENANCE)
        if origin is None:
            return
        packages = (f"{name}=={version}\n" for name, version in origin.packages.items())
        run.texts["packages.txt"] = "".join(packages)
        run.tags |= {"heats.python": origin.python, "heats.platform": origin.platform}
        if origin.commit:
            run.tags["mlflow.source.git.commit"] = origin.commit
            run.tags["mlflow.source.git.branch"] = origin.branch or ""
            run.tags["heats.git.dirty"] = str(origin.is_dirty).lower()
        if origin.diff:
            run.texts["git.diff"] = redact_text(origin.diff)

    def _measure(
        self, writes: Writes, trial: int, metrics: dict[str, float], time_s: float, step: int
    ) -> None:
        at = int(time_s * 1000)
        rows = self._run(writes, trial).metrics
        rows.extend(MetricRow(mlflow_key(key), value, at, step) for key, value in metrics.items())

    def _end_trial(self, event: TrialEnded, writes: Writes) -> None:
        self._running.discard(event.trial)
        run = self._run(writes, event.trial)
        run.status, run.tags["heats.state"] = _ENDS[event.state]
        run.ended_ms = int(event.time_s * 1000)
        if event.error:
            error = redact_text(event.error)
            run.tags["heats.error"] = error[-MAX_TAG_CHARS:]
            run.texts["error.txt"] = error
        if event.log and event.state is TrialState.FAIL:
            log = self._dir / event.log
            self._attach(run, log.name, log)
        job_dir = self._job_dirs.get(event.trial)
        self._attach(run, "config.yaml", config_file(self._dir, event.trial, job_dir))
        objective: Objective | None = self._start.objective if self._start else None
        if objective is None or event.value is None:
            return
        name, at = mlflow_key(f"best_{objective.name}"), int(event.time_s * 1000)
        run.metrics.append(MetricRow(name, event.value, at, 0))
        if event.state is TrialState.COMPLETE and objective.is_better(event.value, self._best):
            self._best, self._best_trial = event.value, event.trial
            parent = self._run(writes, None)
            parent.best_trial = event.trial
            parent.tags["heats.best_trial"] = str(event.trial)
            parent.tags["heats.best_value"] = repr(event.value)
            parent.metrics.append(MetricRow(name, event.value, at, event.trial))

    def _end_sweep(self, event: SweepEnded, writes: Writes) -> None:
        at = int(event.time_s * 1000)
        for trial in self._running:
            run = self._run(writes, trial)
            run.status, run.tags["heats.state"], run.ended_ms = "KILLED", "interrupted", at
        self._running.clear()
        parent = self._run(writes, None)
        parent.status, parent.ended_ms = ("FINISHED" if event.finished else "KILLED"), at
        parent.tags["heats.ended"] = event.reason[:MAX_TAG_CHARS]

    def _attach(self, run: RunWrites, name: str, path: Path) -> None:
        try:
            if path.stat().st_size <= MAX_TEXT_BYTES:
                run.texts[name] = redact_text(path.read_text(errors="replace"))
        except OSError:
            return  # It is an extra; it may never have been written.
