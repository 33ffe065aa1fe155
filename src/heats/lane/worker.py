"""The loop of one rank: take a turn, run the trial, say how it ended, clean up, wait."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from heats.errors import TrialStoppedError
from heats.lane.health import fault_of
from heats.lane.mailbox import Address, RankMailbox
from heats.lane.messages import (
    RankBroken,
    RankPreempted,
    RankReady,
    RankSample,
    RankStarting,
    TurnEnded,
)
from heats.lane.system import SystemMonitor
from heats.lane.task import TaskRef, run_task
from heats.trial import Ending, Fault, Report

if TYPE_CHECKING:
    from heats.lane.messages import Turn
    from heats.lane.pulse import Pulse
    from heats.lane.task import TaskFunction

logger = logging.getLogger(__name__)

_RETIRED = "heats: a new lane follows after this trial, because "


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What every rank of a lane needs to know before its first turn."""

    address: Address
    task: TaskRef
    max_memory_growth_mib: float


def serve_turns(settings: dict[str, WorkerSettings]) -> None:
    """The train function of a lane's `TorchTrainer` run: serve turns until there are no more."""
    from heats.lane.context import quiet_ray_train, rank_and_world_size
    from heats.lane.loaded import LoadedFiles
    from heats.lane.output import output_to
    from heats.lane.preemption import is_preempted, on_preemption
    from heats.lane.pulse import Pulse
    from heats.lane.reset import RankState

    own = settings["worker"]
    rank, _ = rank_and_world_size()
    mailbox = RankMailbox(own.address)
    mailbox.send(RankStarting(rank))
    on_preemption(lambda: mailbox.send(RankPreempted(rank)))
    quiet_ray_train()
    pulse = Pulse(rank, mailbox, is_preempted)
    try:
        with pulse.turn(0):
            function = own.task.load()
    except BaseException:
        mailbox.send(RankBroken(rank, traceback.format_exc(), Fault.broken_program))
        raise
    state = RankState(max_memory_growth_mib=own.max_memory_growth_mib)
    files = LoadedFiles()
    mailbox.send(RankReady(rank, files.new()))
    while (turn := mailbox.next_turn()) is not None:
        ended = _serve(turn, rank, own.address, function, mailbox, pulse)
        mailbox.send(replace(ended, files=files.new()))
        if reasons := "; ".join(state.restore()):  # It costs the lane, not the trial, which ended.
            with output_to(log_path(turn.spec.job_dir, rank)):
                print(f"{_RETIRED}{reasons}")  # noqa: T201
            mailbox.send(RankBroken(rank, reasons, Fault.retired))
            return


def _serve(
    turn: Turn,
    rank: int,
    address: Address,
    function: TaskFunction,
    mailbox: RankMailbox,
    pulse: Pulse,
) -> TurnEnded:
    from heats.lane.context import turn_context
    from heats.lane.output import output_to
    from heats.lane.reset import seed_rank

    spec, own = turn.spec, turn.settings
    ended = TurnEnded(turn.index, rank, Ending.RETURNED)
    seed_rank(own.seed + spec.number)
    sys.argv = list(own.argv)
    os.environ["MLFLOW_TRACKING_URI"] = own.tracking_uri
    if spec.run_id is not None:
        os.environ["MLFLOW_RUN_ID"] = spec.run_id
    with output_to(log_path(spec.job_dir, rank)), _sampled(turn, rank, mailbox):
        try:
            with pulse.turn(turn.index), turn_context(turn, mailbox, pulse, address):
                returned = run_task(function, spec.config, job_dir=spec.job_dir, is_chief=rank == 0)
                ended = replace(ended, returned=returned)
        except TrialStoppedError:
            ended = replace(ended, ending=Ending.STOPPED)
        except BaseException as exc:  # noqa: BLE001 - user code may raise anything; the lane must outlive it
            text = traceback.format_exc()
            print(text, file=sys.stderr)  # noqa: T201
            ended = replace(ended, ending=Ending.FAILED, error=text, fault=fault_of(exc))
    return ended


def log_path(job_dir: str, rank: int) -> Path:
    """Where a rank's output of a trial goes."""
    return Path(job_dir, f"rank-{rank}.log")


def retirement(log: Path) -> str | None:
    """Why the lane was replaced after the trial with this log; None where it went on."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    retired = (line.removeprefix(_RETIRED) for line in lines if line.startswith(_RETIRED))
    return next(retired, None)


class _sampled:  # noqa: N801 - a context manager, used like a function
    """Sample the machine's use on rank 0: when a turn starts, at each interval, and at its end."""

    def __init__(self, turn: Turn, rank: int, mailbox: RankMailbox) -> None:
        self._turn, self._mailbox = turn, mailbox
        self._interval_s = turn.settings.system_interval_s if rank == 0 else None
        self._is_over = threading.Event()

    def __enter__(self) -> None:
        """Take the first sample and go on sampling."""
        if self._interval_s is not None:
            self._monitor = SystemMonitor()
            self._send()  # So that even a trial that is stopped at its first report has one.
            threading.Thread(target=self._run, args=(self._interval_s,), daemon=True).start()

    def __exit__(self, *_: object) -> None:
        """Take a last sample."""
        self._is_over.set()
        if self._interval_s is not None:
            self._send()

    def _run(self, interval_s: float) -> None:
        while not self._is_over.wait(interval_s):
            self._send()

    def _send(self) -> None:
        report = Report(time.time(), self._monitor.sample(), is_system=True)
        self._mailbox.send(RankSample(self._turn.index, report))
