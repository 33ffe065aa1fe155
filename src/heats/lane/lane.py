"""A lane: one long-lived `TorchTrainer` run whose workers serve trial after trial.

The lane lives in the process of its Tune trainable. Ranks talk to it through the mailbox; it
joins their reports, gives every rank the same verdict for the same report, and knows when a
turn is over on all ranks.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from heats.config import DataConf, ValidationConf
from heats.lane.group import RayWorkerGroup
from heats.lane.health import fault_of_group, num_oom_kills
from heats.lane.mailbox import Mailbox
from heats.lane.messages import (
    CheckpointsRequest,
    RankBroken,
    RankPreempted,
    RankPulse,
    RankReady,
    RankReport,
    RankSample,
    Turn,
    TurnCheckpoints,
    TurnEnded,
    TurnSettings,
    VerdictRequest,
)
from heats.lane.reports import TurnReports
from heats.lane.turn import RunningTurn
from heats.lane.validation import validate_in_task
from heats.lane.worker import WorkerSettings
from heats.trial import Ending, Fault, Outcome, Verdict

if TYPE_CHECKING:
    from heats.config import AshaConf, LaneConf, PbtConf
    from heats.lane.group import WorkerGroup
    from heats.lane.messages import RankMessage
    from heats.lane.task import TaskRef
    from heats.lane.validation import Validate
    from heats.trial import LaneShape, Objective, Report, TrialSpec

logger = logging.getLogger(__name__)

_MAX_WAIT_SHARE = 0.02
"""Largest share of the time between two reports that a rank may wait for a verdict at a rung."""

_CAUSE_S = 1.0
"""How long Ray has to say what a rank died of, in seconds."""


@dataclass(frozen=True, slots=True)
class LaneSettings:
    """Everything a lane needs that does not change from trial to trial.

    `pace` says which reports need a decision; None: none, so verdicts never wait. `storage_path` is
    where Ray Train keeps what is the lane's own; `sweep_id` is this driver run's own, and names
    what its lanes reserve.
    """

    sweep_id: str
    task: TaskRef
    objective: Objective
    pace: AshaConf | PbtConf | None
    lane: LaneConf
    storage_path: str
    tracking_uri: str
    seed: int
    system_interval_s: float | None
    validation: ValidationConf = field(default_factory=ValidationConf)
    data: DataConf = field(default_factory=DataConf)

    def of_turns(self) -> TurnSettings:
        """The part that the ranks need to know with each turn."""
        return TurnSettings(
            self.sweep_id,
            self.seed,
            self.tracking_uri,
            self.system_interval_s,
            self.validation,
            self.task.argv,
        )


class Lane:
    """The driver's side of one worker group.

    For each trial `begin`, `gather` until it gives an outcome, and `stop` where the trial is to end
    early; `close` at the end.
    """

    def __init__(
        self,
        settings: LaneSettings,
        shape: LaneShape,
        group: WorkerGroup | None = None,
        validate: Validate = validate_in_task,
    ) -> None:
        """Start the ranks; `group` None: in a Ray Train run."""
        self.shape = shape
        self.settings, self._validate = settings, validate
        self._num_workers = shape.num_workers
        self._group = group or RayWorkerGroup(settings.sweep_id)
        self._changed = threading.Condition()
        self._ready: set[int] = set()
        self._places: dict[int, str] = {}
        self._turn: RunningTurn | None = None
        self._num_turns = 0
        self._loss: Outcome | None = None
        self._preemption: str | None = None
        self._is_closing = False
        self._started_s = time.monotonic()
        self.loaded_s = time.time()
        self._files: set[str] = set()
        self._num_oom_kills = num_oom_kills()
        self._mailbox = Mailbox(self._group.host(), self._on_message, self._on_gone)
        self._thread = threading.Thread(target=self._run, daemon=True, name="heats-lane")
        self._thread.start()

    @property
    def is_new(self) -> bool:
        """Whether no turn was begun yet."""
        return self._num_turns == 0

    @property
    def is_usable(self) -> bool:
        """Whether the lane can take a turn now."""
        return self._loss is None and not self._is_closing and self._turn is None

    @property
    def loss(self) -> Outcome | None:
        """Why the lane can take no turn any more, as the end of one; None where it can.

        It may say more once the lane is closed: only then is known what Ray says of it.
        """
        return self._loss

    @property
    def files(self) -> frozenset[str]:
        """Source files of the user's own that its ranks have loaded, none before `loaded_s`."""
        with self._changed:
            return frozenset(self._files)

    def begin(self, spec: TrialSpec) -> None:
        """Give the lane a trial; its ranks get it as soon as all of them are there."""
        own = self.settings
        with self._changed:
            self._num_turns += 1
            turn = Turn(self._num_turns, spec, own.of_turns())
            made = TurnReports(self._validate, self._on_validated)
            self._turn = RunningTurn(turn, made, self._num_workers, own.objective, own.pace)

    def gather(self) -> tuple[list[Report], Outcome | None]:
        """Reports since the last call, once there is something to decide or enough time passed.

        Calling it says that the turn goes on after everything gathered before. The outcome is None
        while the turn runs; when it is not, every report has been gathered and the turn is over.
        Where the lane was lost, the outcome is its `loss`.
        """
        until = time.monotonic() + self.settings.lane.flush_interval_s
        with self._changed:
            turn = self._turn
            if turn is None:
                msg = "The lane has no turn; call begin() first."
                raise RuntimeError(msg)
            if turn.is_stopping and not turn.is_posted:
                self._turn = None
                return [], Outcome(Ending.STOPPED)
            if turn.is_posted or self._post(turn, until):
                turn.go_on()
                self._changed.notify_all()
                self._wait(turn, until)
            reports = turn.take_reports()
            outcome = turn.outcome() if turn.is_over else None
            if outcome is None and not reports and not turn.have_all_left:
                outcome = self._loss
            if outcome is not None:
                self._leave_turn()
        return reports, outcome

    def request_stop(self) -> None:
        """End the running turn at its ranks' next report; `gather` goes on until its outcome.

        Ranks that do not come to one within `lane.stop_grace_s` count as stopped and cost the lane.
        """
        with self._changed:
            if self._turn is not None:
                self._turn.stop(self.settings.lane.stop_grace_s)
                self._changed.notify_all()

    def stop(self) -> bool:
        """End the running turn at its ranks' next report; False where they did not in time."""
        with self._changed:
            turn, self._turn = self._turn, None
            if self._is_closing:
                return True
            if turn is None or self._loss is not None or not turn.is_posted:
                return self._loss is None
            self._turn = turn
            turn.stop(self.settings.lane.stop_grace_s)
            self._changed.notify_all()
            is_over = self._changed.wait_for(
                lambda: self._loss is not None or turn.have_all_left,
                timeout=self.settings.lane.stop_grace_s,
            )
            turn.forget()
            self._leave_turn()
            return is_over and self._loss is None

    def close(self, *, is_broken: bool = False) -> None:
        """End the worker group: by word, or where ranks do not listen any more, by force."""
        if self._is_closing:
            return
        self._is_closing = True
        if self._turn is not None:
            self._turn.forget()
        grace_s = self.settings.lane.stop_grace_s
        is_whole = len(self._ready) == self._num_workers and self._loss is None
        if is_whole and not is_broken:
            for rank in self._ready:
                try:
                    self._mailbox.post(rank, None)
                except OSError:
                    logger.debug("rank %d was gone before it was dismissed", rank)
            self._thread.join(grace_s)
        elif self._loss is not None and self._loss.fault is Fault.rank_died:
            self._thread.join(_CAUSE_S)
        if self._thread.is_alive():
            self._group.release()
            self._thread.join(grace_s)
        self._mailbox.close()

    # --- the worker group -----------------------------------------------------------------------

    def _run(self) -> None:
        own = self.settings
        worker = WorkerSettings(self._mailbox.address, own.task, own.lane.max_memory_growth_mib)
        reason = "its worker group ended"
        try:
            self._group.run(worker, own, self.shape)
        except BaseException as exc:  # noqa: BLE001 - whatever ended the run is the lane's end
            reason = f"its worker group ended with {type(exc).__name__}: {exc}"
        kills = num_oom_kills() - self._num_oom_kills
        fault = fault_of_group(reason, kills)
        with self._changed:
            if self._loss is not None and self._loss.fault is Fault.rank_died and fault is not None:
                self._loss = None  # Now it is known what the rank died of.
            elif not self._is_closing and self._loss is None:
                fault = fault or Fault.rank_died
            if fault is not None:
                self._lose(fault, reason)
            self._changed.notify_all()

    # --- messages; these run in the mailbox's reader threads ------------------------------------

    def _on_message(self, rank: int, message: RankMessage) -> Verdict | TurnCheckpoints | None:
        with self._changed:
            turn = self._turn
            match message:
                case RankReady():
                    self._ready.add(rank)
                    self._files.update(message.files)
                case RankBroken():
                    self._lose(message.fault, f"rank {rank} cannot serve: {message.error}")
                case RankPreempted():
                    self._preempt(f"rank {rank} was told that its node is going away")
                case RankPulse() if message.turn == 0:
                    self._places[rank] = message.place
                case VerdictRequest():
                    if turn is None or turn.turn.index != message.turn:
                        return Verdict.STOP
                    return self._verdict(turn, rank, message.index)
                case CheckpointsRequest():
                    if turn is None or turn.turn.index != message.turn:
                        return TurnCheckpoints(0, (), is_validating=False, is_stopping=True)
                    return turn.checkpoints()
                case RankReport() | RankSample() | RankPulse() | TurnEnded():
                    if isinstance(message, TurnEnded):
                        self._files.update(message.files)
                    if turn is not None and turn.turn.index == message.turn:
                        turn.hear(rank, message)
                        self._end_if_it_hangs(turn)
            self._changed.notify_all()
            return None

    def _on_validated(self) -> None:
        with self._changed:
            if self._turn is not None:
                self._turn.take_validated()
            self._changed.notify_all()

    def _on_gone(self, rank: int) -> None:
        with self._changed:
            if not self._is_closing:
                turn = self._turn
                where = f" in turn {turn.turn.index} (trial {turn.spec.number})" if turn else ""
                self._lose(Fault.rank_died, f"rank {rank} went away{where}")
            self._changed.notify_all()

    def _preempt(self, reason: str) -> None:
        """Save what can be saved: the running trial ends at its next report, and the lane then."""
        self._preemption = reason
        if self._turn is not None and self._turn.is_posted:
            self._turn.preempt(reason)
        else:
            self._lose(Fault.preempted, reason)

    def _leave_turn(self) -> None:
        self._turn = None
        if self._preemption is not None:
            self._lose(Fault.preempted, self._preemption)

    def _lose(self, fault: Fault, reason: str) -> None:
        """No turn is possible any more; the first reason stands."""
        if self._loss is not None:
            return
        if self._preemption is not None and fault is not Fault.preempted:
            fault, reason = Fault.preempted, f"{self._preemption}, and {reason}"
        self._loss = Outcome.failed(fault, f"The lane was lost: {reason}")

    def _end_if_it_hangs(self, turn: RunningTurn) -> None:
        if self._loss is not None or turn.is_stopping:
            return
        outcome = turn.hang(self.settings.lane)
        if outcome is None:
            return
        self._loss = outcome
        if outcome.fault is Fault.uneven_reports and outcome.error is not None:
            turn.fail(outcome.fault, outcome.error)

    def _verdict(self, turn: RunningTurn, rank: int, index: int) -> Verdict:
        """The verdict for a report: waits at a rung, but never long, and is the same for all.

        Rank 0's question settles it. The other ranks wait for that: Ray's report has a barrier, so
        rank 0 is in the same report and will ask.
        """

        def is_over() -> bool:
            return turn.is_stopping or self._loss is not None

        if rank > 0:
            self._changed.wait_for(
                lambda: index in turn.verdicts or is_over() or turn.has_left(0),
            )
        else:
            longest = self.settings.lane.verdict_wait_s
            wait_s = max(longest, _MAX_WAIT_SHARE * turn.since_last_report_s())
            self._changed.wait_for(
                lambda: (
                    is_over()
                    or (
                        turn.has_report(index)
                        and (turn.decision_at != index or turn.decided >= index)
                    )
                ),
                timeout=wait_s,
            )
        ended = Verdict.STOP if is_over() else Verdict.CONTINUE
        verdict = turn.verdicts.setdefault(index, ended)
        self._changed.notify_all()
        return verdict

    # --- helpers --------------------------------------------------------------------------------

    def _post(self, turn: RunningTurn, until: float) -> bool:
        """Give the ranks their turn; False where they are not there by `until`, or never will."""
        own = self.settings
        while len(self._ready) < self._num_workers and self._loss is None:
            if time.monotonic() > self._started_s + own.lane.start_timeout_s:
                self._lose(
                    Fault.start_timeout,
                    f"its workers did not start within {own.lane.start_timeout_s:g} s. If the"
                    " cluster is slow or busy, raise lane.start_timeout_s."
                    + "".join(f"\nrank {rank} is at {at}" for rank, at in self._places.items()),
                )
            elif not self._changed.wait(until - time.monotonic()):
                return False
        if self._loss is not None:
            return False
        for rank in range(self._num_workers):
            try:
                self._mailbox.post(rank, turn.turn)
            except OSError as exc:
                self._lose(Fault.retired, f"rank {rank} was gone before its turn: {exc}")
                return False
        turn.post()
        return True

    def _wait(self, turn: RunningTurn, until: float) -> None:
        """Wait until there is something to decide, the turn is over, or it is time."""
        while not (turn.decision_at is not None or turn.is_over):
            if self._loss is not None and not turn.have_all_left:
                return
            if turn.has_failed:
                turn.stop(self.settings.lane.stop_grace_s)  # Others may wait for it.
                self._changed.notify_all()
            if time.monotonic() >= turn.leave_by_s:
                if not turn.have_all_left:
                    self._lose(Fault.retired, "some ranks did not leave a turn that had ended")
                turn.give_up()
                return
            wait_s = min(until, turn.leave_by_s) - time.monotonic()
            if not self._changed.wait(wait_s) and time.monotonic() >= until:
                return
