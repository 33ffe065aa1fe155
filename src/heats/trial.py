"""Frozen records of a trial's life, and the seams between the parts that handle them.

A sweep's history is a sequence of events. The driver appends each to the ledger, applies it to its
`SweepRecord` (record.py), and the shipper sends it to MLflow; a reader of a finished sweep replays
the same events.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from heats.config import Direction, Framework, Placement

if TYPE_CHECKING:
    from collections.abc import Callable

ParamValue = str | int | float | bool | None


class TrialState(Enum):
    """State of a trial, with Optuna's names."""

    RUNNING = "RUNNING"
    COMPLETE = "COMPLETE"
    PRUNED = "PRUNED"
    FAIL = "FAIL"


class Verdict(Enum):
    """What a trial is told at a report.

    PAUSE: the trial stops at its next report, which still counts, and may go on later from its
    newest checkpoint. LEAVE: the same because the driver is leaving; it goes on when the sweep is
    resumed.
    """

    CONTINUE = "CONTINUE"
    STOP = "STOP"
    PAUSE = "PAUSE"
    LEAVE = "LEAVE"


@dataclass(frozen=True, slots=True)
class Objective:
    """Metric, direction and resource in one record; `metric` None is the returned value."""

    metric: str | None
    direction: Direction
    resource: str = "epoch"

    @property
    def name(self) -> str:
        """Metric name as it is shown and logged."""
        return self.metric or "objective"

    def is_better(self, value: float | None, than: float | None) -> bool:
        """Whether `value` beats `than`; NaN, infinity and None never beat anything."""
        if value is None or not math.isfinite(value):
            return False
        if than is None or not math.isfinite(than):
            return True
        return value < than if self.direction is Direction.minimize else value > than


@dataclass(frozen=True, slots=True)
class Proposal:
    """A point of the search space: Optuna's trial number, values, and Hydra overrides for them.

    `overrides` hold only the sampled dimensions, as Hydra override texts that parse back to exactly
    these values.
    """

    number: int
    params: dict[str, ParamValue]
    overrides: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LaneShape:
    """The workers of one trial: how many, what each reserves, and how they are joined.

    `framework`, `backend` (of torch's process group, None: nccl where each worker has a GPU of its
    own, else gloo) and `timeout_s` (of its collectives) are `BackendConf`'s, `placement` that
    of `ScalingConf`. Trials of equal shape can share a lane.
    """

    num_workers: int
    use_gpu: bool
    resources_per_worker: dict[str, float]
    framework: Framework = Framework.torch
    backend: str | None = None
    timeout_s: int = 1800
    placement: Placement = Placement.PACK

    def __hash__(self) -> int:
        """Equal shapes have equal hashes."""
        resources = tuple(sorted(self.resources_per_worker.items()))
        rest = self.framework, self.backend, self.timeout_s, self.placement
        return hash((self.num_workers, self.use_gpu, resources, *rest))


@dataclass(frozen=True, slots=True)
class TrialSpec:
    """One attempt at a trial, as a lane needs it.

    `config` is the composed Hydra config (with its `hydra` node), pickled, because the classes in
    it may live in the user's `__main__`, which a worker loads first. Paths are absolute.
    """

    number: int
    attempt: int
    config: bytes = field(repr=False)
    shape: LaneShape
    run_id: str | None
    artifact_dir: str
    job_dir: str
    checkpoint: str | None
    first_report_index: int = 0
    reported: tuple[tuple[str, dict[str, float]], ...] = ()
    """Checkpoints of earlier attempts that still exist, oldest first, with their metrics."""


