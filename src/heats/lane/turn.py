"""A turn as its lane sees it: what its ranks said, joined, and what they were told."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from heats.asha import next_decision
from heats.lane.health import Patience, fault_of_ranks, hang
from heats.lane.messages import RankPulse, RankReport, RankSample, Turn, TurnEnded
from heats.trial import Ending, Fault, Outcome, Verdict, resource_spent

if TYPE_CHECKING:
    from heats.config import AshaConf, LaneConf, PbtConf
    from heats.lane.messages import TurnCheckpoints
    from heats.lane.reports import TurnReports
    from heats.trial import Objective, Report, TrialSpec

_PREEMPTION_GRACE_S = 30.0
"""How long a trial has to come to a report when its node is going away: what spot markets give."""

RankSaid = RankReport | RankSample | RankPulse | TurnEnded


class RunningTurn:
    """One turn, from its beginning until every rank has left it; guarded by the lane's condition.

    `verdicts` are those given so far, by report; `decided` is the number of reports that the driver
    has seen and answered, `decision_at` the one that it has to answer now, None: no one.
    """

    def __init__(
        self,
        turn: Turn,
        made: TurnReports,
        num_ranks: int,
        objective: Objective,
        pace: AshaConf | PbtConf | None,
    ) -> None:
        self.turn, self._made, self._num_ranks = turn, made, num_ranks
        self._objective, self._pace = objective, pace
        self._next_rung = next_decision(0, pace)
        self._arrived: dict[int, dict[int, RankReport]] = {}
        self._reports: list[Report] = []
        self._taken = self._num_reports = self._num_arrived = 0
        self._pulses: dict[int, RankPulse] = {}
        self._ended: dict[int, TurnEnded] = {}
        self._preemption: str | None = None
        self._last_report_s = time.monotonic()
        self.is_posted = self.is_stopping = False
        self.leave_by_s = math.inf
        self.decided = 0
        self.decision_at: int | None = None
        self.verdicts: dict[int, Verdict] = {}

    @property
    def spec(self) -> TrialSpec:
        """The attempt at a trial that runs in it."""
        return self.turn.spec

    @property
    def have_all_left(self) -> bool:
        """Whether every rank has left it."""
        return len(self._ended) == self._num_ranks

    @property
    def is_over(self) -> bool:
        """Whether every rank has left it, and no checkpoint is still to be validated."""
        return self.have_all_left and not self._made.is_validating

    @property
    def has_failed(self) -> bool:
        """Whether a rank has raised; the others may wait for it."""
        return any(each.ending is Ending.FAILED for each in self._ended.values())

    def has_left(self, rank: int) -> bool:
        """Whether the rank has left it."""
        return rank in self._ended

    # --- what ranks say -------------------------------------------------------------------------

    def hear(self, rank: int, said: RankSaid) -> None:
        """Take a message of a rank."""
        match said:
            case RankReport():
                self._arrive(rank, said)
            case RankSample():
                self._reports.append(said.report)
            case RankPulse():
                self._pulses[rank] = said
            case TurnEnded():
                self._ended[rank] = said

    def has_report(self, index: int) -> bool:
        """Whether all ranks have made report `index` (from 1), or rank 0 has not yet."""
        return 0 not in self._arrived.get(index, {})

    def since_last_report_s(self) -> float:
        """Seconds since the last call, which is when rank 0 made its last report."""
        now = time.monotonic()
        before, self._last_report_s = self._last_report_s, now
        return now - before

    def _arrive(self, rank: int, message: RankReport) -> None:
        self._arrived.setdefault(message.index, {})[rank] = message
        while len(self._arrived.get(self._num_arrived + 1, {})) == self._num_ranks:
            self._num_arrived += 1
            self._made.add(self._arrived.pop(self._num_arrived))
        self.take_validated()

    def take_validated(self) -> None:
        """Take the reports whose checkpoints need no validation, or have it now."""
        for report in self._made.take():
            self._take(report)

    def _take(self, report: Report) -> None:
        self._reports.append(report)
        self._num_reports += 1
        if self._pace is None:
            return
        index = self.spec.first_report_index + self._num_reports
        spent = resource_spent(report.metrics, index, self._objective.resource)
        value = report.metrics.get(self._objective.name)
        is_lost = value is not None and not math.isfinite(value)
        if is_lost or (self._next_rung is not None and spent >= self._next_rung):
            self.decision_at = self._num_reports
            self._next_rung = next_decision(spent, self._pace)

    # --- what the driver says and learns --------------------------------------------------------

    def post(self) -> None:
        """Every rank has it now."""
        self.is_posted = True
        self._last_report_s = time.monotonic()

    def go_on(self) -> None:
        """The driver has seen every report taken so far, and the turn goes on."""
        self.decided = self._taken
        if self.decision_at is not None and self.decision_at <= self.decided:
            self.decision_at = None

    def take_reports(self) -> list[Report]:
        """Reports since the last call.

        Of a turn that failed they include rank 0's metrics of reports that others never made, but
        not their checkpoints: an attempt that goes on makes those again, and whole.
        """
        if self.is_over and self.has_failed:
            for _, of_ranks in sorted(self._arrived.items()):
                if 0 in of_ranks:
                    self._take(replace(of_ranks[0].report, checkpoint=None))
            self._arrived.clear()
        reports, self._reports = self._reports, []
        self._taken = self._num_reports
        return reports

    def stop(self, grace_s: float) -> None:
        """Let ranks leave at their next report, within `grace_s` seconds."""
        if not self.is_stopping:
            self.is_stopping = True
            self.leave_by_s = time.monotonic() + grace_s

    def preempt(self, reason: str) -> None:
        """Let ranks leave at their next report: their node is going away."""
        if not self.is_stopping:
            self._preemption = reason
            self.stop(_PREEMPTION_GRACE_S)

    def give_up(self) -> None:
        """Ranks that were to leave did not, or checkpoints are not validated: it counts as stopped.

        What was not validated in time is dropped: an attempt that goes on makes it again.
        """
        is_undone = self._made.is_validating
        self.forget()
        for rank in range(self._num_ranks):
            ended = self._ended.get(rank)
            if ended is None or (is_undone and ended.ending is Ending.RETURNED):
                self._ended[rank] = TurnEnded(self.turn.index, rank, Ending.STOPPED)

    def forget(self) -> None:
        """Nobody will learn of its end: validations are cancelled."""
        self._made.cancel()

    def fail(self, fault: Fault, error: str) -> None:
        """End it for all ranks, whatever they do."""
        for rank in range(self._num_ranks):
            self._ended[rank] = TurnEnded(self.turn.index, rank, Ending.FAILED, None, error, fault)

    def checkpoints(self) -> TurnCheckpoints:
        """The checkpoints that it has reported, for a rank that asks."""
        return self._made.checkpoints(is_stopping=self.is_stopping)

    # --- how it ends ----------------------------------------------------------------------------

    def hang(self, conf: LaneConf) -> Outcome | None:
        """How it ends where it will not by itself; None while it may go on."""
        patience = Patience(conf.report_timeout_s, conf.hang_timeout_s)
        return hang(self._num_ranks, self._pulses, self._ended, patience)

    def outcome(self) -> Outcome:
        """The end of the turn from the ends of its ranks; equal errors are one with a rank list."""
        ended = [self._ended[rank] for rank in sorted(self._ended)]
        failed = [each for each in ended if each.ending is Ending.FAILED]
        if failed:
            fault = fault_of_ranks(each.fault or Fault.error for each in failed)
            return Outcome.failed(fault, _joined(failed, self._num_ranks))
        if any(each.ending is Ending.STOPPED for each in ended):
            if self._preemption is not None:
                return Outcome.failed(Fault.preempted, self._preemption)
            return Outcome(Ending.STOPPED)
        returned = next((each.returned for each in ended if each.rank == 0), None)
        return Outcome(Ending.RETURNED, returned=returned)


def _joined(failed: list[TurnEnded], num_ranks: int) -> str:
    ranks_of: dict[str, list[int]] = {}
    for each in failed:
        ranks_of.setdefault(each.error or "no message", []).append(each.rank)
    if num_ranks == 1 or (len(ranks_of) == 1 and len(failed) == num_ranks):
        return next(iter(ranks_of))
    texts = (f"rank {', '.join(map(str, ranks))}:\n{error}" for error, ranks in ranks_of.items())
    return "\n".join(texts)
