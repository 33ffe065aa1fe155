"""A lane: one long-lived `TorchTrainer` run whose workers serve trial after trial.

The lane lives in the process of its Tune trainable. Ranks talk to it through the mailbox; it
joins their reports, gives every rank the same verdict for the same report, and knows when a
turn is over on all ranks.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from heats.asha import next_milestone
from heats.errors import LaneLostError
from heats.lane.group import RayWorkerGroup
from heats.lane.health import Patience, hang
from heats.lane.mailbox import Mailbox
from heats.lane.messages import (
    RankBroken,
    RankPulse,
    RankReady,
    RankReport,
    RankSample,
    Turn,
    TurnEnded,
    VerdictRequest,
)
from heats.lane.worker import WorkerSettings
from heats.trial import Ending, Outcome, Report, Verdict, resource_spent

if TYPE_CHECKING:
    from heats.config import AshaConf, LaneConf
    from heats.lane.group import WorkerGroup
    from heats.lane.messages import RankMessage
    from heats.lane.task import TaskRef
    from heats.trial import Objective, TrialSpec

logger = logging.getLogger(__name__)

_MAX_WAIT_SHARE = 0.02
"""Largest share of the time between two reports that a rank may wait for a verdict at a rung."""


@dataclass(frozen=True, slots=True)
class LaneSettings:
    """Everything a lane needs that does not change from trial to trial.

    `asha` None: no report needs a decision, so verdicts never wait. `resources_per_worker` are
    Ray's; `storage_path` is where Ray Train keeps what is the lane's own; `sweep_id` is this driver
    run's own, and names what its lanes reserve.
    """

    sweep_id: str
    task: TaskRef
    objective: Objective
    asha: AshaConf | None
    lane: LaneConf
    num_workers: int
    use_gpu: bool
    resources_per_worker: dict[str, float]
    storage_path: str
    tracking_uri: str
    seed: int
    system_interval_s: float | None


@dataclass(slots=True)
class _TurnState:
    """What the lane knows of the turn that runs; guarded by the lane's condition."""

    turn: Turn
    is_posted: bool = False
    arrived: dict[int, dict[int, Report]] = field(default_factory=dict)
    """Reports that not every rank has made yet: index, rank, report."""
    reports: list[Report] = field(default_factory=list)
    taken: int = 0
    num_reports: int = 0
    decided: int = 0
    decision_at: int | None = None
    next_rung: int | None = None
    is_stopping: bool = False
    leave_by_s: float = math.inf
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    last_report_s: float = field(default_factory=time.monotonic)
    pulses: dict[int, RankPulse] = field(default_factory=dict)
    ended: dict[int, TurnEnded] = field(default_factory=dict)