# --- events -----------------------------------------------------------------------------------
# `time_s` is wall-clock seconds since the epoch, taken once where the event happened.


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepStarted:
    """First event of a ledger: what was asked for, and everything needed to do it again."""

    time_s: float
    study_name: str
    argv: tuple[str, ...]
    cwd: str
    script: str | None
    module: str | None
    objective: Objective
    space: dict[str, Any]
    fixed: tuple[str, ...]
    settings: dict[str, Any]
    config_yaml: str
    experiment: str
    tracking_uri: str
    tags: dict[str, str] = field(default_factory=dict)
    version: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCreated:
    """An MLflow run now stands for the sweep (`trial` None) or for a trial."""

    time_s: float
    trial: int | None
    run_id: str
    artifact_dir: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialAsked:
    """The sampler proposed a point."""

    time_s: float
    trial: int
    params: dict[str, ParamValue]
    overrides: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnStarted:
    """An attempt at a trial began; `checkpoint` is where it continues from.

    `job_dir` is Hydra's folder for it (None: a sweep of before it was written down).
    """

    time_s: float
    trial: int
    attempt: int
    checkpoint: str | None = None
    job_dir: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """A report of rank 0.

    `index` counts the trial's reports from 1 over all attempts; `resource` is the amount spent so
    far in units of `Objective.resource`; `checkpoint` is a directory path or URI; `tags` are those
    that were set since the report before.
    """

    time_s: float
    trial: int
    index: int
    resource: int
    metrics: dict[str, float]
    checkpoint: str | None = None
    tags: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemSampled:
    """CPU, memory and GPU use of a running trial, under MLflow's `system/` names."""

    time_s: float
    trial: int
    step: int
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A rung decision: `value` is the objective at `rung`, `resource` the amount really spent.

    `needed` is the value that it took to go on; None where no finite one is known.
    """

    time_s: float
    trial: int
    rung: int
    resource: int
    value: float
    verdict: Verdict
    needed: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Exploited:
    """A trial of a population goes on from a checkpoint of another, the donor, with other values.

    `checkpoint` is the donor's own: nothing is copied. `resource` is what the donor had spent,
    `index` the number of reports that the trial had made.
    """

    time_s: float
    trial: int
    index: int
    donor: int
    checkpoint: str
    resource: int
    params: dict[str, ParamValue]
    overrides: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnPaused:
    """A trial that was told to pause has left its lane."""

    time_s: float
    trial: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDropped:
    """A checkpoint is no longer needed; written before its files are removed."""

    time_s: float
    trial: int
    checkpoint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptLost:
    """An attempt failed, and the trial will start again; `fault` None: an older ledger."""

    time_s: float
    trial: int
    attempt: int
    reason: str
    fault: Fault | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialEnded:
    """A trial reached its final state; `value` is its best objective, None where it has none."""

    time_s: float
    trial: int
    state: TrialState
    value: float | None
    error: str | None = None
    log: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepEnded:
    """The driver left: `reason` is for people, `finished` False where trials are still owed."""

    time_s: float
    reason: str
    finished: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResumed:
    """A driver took the sweep up again; `argv` is its command line."""

    time_s: float
    pid: int
    argv: tuple[str, ...] = ()


Event = (
    SweepStarted
    | RunCreated
    | TrialAsked
    | TurnStarted
    | Reported
    | SystemSampled
    | Judged
    | Exploited
    | TurnPaused
    | CheckpointDropped
    | AttemptLost
    | TrialEnded
    | SweepEnded
    | SweepResumed
)


# --- seams ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Report:
    """A report as it leaves rank 0; `Reported` is the same once the driver has numbered it."""

    time_s: float
    metrics: dict[str, float]
    checkpoint: str | None = None
    is_system: bool = False
    tags: dict[str, str] = field(default_factory=dict)


class Ending(Enum):
    """How an attempt at a trial came to its end."""

    RETURNED = "RETURNED"
    STOPPED = "STOPPED"
    FAILED = "FAILED"


class Fault(Enum):
    """What made an attempt fail; lane/health.py says what follows.

    `error`: user code raised. `out_of_memory`: it raised, or CUDA did, for want of memory;
    `oom_killed`: Ray or the kernel ended a worker for it. `device_error`: CUDA or NCCL failed.
    `uneven_reports`: ranks did not report equally often. `broken_program`: the user's program does
    not load in a worker. `start_timeout`: the workers were not there in time. `rank_died`,
    `lane_died`: a process went away. `hang`: nothing moved. `interrupted`: a KeyboardInterrupt in a
    worker. `preempted`: the node is going away. `retired`: the lane ended before the turn began.
    """

    error = "error"
    out_of_memory = "out_of_memory"
    oom_killed = "oom_killed"
    device_error = "device_error"
    uneven_reports = "uneven_reports"
    broken_program = "broken_program"
    start_timeout = "start_timeout"
    rank_died = "rank_died"
    lane_died = "lane_died"
    hang = "hang"
    interrupted = "interrupted"
    preempted = "preempted"
    retired = "retired"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of an attempt: `returned` is what rank 0's task function gave, if a number.

    A failed one has a `fault` and an `error` for people.
    """

    ending: Ending
    returned: float | None = None
    error: str | None = None
    fault: Fault | None = None

    @classmethod
    def failed(cls, fault: Fault, error: str) -> Outcome:
        """The end of an attempt that failed."""
        return cls(Ending.FAILED, error=error, fault=fault)


