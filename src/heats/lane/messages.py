"""What a lane and its ranks say to each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from heats.config import ValidationConf

if TYPE_CHECKING:
    from heats.lane.validation import ValidationTask
    from heats.trial import Ending, Fault, Report, TrialSpec


@dataclass(frozen=True, slots=True)
class RankStarting:
    """First word of a rank: it is there, and loads the task function."""

    rank: int


@dataclass(frozen=True, slots=True)
class RankReady:
    """A rank loaded the task function, from these source files, and waits for turns."""

    rank: int
    files: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class RankBroken:
    """A rank cannot serve any more: it could not load the task function, or was left unclean."""

    rank: int
    error: str
    fault: Fault


@dataclass(frozen=True, slots=True)
class RankPreempted:
    """A rank was sent SIGTERM, or its node is drained: it will soon be gone."""

    rank: int


@dataclass(frozen=True, slots=True)
class TurnSettings:
    """What the ranks need to know of the sweep; `system_interval_s` None: no system metrics.

    `argv` is the command line of the sweep's driver. A lane may see more than one sweep.
    """

    sweep_id: str
    seed: int
    tracking_uri: str
    system_interval_s: float | None
    validation: ValidationConf = field(default_factory=ValidationConf)
    argv: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Turn:
    """One trial's use of the lane; `index` counts the lane's turns from 1."""

    index: int
    spec: TrialSpec
    settings: TurnSettings


@dataclass(frozen=True, slots=True)
class RankReport:
    """A report of one rank; `index` counts the rank's reports of the turn from 1.

    A report is a fact when every rank has made it: until then a rank may still be uploading its
    part of the checkpoint. Metrics are rank 0's; `pickled` are the same as the trial gave them,
    for other ranks to read, and `validation` is what is to be done with the checkpoint then.
    """

    turn: int
    index: int
    report: Report
    pickled: bytes = field(default=b"", repr=False)
    validation: ValidationTask | None = None


@dataclass(frozen=True, slots=True)
class RankSample:
    """CPU, memory and GPU use while a turn runs."""

    turn: int
    report: Report


@dataclass(frozen=True, slots=True)
class RankPulse:
    """A rank's sign of life: since when it is idle, in seconds, and the line of code it is at.

    `turn` 0: it loads the task function.
    """

    rank: int
    turn: int
    idle_s: float
    in_report: bool
    place: str


@dataclass(frozen=True, slots=True)
class VerdictRequest:
    """A rank asks whether its turn goes on after its report number `index` (from 1)."""

    turn: int
    index: int


@dataclass(frozen=True, slots=True)
class CheckpointsRequest:
    """A rank asks what checkpoints its turn has reported."""

    turn: int


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """A rank left its turn."""

    turn: int
    rank: int
    ending: Ending
    returned: float | None = None
    error: str | None = None
    fault: Fault | None = None
    files: frozenset[str] = frozenset()
    """Source files of the user's own that the rank has loaded since the last time."""


RankMessage = (
    RankStarting
    | RankReady
    | RankBroken
    | RankPreempted
    | RankReport
    | RankSample
    | RankPulse
    | VerdictRequest
    | CheckpointsRequest
    | TurnEnded
)


@dataclass(frozen=True, slots=True)
class TurnCheckpoint:
    """A checkpoint of a turn; `pickled` are the dicts that add up to its metrics."""

    uri: str
    pickled: tuple[bytes, ...]
    status: str


@dataclass(frozen=True, slots=True)
class TurnCheckpoints:
    """The checkpoints of a turn, of its first `num_reports` reports.

    `is_validating`: one of them is not validated yet. `is_stopping`: there is no time to wait.
    """

    num_reports: int
    checkpoints: tuple[TurnCheckpoint, ...]
    is_validating: bool
    is_stopping: bool