class Lane:
    """The driver's side of one worker group.

    For each trial `begin`, `gather` until it gives an outcome, and `stop` where the trial is to end
    early; `close` at the end.
    """

    def __init__(self, settings: LaneSettings, group: WorkerGroup | None = None) -> None:
        """Start the ranks; `group` None: in a `TorchTrainer` run."""
        self._settings = settings
        self._group = group or RayWorkerGroup(settings.sweep_id)
        self._changed = threading.Condition()
        self._ready: dict[int, RankReady] = {}
        self._state: _TurnState | None = None
        self._num_turns = 0
        self._lost: str | None = None
        self._is_closing = False
        self._started_s = time.monotonic()
        self._mailbox = Mailbox(self._group.host(), self._on_message, self._on_gone)
        self._thread = threading.Thread(target=self._run, daemon=True, name="heats-lane")
        self._thread.start()

    @property
    def is_usable(self) -> bool:
        """Whether the lane can take a turn now."""
        return self._lost is None and not self._is_closing and self._state is None

    @property
    def lost(self) -> str | None:
        """Why the lane can take no turn any more; None where it can."""
        return self._lost

    def begin(self, spec: TrialSpec) -> None:
        """Give the lane a trial; its ranks get it as soon as all of them are there."""
        with self._changed:
            self._num_turns += 1
            self._state = _TurnState(Turn(self._num_turns, spec), next_rung=self._next_rung(0))

    def gather(self) -> tuple[list[Report], Outcome | None]:
        """Reports since the last call, once there is something to decide or enough time passed.

        Calling it says that the turn goes on after everything gathered before. The outcome is None
        while the turn runs; when it is not, every report has been gathered and the turn is over.

        Raises:
            LaneLostError: A rank or the worker group went away, and no report is left to gather.
        """
        until = time.monotonic() + self._settings.lane.flush_interval_s
        with self._changed:
            if self._state is not None and self._state.is_stopping and not self._state.is_posted:
                self._state = None
                return [], Outcome(Ending.STOPPED)
            state = self._posted_turn(until)
            if state is None:
                return [], None
            state.decided = state.taken
            if state.decision_at is not None and state.decision_at <= state.decided:
                state.decision_at = None
            self._changed.notify_all()
            while not (self._lost or state.decision_at is not None or self._all_ended()):
                if self._has_raised(state):
                    self._request_stop(state)  # Others may wait for it: they leave as well.
                if time.monotonic() >= state.leave_by_s:
                    self._give_up(state)
                    break
                wait_s = min(until, state.leave_by_s) - time.monotonic()
                if not self._changed.wait(wait_s) and time.monotonic() >= until:
                    break
            if self._all_ended() and self._has_raised(state):
                self._take_incomplete(state)
            reports, state.reports = state.reports, []
            state.taken = state.num_reports
            if self._all_ended():
                self._state = None
                return reports, _outcome(list(state.ended.values()))
            if not reports:
                self._raise_if_lost()
        return reports, None

    def request_stop(self) -> None:
        """End the running turn at its ranks' next report; `gather` goes on until its outcome.

        Ranks that do not come to one within `lane.stop_grace_s` count as stopped and cost the lane.
        """
        with self._changed:
            if self._state is not None:
                self._request_stop(self._state)

    def stop(self) -> bool:
        """End the running turn at its ranks' next report; False where they did not in time."""
        with self._changed:
            if self._is_closing:
                return True
            if self._state is None or self._lost is not None or not self._state.is_posted:
                self._state = None
                return self._lost is None
            self._request_stop(self._state)
            is_over = self._changed.wait_for(
                lambda: self._lost is not None or self._all_ended(),
                timeout=self._settings.lane.stop_grace_s,
            )
            self._state = None
            return is_over and self._lost is None

    def close(self, *, is_broken: bool = False) -> None:
        """End the worker group: by word, or where ranks do not listen any more, by force."""
        if self._is_closing:
            return
        self._is_closing = True
        grace_s = self._settings.lane.stop_grace_s
        is_whole = len(self._ready) == self._settings.num_workers and self._lost is None
        if is_whole and not is_broken:
            for rank in self._ready:
                try:
                    self._mailbox.post(rank, None)
                except OSError:
                    logger.debug("rank %d was gone before it was dismissed", rank)
            self._thread.join(grace_s)
        if self._thread.is_alive():
            self._group.release()
            self._thread.join(grace_s)
        self._mailbox.close()

    # --- the worker group -----------------------------------------------------------------------

    def _run(self) -> None:
        own = self._settings
        worker = WorkerSettings(
            self._mailbox.address,
            own.task,
            own.seed,
            own.tracking_uri,
            own.system_interval_s,
            own.lane.max_memory_growth_mib,
        )
        reason = "its worker group ended"
        try:
            self._group.run(worker, own)
        except BaseException as exc:  # noqa: BLE001 - whatever ended the run is the lane's end
            reason = f"its worker group ended with {type(exc).__name__}: {exc}"
        with self._changed:
            if not self._is_closing and self._lost is None:
                self._lost = reason
            self._changed.notify_all()

    # --- messages; these run in the mailbox's reader threads ------------------------------------

    def _on_message(self, rank: int, message: RankMessage) -> Verdict | None:
        with self._changed:
            state = self._state
            match message:
                case RankReady():
                    self._ready[rank] = message
                case RankBroken():
                    self._lost = f"rank {rank} cannot serve: {message.error}"
                case RankReport():
                    if state is not None and state.turn.index == message.turn:
                        self._arrive(state, rank, message)
                case RankSample():
                    if state is not None and state.turn.index == message.turn:
                        state.reports.append(message.report)
                case RankPulse():
                    if state is not None and state.turn.index == message.turn:
                        state.pulses[rank] = message
                        self._end_if_it_hangs(state)
                case VerdictRequest():
                    if state is None or state.turn.index != message.turn:
                        return Verdict.STOP
                    return self._verdict(state, rank, message.index)
                case TurnEnded():
                    if state is not None and state.turn.index == message.turn:
                        state.ended[rank] = message
            self._changed.notify_all()
            return None

    def _on_gone(self, rank: int) -> None:
        with self._changed:
            if self._lost is None and not self._is_closing:
                turn = self._state.turn if self._state else None
                where = f" in turn {turn.index} (trial {turn.spec.number})" if turn else ""
                self._lost = f"rank {rank} went away{where}"
            self._changed.notify_all()

    def _end_if_it_hangs(self, state: _TurnState) -> None:
        if self._lost is not None or state.is_stopping:
            return
        own = self._settings
        patience = Patience(own.lane.report_timeout_s, own.lane.hang_timeout_s)
        outcome = hang(own.num_workers, state.pulses, state.ended, patience)
        if outcome is None:
            return
        self._lost = outcome.error
        if outcome.ending is Ending.RAISED:
            for rank in range(own.num_workers):
                raised = TurnEnded(state.turn.index, rank, Ending.RAISED, None, outcome.error)
                state.ended[rank] = raised

    def _arrive(self, state: _TurnState, rank: int, message: RankReport) -> None:
        state.arrived.setdefault(message.index, {})[rank] = message.report
        while len(of_ranks := state.arrived.get(state.num_reports + 1, {})) == (
            self._settings.num_workers
        ):
            del state.arrived[state.num_reports + 1]
            uris = (of_ranks[rank].checkpoint for rank in sorted(of_ranks))
            checkpoint = next((uri for uri in uris if uri is not None), None)
            self._take(state, replace(of_ranks[0], checkpoint=checkpoint))

    def _take_incomplete(self, state: _TurnState) -> None:
        """Take rank 0's metrics of reports that other ranks never made; not their checkpoints.

        Only of a trial that failed: one that goes on later makes them again, and whole.
        """
        for _, of_ranks in sorted(state.arrived.items()):
            if 0 in of_ranks:
                self._take(state, replace(of_ranks[0], checkpoint=None))
        state.arrived.clear()

    def _take(self, state: _TurnState, report: Report) -> None:
        state.reports.append(report)
        state.num_reports += 1
        if self._settings.asha is None:
            return
        objective = self._settings.objective
        index = state.turn.spec.first_report_index + state.num_reports
        spent = resource_spent(report.metrics, index, objective.resource)
        value = report.metrics.get(objective.name)
        is_lost = value is not None and not math.isfinite(value)
        if is_lost or (state.next_rung is not None and spent >= state.next_rung):
            state.decision_at = state.num_reports
            state.next_rung = self._next_rung(spent)

    def _verdict(self, state: _TurnState, rank: int, index: int) -> Verdict:
        """The verdict for a report: waits at a rung, but never long, and is the same for all.

        Rank 0's question settles it. The other ranks wait for that: Ray's report has a barrier, so
        rank 0 is in the same report and will ask.
        """
        if rank > 0:
            self._changed.wait_for(
                lambda: (
                    index in state.verdicts
                    or state.is_stopping
                    or self._lost is not None
                    or 0 in state.ended
                )
            )
        else:
            now = time.monotonic()
            longest = self._settings.lane.verdict_wait_s
            wait_s = max(longest, _MAX_WAIT_SHARE * (now - state.last_report_s))
            state.last_report_s = now
            self._changed.wait_for(
                lambda: (
                    state.is_stopping
                    or self._lost is not None
                    or (
                        0 not in state.arrived.get(index, {})
                        and (state.decision_at != index or state.decided >= index)
                    )
                ),
                timeout=wait_s,
            )
        is_over = state.is_stopping or self._lost is not None
        verdict = state.verdicts.setdefault(index, Verdict.STOP if is_over else Verdict.CONTINUE)
        self._changed.notify_all()
        return verdict

    # --- helpers --------------------------------------------------------------------------------

    def _next_rung(self, spent: int) -> int | None:
        asha = self._settings.asha
        return None if asha is None else next_milestone(spent, asha)

    def _all_ended(self) -> bool:
        return self._state is not None and len(self._state.ended) == self._settings.num_workers

    def _has_raised(self, state: _TurnState) -> bool:
        return any(ended.ending is Ending.RAISED for ended in state.ended.values())

    def _request_stop(self, state: _TurnState) -> None:
        if not state.is_stopping:
            state.is_stopping = True
            state.leave_by_s = time.monotonic() + self._settings.lane.stop_grace_s
            self._changed.notify_all()

    def _give_up(self, state: _TurnState) -> None:
        """Ranks that were to leave their turn did not: they are stopped, and the lane is lost."""
        self._lost = "some ranks did not leave a turn that had ended"
        for rank in range(self._settings.num_workers):
            left = TurnEnded(state.turn.index, rank, Ending.STOPPED, None, None)
            state.ended.setdefault(rank, left)

    def _posted_turn(self, until: float) -> _TurnState | None:
        """The running turn, once its ranks have it; None where they are not there by `until`."""
        state, own = self._state, self._settings
        if state is None:
            msg = "The lane has no turn; call begin() first."
            raise LaneLostError(msg)
        if state.is_posted:
            return state
        while len(self._ready) < own.num_workers and self._lost is None:
            if time.monotonic() > self._started_s + own.lane.start_timeout_s:
                self._lost = (
                    f"its workers did not start within {own.lane.start_timeout_s:g} s. If the"
                    " cluster is slow or busy, raise lane.start_timeout_s."
                )
            elif not self._changed.wait(until - time.monotonic()):
                return None
        self._raise_if_lost()
        for rank in range(own.num_workers):
            try:
                self._mailbox.post(rank, state.turn)
            except OSError as exc:
                msg = f"The lane lost rank {rank} before turn {state.turn.index}: {exc}"
                raise LaneLostError(msg) from exc
        state.is_posted = True
        state.last_report_s = time.monotonic()
        return state

    def _raise_if_lost(self) -> None:
        if self._lost is not None:
            msg = f"The lane was lost: {self._lost}"
            raise LaneLostError(msg)


def _outcome(ended: list[TurnEnded]) -> Outcome:
    """The end of a turn from the ends of its ranks; equal errors become one with a rank list."""
    ranks_of: dict[str, list[int]] = {}
    for each in sorted(ended, key=lambda end: end.rank):
        if each.ending is Ending.RAISED and each.error is not None:
            ranks_of.setdefault(each.error, []).append(each.rank)
    if ranks_of:
        errors = [
            f"rank {', '.join(map(str, ranks))}:\n{error}" if len(ended) > 1 else error
            for error, ranks in ranks_of.items()
        ]
        return Outcome(Ending.RAISED, error="\n".join(errors))
    if any(each.ending is Ending.STOPPED for each in ended):
        return Outcome(Ending.STOPPED)
    returned = next((each.returned for each in ended if each.rank == 0), None)
    return Outcome(Ending.RETURNED, returned=returned)