@dataclass(frozen=True, slots=True)
class Exploit:
    """A trial is to go on from the newest checkpoint of the donor, with other values."""

    donor: int
    params: dict[str, ParamValue]
    overrides: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Judgement:
    """A scheduler's decision about a trial.

    `rung` is the milestone that was reached; for a value that is not finite off the rungs it is
    `resource`, the amount really spent. `needed` is the value that it took to go on; None where no
    finite one is known. `exploit` comes with PAUSE.
    """

    rung: int
    resource: int
    value: float
    verdict: Verdict
    needed: float | None = None
    exploit: Exploit | None = None


class TrialScheduler(Protocol):
    """What decides at a report whether a trial goes on, and which paused one comes again."""

    def judge(self, trial: int, resource: int, value: float) -> list[Judgement]:
        """Take a report of a running trial; empty where there is nothing to decide."""
        ...

    def resume(self, is_ready: Callable[[int], bool], *, is_last: bool = False) -> int | None:
        """A paused trial that goes on now, of those that are ready; None where none is to.

        `is_last`: nothing else will ever come, and no trial is complete yet.
        """
        ...


class Coordinator(Protocol):
    """What drives trials asks this for work and tells it what happened (sweeper.py has the one)."""

    def next_trial(self) -> TrialSpec | None:
        """The next attempt to run, or None where there is none now."""
        ...

    def is_done(self) -> bool:
        """Whether `next_trial` will never give anything again."""
        ...

    def record(self, number: int, reports: list[Report]) -> Verdict:
        """Take reports of a running trial in order; the verdict holds from now on."""
        ...

    def end(self, number: int, outcome: Outcome) -> None:
        """Take the end of an attempt; all its reports were recorded before."""
        ...


def clean_metrics(metrics: dict[str, Any]) -> dict[str, float]:
    """Metrics as floats, by one rule for every path that a metric can take.

    Bools, ints, NumPy scalars and 0-d arrays become floats; a number beyond float64 becomes
    infinity; NaN stays NaN. Text, None and anything else that is not a number is left out.
    """
    cleaned: dict[str, float] = {}
    for key, value in metrics.items():
        if isinstance(value, (str, bytes)) or value is None:
            continue
        try:
            cleaned[str(key)] = float(value)
        except OverflowError:
            cleaned[str(key)] = math.inf if value > 0 else -math.inf
        except (TypeError, ValueError):
            continue
    return cleaned


def resource_spent(metrics: dict[str, float], index: int, resource: str) -> int:
    """Amount of resource spent at a report, in whole units of `Objective.resource`.

    It is the reported metric of that name (rounded down), or the report's index (from 1) where the
    report lacks it or it is not a finite number.
    """
    spent = metrics.get(resource)
    return int(spent) if spent is not None and math.isfinite(spent) else index
