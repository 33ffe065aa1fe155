from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from tests.fakes import FakeValidator, fake_spec

from heats.config import AshaConf, Direction, LaneConf
from heats.lane.lane import Lane, LaneSettings
from heats.lane.mailbox import RankMailbox
from heats.lane.messages import (
    CheckpointsRequest,
    RankBroken,
    RankPreempted,
    RankPulse,
    RankReady,
    RankReport,
    RankSample,
    RankStarting,
    TurnCheckpoints,
    TurnEnded,
    VerdictRequest,
)
from heats.lane.task import TaskRef
from heats.lane.validation import VALIDATED, Validated, ValidationTask
from heats.trial import Ending, Fault, LaneShape, Objective, Outcome, Report, TrialSpec, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from heats.lane.messages import Turn
    from heats.lane.worker import WorkerSettings

CONTINUE, STOP, *_ = Verdict
RETURNED, STOPPED, FAILED = Ending
LONG_S = 5.0
T = TypeVar("T")


class Rank:
    """A rank with the real mailbox, told by the test what its train function does."""

    def __init__(self, number: int, mailbox: RankMailbox) -> None:
        self.number, self._mailbox = number, mailbox
        self._thread = ThreadPoolExecutor(1)
        self.turn: Turn | None = None

    def soon(self, call: Callable[[], T]) -> Future[T]:
        return self._thread.submit(call)

    def says(self, message: Any) -> None:
        self._mailbox.send(message)

    def ready(self) -> None:
        self.says(RankStarting(self.number))
        self.says(RankReady(self.number))

    def takes_turn(self) -> Turn:
        self.turn = self._mailbox.next_turn()
        assert self.turn is not None
        self.index = 0
        return self.turn

    def reports(self, loss: float = 0.5, *, checkpoint: str | None = None) -> Future[Verdict]:
        """Report and ask, as `ray.train.report` does; the verdict comes in its own time."""
        self.makes_report(loss, checkpoint=checkpoint)
        assert self.turn is not None
        request = VerdictRequest(self.turn.index, self.index)
        return self._thread.submit(self._mailbox.ask, request)

    def makes_report(self, loss: float = 0.5, *, checkpoint: str | None = None) -> None:
        """Say a report, without a question."""
        assert self.turn is not None
        self.index += 1
        metrics = {"epoch": self.index, "loss": loss} if self.number == 0 else {}
        self.says(RankReport(self.turn.index, self.index, Report(0.0, metrics, checkpoint)))

    def reports_here(self) -> Verdict:
        """Report in the calling thread."""
        assert self.turn is not None
        self.makes_report()
        return self.asks(VerdictRequest(self.turn.index, self.index))

    def asks_for_checkpoints(self) -> TurnCheckpoints:
        assert self.turn is not None
        return self._mailbox.ask(CheckpointsRequest(self.turn.index))

    def asks(self, request: VerdictRequest) -> Verdict:
        return self._mailbox.ask(request)

    def ends(
        self, ending: Ending = RETURNED, returned: float | None = None, error: str | None = None
    ) -> None:
        assert self.turn is not None
        fault = None if error is None else Fault.error
        self.says(TurnEnded(self.turn.index, self.number, ending, returned, error, fault))

    def dies(self) -> None:
        self._mailbox.close()

    def is_dismissed(self) -> bool:
        return self._mailbox.next_turn() is None


class Group:
    """Gives the test its ranks; runs until `over` is called, or the ranks are ended by force."""

    def __init__(self) -> None:
        self.workers: queue.Queue[WorkerSettings] = queue.Queue()
        self.num_released = 0
        self._is_over = threading.Event()
        self._error: Exception | None = None

    def host(self) -> str:
        return "127.0.0.1"

    def run(self, worker: WorkerSettings, lane: LaneSettings, shape: LaneShape) -> None:
        self.workers.put(worker)
        self._is_over.wait()
        if self._error is not None:
            raise self._error

    def release(self) -> None:
        self.num_released += 1
        self.over()
        self.over()

    def over(self, error: Exception | None = None) -> None:
        self._error = self._error or error
        self._is_over.set()


class Lanes:
    """Makes lanes, and ends them with the test."""

    def __init__(self) -> None:
        self.group = Group()
        self.validator = FakeValidator()
        self._lanes: list[Lane] = []

    def empty(self, num_ranks: int = 1, *, asha: AshaConf | None = None, **conf: Any) -> Lane:
        """A lane whose ranks have not come yet."""
        values: dict[str, Any] = {"flush_interval_s": 0.05, "verdict_wait_s": LONG_S}
        settings = LaneSettings(
            sweep_id="heats-1",
            task=TaskRef("train.py", None),
            objective=Objective("loss", Direction.minimize),
            pace=asha,
            lane=LaneConf(**{**values, **conf}),
            storage_path="lanes",
            tracking_uri="sqlite:///mlflow.db",
            seed=0,
            system_interval_s=None,
        )
        shape = LaneShape(num_ranks, False, {"CPU": 1.0})
        self._lanes.append(Lane(settings, shape, self.group, self.validator))
        return self._lanes[-1]

    def with_ranks(self, num_ranks: int = 1, **options: Any) -> tuple[Lane, list[Rank]]:
        lane = self.empty(num_ranks, **options)
        address = self.group.workers.get(timeout=LONG_S).address
        ranks = [Rank(number, RankMailbox(address)) for number in range(num_ranks)]
        for rank in ranks:
            rank.ready()
        return lane, ranks

    def in_turn(self, num_ranks: int = 1, **options: Any) -> tuple[Lane, list[Rank]]:
        """A lane whose ranks have taken turn 1."""
        lane, ranks = self.with_ranks(num_ranks, **options)
        begin(lane, ranks, fake_spec())
        return lane, ranks

    def close(self) -> None:
        self.group.over()
        for lane in self._lanes:
            lane.close()


def begin(lane: Lane, ranks: list[Rank], trial: TrialSpec) -> None:
    lane.begin(trial)
    taken = [rank.soon(rank.takes_turn) for rank in ranks]
    while not all(turn.done() for turn in taken):
        assert lane.gather() == ([], None)


def gather(lane: Lane) -> tuple[list[Report], Outcome | None]:
    """The next that there is to gather."""
    until = time.monotonic() + LONG_S
    while time.monotonic() < until:
        reports, outcome = lane.gather()
        if reports or outcome is not None:
            return reports, outcome
    raise TimeoutError


def lost(lane: Lane, fault: Fault) -> str:
    """The error of the end of a turn that the lane was lost with."""
    reports, outcome = gather(lane)
    assert reports == []
    assert outcome is not None
    assert outcome.fault is fault
    assert outcome.error is not None
    return outcome.error


def lane_stop(lane: Lane) -> Future[bool]:
    """Stop the lane's turn from another thread, as it waits for the ranks."""
    return ThreadPoolExecutor(1).submit(lane.stop)


def losses(reports: list[Report]) -> list[float]:
    return [report.metrics["loss"] for report in reports]


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    made = Lanes()
    yield made
    made.close()


# --- turns --------------------------------------------------------------------------------------


def test_ranks_serve_turn_after_turn(lanes: Lanes) -> None:
    lane, ranks = lanes.with_ranks(2)
    for number in range(3):
        begin(lane, ranks, fake_spec(number))
        assert [rank.turn.spec.number for rank in ranks if rank.turn] == [number] * 2
        assert not lane.is_usable
        verdicts = [rank.reports(0.1 * number) for rank in ranks]
        assert [verdict.result(LONG_S) for verdict in verdicts] == [CONTINUE] * 2
        for rank in ranks:
            rank.ends(returned=float(rank.number))
        reports, outcome = gather(lane)
        if outcome is None:
            more, outcome = gather(lane)
            reports += more
        assert losses(reports) == [0.1 * number]
        assert outcome == Outcome(RETURNED, returned=0.0)
        assert lane.is_usable


def test_turn_is_over_only_when_every_rank_left_it(lanes: Lanes) -> None:
    lane, ranks = lanes.in_turn(2)
    ranks[0].ends(returned=0.5)
    assert lane.gather() == ([], None)
    ranks[1].ends()
    assert gather(lane) == ([], Outcome(RETURNED, returned=0.5))


def test_reports_before_the_end_are_gathered_with_it(lanes: Lanes) -> None:
    lane, (rank,) = lanes.in_turn(asha=AshaConf(max_resource=9))
    first = rank.reports(0.9)
    assert losses(gather(lane)[0]) == [0.9]
    assert lane.gather() == ([], None)
    assert first.result(LONG_S) is CONTINUE
    for loss in (0.8, 0.7):
        rank.reports(loss).add_done_callback(lambda verdict: verdict.result())
    rank.soon(rank.ends)
    reports: list[float] = []
    outcome = None
    while outcome is None:
        more, outcome = gather(lane)
        reports += losses(more)
    assert reports == [0.8, 0.7]
    assert outcome.ending is RETURNED


def test_late_message_of_an_earlier_turn_is_ignored(lanes: Lanes) -> None:
    lane, (rank,) = lanes.in_turn()
    rank.ends()
    gather(lane)
    before = rank.turn
    begin(lane, [rank], fake_spec(1))
    assert before is not None
    rank.says(RankReport(before.index, 1, Report(0.0, {"loss": 0.5})))
    rank.says(RankSample(before.index, Report(0.0, {"system/x": 1.0}, is_system=True)))
    rank.says(TurnEnded(before.index, 0, RETURNED, 0.1, None))
    asked = VerdictRequest(before.index, 9)
    assert rank.soon(lambda: rank.asks(asked)).result(LONG_S) is STOP
    assert lane.gather() == ([], None)


def test_trial_waits_for_a_lane_whose_ranks_load(lanes: Lanes) -> None:
    lane = lanes.empty()
    lane.begin(fake_spec())
    assert lane.gather() == ([], None)
    rank = Rank(0, RankMailbox(lanes.group.workers.get(timeout=LONG_S).address))
    rank.ready()
    turn = rank.soon(rank.takes_turn)
    while not turn.done():
        assert lane.gather() == ([], None)
    assert turn.result().index == 1


# --- verdicts -----------------------------------------------------------------------------------


def test_report_between_rungs_does_not_wait(lanes: Lanes) -> None:
    _, (rank,) = lanes.in_turn(asha=AshaConf(min_resource=4, max_resource=9))
    assert rank.reports().result(1) is CONTINUE


def test_report_never_waits_where_nothing_is_decided(lanes: Lanes) -> None:
    _, (rank,) = lanes.in_turn(asha=None)
    assert rank.reports(float("nan")).result(1) is CONTINUE


def test_rung_waits_for_the_driver_to_go_on(lanes: Lanes) -> None:
    lane, (rank,) = lanes.in_turn(asha=AshaConf(max_resource=9), verdict_wait_s=LONG_S)
    verdict = rank.reports()
    assert losses(gather(lane)[0]) == [0.5]
    assert not verdict.done()
    lane.gather()
    assert verdict.result(LONG_S) is CONTINUE


def test_value_that_is_not_finite_waits_for_the_driver_off_the_rungs_too(lanes: Lanes) -> None:
    lane, (rank,) = lanes.in_turn(asha=AshaConf(min_resource=4, max_resource=9))
    verdict = rank.reports(float("nan"))
    gather(lane)
    assert not verdict.done()
    stopped = lane_stop(lane)
    assert verdict.result(LONG_S) is STOP
    rank.ends(STOPPED)
    assert stopped.result(LONG_S)


def test_all_ranks_stop_at_the_same_report(lanes: Lanes) -> None:
    lane, ranks = lanes.in_turn(3, asha=AshaConf(max_resource=9))
    # Rank 0 asks last: nobody may be told to go on before it was decided.
    verdicts = [ranks[1].reports(), ranks[2].reports(), ranks[0].reports()]
    assert losses(gather(lane)[0]) == [0.5]
    assert not any(verdict.done() for verdict in verdicts)
    stopped = lane_stop(lane)
    assert [verdict.result(LONG_S) for verdict in verdicts] == [STOP] * 3
    for rank in ranks:
        rank.ends(STOPPED)
    assert stopped.result(LONG_S)
    assert lane.is_usable


def test_rank_that_asks_after_the_stop_still_gets_the_verdict_of_its_report(lanes: Lanes) -> None:
    lane, ranks = lanes.in_turn(2, asha=AshaConf(max_resource=9), verdict_wait_s=0.0)
    assert ranks[0].reports().result(LONG_S) is CONTINUE  # The driver was too slow.
    lane.gather()
    stopped = lane_stop(lane)
    assert ranks[1].reports().result(LONG_S) is CONTINUE
    late = [rank.reports() for rank in ranks]
    assert [verdict.result(LONG_S) for verdict in late] == [STOP] * 2
    for rank in ranks:
        rank.ends(STOPPED)
    assert stopped.result(LONG_S)


def test_slow_driver_holds_a_rung_up_no_longer_than_allowed(lanes: Lanes) -> None:
    _, (rank,) = lanes.in_turn(asha=AshaConf(max_resource=9), verdict_wait_s=0.1)
    began = time.monotonic()
    assert rank.reports().result(LONG_S) is CONTINUE
    assert 0.05 < time.monotonic() - began < 1


def test_rung_after_a_restart_counts_from_its_first_report(lanes: Lanes) -> None:
    lane, (rank,) = lanes.with_ranks(asha=AshaConf(min_resource=3, max_resource=3))
    begin(lane, [rank], fake_spec(first_report_index=2))
    report = Report(0.0, {"loss": 0.5})  # No `epoch`: reports are counted, over all attempts.
    rank.says(RankReport(1, 1, report))
    verdict = rank.soon(lambda: rank.asks(VerdictRequest(1, 1)))
    assert gather(lane) == ([report], None)
    assert not verdict.done()
    lane.gather()
    assert verdict.result(LONG_S) is CONTINUE


# --- reports of several ranks ---------------------------------------------------------------------


def test_checkpoint_counts_once_every_rank_has_made_its_report(lanes: Lanes) -> None:
    lane, ranks = lanes.in_turn(2)
    ranks[0].makes_report(0.5, checkpoint="checkpoint-1")
    assert lane.gather() == ([], None)  # Rank 1 may still be uploading its part.
    ranks[1].makes_report(checkpoint="checkpoint-1")
    (report,) = gather(lane)[0]
    assert (report.metrics["loss"], report.checkpoint) == (0.5, "checkpoint-1")


def test_checkpoint_that_only_another_rank_has_counts(lanes: Lanes) -> None:
    lane, ranks = lanes.in_turn(2)
    ranks[1].makes_report(checkpoint="checkpoint-1")
    ranks[0].makes_report(0.25)
    (report,) = gather(lane)[0]
    assert (report.metrics["loss"], report.checkpoint) == (0.25, "checkpoint-1")


def test_report_that_a_dead_rank_never_made_is_made_again_by_the_next_attempt(lanes: Lanes) -> None:
    lane, ranks = lanes.in_turn(2)
    for rank in ranks:
        rank.makes_report(0.5, checkpoint="checkpoint-1")
    assert [report.checkpoint for report in gather(lane)[0]] == ["checkpoint-1"]
    ranks[0].reports(0.25, checkpoint="checkpoint-2")
    ranks[1].dies()
    assert "rank 1 went away" in lost(lane, Fault.rank_died)  # And not the second report.


def test_failed_trial_keeps_the_metrics_of_a_half_made_report(lanes: Lanes) -> None:
    lane, ranks = lanes.in_turn(2)
    ranks[0].makes_report(0.25, checkpoint="checkpoint-1")
    ranks[0].ends(STOPPED)
    ranks[1].ends(FAILED, error="no data")
    reports, outcome = gather(lane)
    assert losses(reports) == [0.25]
    assert [report.checkpoint for report in reports] == [None]
    assert outcome == Outcome.failed(Fault.error, "rank 1:\nno data")


def test_rung_waits_for_the_slowest_rank_and_the_driver(lanes: Lanes) -> None:
    lane, ranks = lanes.in_turn(2, asha=AshaConf(max_resource=9))
    first = ranks[0].reports(0.5)
    assert lane.gather() == ([], None)
    assert not first.done()
    second = ranks[1].reports()
    gather(lane)
    stopped = lane_stop(lane)
    assert [first.result(LONG_S), second.result(LONG_S)] == [STOP, STOP]
    for rank in ranks:
        rank.ends(STOPPED)
    assert stopped.result(LONG_S)


# --- leaving a turn ------------------------------------------------------------------------------


def test_turn_that_is_asked_to_stop_keeps_its_last_report(lanes: Lanes) -> None:
    lane, ranks = lanes.in_turn(2, asha=AshaConf(max_resource=9))
    lane.request_stop()
    assert lane.gather() == ([], None)  # No rank has come to a report yet.
    verdicts = [rank.reports(0.25, checkpoint="checkpoint-1") for rank in ranks]
    assert [verdict.result(LONG_S) for verdict in verdicts] == [STOP] * 2
    for rank in ranks:
        rank.ends(STOPPED)
    reports, outcome = gather(lane)
    while outcome is None:
        more, outcome = gather(lane)
        reports += more
    assert [report.checkpoint for report in reports] == ["checkpoint-1"]
    assert outcome == Outcome(STOPPED)
    assert lane.is_usable


def test_rank_that_never_leaves_its_turn_counts_as_stopped_and_costs_the_lane(
    lanes: Lanes,
) -> None:
    lane, _ = lanes.in_turn(stop_grace_s=0.05)
    lane.request_stop()
    assert gather(lane) == ([], Outcome(STOPPED))
    assert not lane.is_usable


def test_turn_that_no_rank_has_taken_is_left_at_once(lanes: Lanes) -> None:
    lane = lanes.empty()
    lane.begin(fake_spec())
    lane.request_stop()
    assert lane.gather() == ([], Outcome(STOPPED))


# --- errors and losses --------------------------------------------------------------------------


def test_equal_errors_of_ranks_are_one_message(lanes: Lanes) -> None:
    lane, ranks = lanes.in_turn(3)
    for rank, error in zip(ranks, ["no data", "out of memory", "no data"], strict=True):
        rank.ends(FAILED, error=error)
    _, outcome = gather(lane)
    assert outcome == Outcome.failed(Fault.error, "rank 0, 2:\nno data\nrank 1:\nout of memory")
    assert lane.is_usable


def test_error_of_a_single_rank_needs_no_number(lanes: Lanes) -> None:
    lane, (rank,) = lanes.in_turn()
    rank.ends(FAILED, error="no data")
    assert gather(lane)[1] == Outcome.failed(Fault.error, "no data")


def test_other_ranks_stop_at_their_next_report_when_one_raises(lanes: Lanes) -> None:
    lane, ranks = lanes.in_turn(2)
    ranks[1].ends(FAILED, error="no data")

    def goes_on() -> None:
        while ranks[0].reports_here() is CONTINUE:
            time.sleep(0.01)
        ranks[0].ends(STOPPED)

    ranks[0].soon(goes_on)
    reports, outcome = gather(lane)
    if outcome is None:
        more, outcome = gather(lane)
        reports += more
    assert outcome is not None
    assert outcome.ending is FAILED
    assert len(reports) == ranks[0].index
    assert lane.is_usable


def test_lane_is_done_with_when_a_rank_raises_and_another_hangs(lanes: Lanes) -> None:
    lane, ranks = lanes.in_turn(2, stop_grace_s=0.05)
    ranks[1].ends(FAILED, error="no data")
    _, outcome = gather(lane)
    assert outcome == Outcome.failed(Fault.error, "rank 1:\nno data")
    assert not lane.is_usable


def test_rank_that_raises_because_another_died_is_a_loss(lanes: Lanes) -> None:
    lane, ranks = lanes.in_turn(2)
    ranks[1].ends(FAILED, error="connection closed by peer")
    ranks[0].dies()
    assert "rank 0 went away in turn 1 (trial 0)" in lost(lane, Fault.rank_died)


def test_reports_before_a_loss_are_gathered_first(lanes: Lanes) -> None:
    lane, (rank,) = lanes.in_turn()
    rank.reports(0.5, checkpoint="checkpoint-1").result(LONG_S)
    rank.dies()
    reports, outcome = gather(lane)
    assert [report.checkpoint for report in reports] == ["checkpoint-1"]
    assert outcome is None
    assert "rank 0 went away" in lost(lane, Fault.rank_died)
    assert not lane.is_usable


def test_rank_that_waits_for_a_verdict_is_stopped_when_another_dies(lanes: Lanes) -> None:
    lane, ranks = lanes.in_turn(2)
    verdict = ranks[1].reports()
    ranks[0].dies()
    assert verdict.result(LONG_S) is STOP
    assert "rank 0 went away" in lost(lane, Fault.rank_died)


def test_rank_that_cannot_load_is_a_loss_with_its_traceback(lanes: Lanes) -> None:
    lane = lanes.empty()
    lane.begin(fake_spec())
    rank = Rank(0, RankMailbox(lanes.group.workers.get(timeout=LONG_S).address))
    rank.says(RankStarting(0))
    error = "ModuleNotFoundError: No module named 'tokens'"
    rank.says(RankBroken(0, error, Fault.broken_program))
    assert f"rank 0 cannot serve: {error}" in lost(lane, Fault.broken_program)


def test_worker_group_that_ends_is_a_loss(lanes: Lanes) -> None:
    lane, _ = lanes.in_turn()
    lanes.group.over(RuntimeError("the node left"))
    assert "RuntimeError: the node left" in lost(lane, Fault.rank_died)


def test_workers_that_do_not_start_in_time_are_a_loss_that_names_the_key(lanes: Lanes) -> None:
    lane = lanes.empty(start_timeout_s=0.5)
    lane.begin(fake_spec())
    rank = Rank(0, RankMailbox(lanes.group.workers.get(timeout=LONG_S).address))
    rank.says(RankStarting(0))
    rank.says(RankPulse(0, 0, 0.1, False, "train.py:3 in <module>"))
    error = lost(lane, Fault.start_timeout)
    assert "lane.start_timeout_s" in error
    assert "rank 0 is at train.py:3 in <module>" in error


def test_gather_without_a_turn_says_so(lanes: Lanes) -> None:
    with pytest.raises(RuntimeError, match="begin"):
        lanes.empty().gather()


# --- the end of a turn and of the lane ----------------------------------------------------------


def test_rank_that_does_not_report_within_the_grace_is_not_stopped(lanes: Lanes) -> None:
    lane, _ = lanes.in_turn(stop_grace_s=0.05)
    assert not lane.stop()


def test_turn_that_its_ranks_have_not_taken_is_stopped_at_once(lanes: Lanes) -> None:
    lane = lanes.empty()
    assert lane.stop()
    lane.begin(fake_spec())
    assert lane.stop()
    assert lane.is_usable


def test_closing_dismisses_the_ranks(lanes: Lanes) -> None:
    lane, ranks = lanes.with_ranks(2)
    begin(lane, ranks, fake_spec())
    for rank in ranks:
        rank.ends()
    gather(lane)
    dismissed = [rank.soon(rank.is_dismissed) for rank in ranks]
    lanes.group.over()
    lane.close()
    assert [each.result(LONG_S) for each in dismissed] == [True, True]
    assert lanes.group.num_released == 0
    assert not lane.is_usable


def test_closing_a_broken_lane_kills_its_ranks(lanes: Lanes) -> None:
    lane, _ = lanes.in_turn(2)
    lane.close(is_broken=True)
    assert lanes.group.num_released == 1


def test_ranks_that_do_not_leave_are_killed(lanes: Lanes) -> None:
    lane, _ = lanes.in_turn(stop_grace_s=0.05)
    lane.close()
    assert lanes.group.num_released == 1


def test_lane_that_is_closed_while_its_workers_start_frees_what_they_hold(lanes: Lanes) -> None:
    lanes.empty(2).close()
    assert lanes.group.num_released == 1


# --- hangs --------------------------------------------------------------------------------------


def test_trial_whose_ranks_report_unevenly_fails_and_costs_the_lane(lanes: Lanes) -> None:
    lane, (first, second) = lanes.in_turn(2, report_timeout_s=10)
    second.ends()
    first.says(RankPulse(0, 1, 9.0, True, "train.py:1 in main"))
    assert lane.gather() == ([], None)
    first.says(RankPulse(0, 1, 11.0, True, "train.py:1 in main"))
    _, outcome = gather(lane)
    assert outcome is not None
    assert outcome.fault is Fault.uneven_reports
    assert "while rank 1 has returned" in (outcome.error or "")
    assert not lane.is_usable


def test_trial_that_hangs_is_lost_with_its_lane(lanes: Lanes) -> None:
    lane, (rank,) = lanes.in_turn(1, hang_timeout_s=10)
    rank.makes_report(0.7)
    assert losses(gather(lane)[0]) == [0.7]
    rank.says(RankPulse(0, 1, 11.0, False, "train.py:1 in main"))
    assert "hangs in the train function" in lost(lane, Fault.hang)
    assert not lane.is_usable


def test_pulse_of_an_earlier_turn_says_nothing(lanes: Lanes) -> None:
    lane, (rank,) = lanes.in_turn(1, hang_timeout_s=10)
    rank.ends()
    assert gather(lane)[1] == Outcome(RETURNED)
    begin(lane, [rank], fake_spec(1))
    rank.says(RankPulse(0, 1, 11.0, False, "train.py:1 in main"))
    rank.ends()
    assert gather(lane)[1] == Outcome(RETURNED)


# --- preemption ---------------------------------------------------------------------------------


def test_trial_whose_node_goes_away_ends_at_its_next_report_and_keeps_it(lanes: Lanes) -> None:
    lane, ranks = lanes.in_turn(2)
    ranks[1].says(RankPreempted(1))
    assert lane.gather() == ([], None)
    verdicts = [rank.reports(0.25, checkpoint="checkpoint-1") for rank in ranks]
    assert [verdict.result(LONG_S) for verdict in verdicts] == [STOP] * 2
    for rank in ranks:
        rank.ends(STOPPED)
    reports, outcome = gather(lane)
    while outcome is None:
        more, outcome = gather(lane)
        reports += more
    assert [report.checkpoint for report in reports] == ["checkpoint-1"]
    assert outcome.fault is Fault.preempted
    assert "rank 1 was told that its node is going away" in (outcome.error or "")


def test_lane_whose_trial_returns_before_its_node_goes_away_takes_no_more(lanes: Lanes) -> None:
    lane, (rank,) = lanes.in_turn()
    rank.says(RankPreempted(0))
    rank.ends(returned=0.5)
    assert gather(lane)[1] == Outcome(RETURNED, returned=0.5)
    assert lane.loss is not None
    assert lane.loss.fault is Fault.preempted
    assert not lane.is_usable


def test_rank_that_dies_of_its_node_going_away_was_preempted(lanes: Lanes) -> None:
    lane, (rank,) = lanes.in_turn()
    rank.says(RankPreempted(0))
    assert lane.gather() == ([], None)
    rank.dies()
    assert "rank 0 went away" in lost(lane, Fault.preempted)


def test_lane_whose_node_goes_away_between_turns_takes_no_more(lanes: Lanes) -> None:
    lane, (rank,) = lanes.in_turn()
    rank.ends()
    gather(lane)
    rank.says(RankPreempted(0))
    while lane.is_usable:
        time.sleep(0.01)
    assert lane.loss is not None
    assert lane.loss.fault is Fault.preempted


def test_loss_says_what_a_rank_died_of_once_it_is_known(lanes: Lanes) -> None:
    lane, (rank,) = lanes.in_turn()
    rank.dies()
    lost(lane, Fault.rank_died)
    lanes.group.over(RuntimeError("killed due to the node running low on memory"))
    lane.close(is_broken=True)
    assert lane.loss is not None
    assert lane.loss.fault is Fault.oom_killed


# --- checkpoints that are validated -------------------------------------------------------------


def reports_to_be_validated(rank: Rank, checkpoint: str) -> None:
    assert rank.turn is not None
    rank.index += 1
    report = Report(0.0, {"epoch": rank.index, "loss": 0.5}, checkpoint)
    task = ValidationTask(b"", (), None, {}, "validation.log")
    rank.says(RankReport(rank.turn.index, rank.index, report, b"", task))


def test_turn_is_over_when_its_checkpoints_are_validated(lanes: Lanes) -> None:
    lane, (rank,) = lanes.in_turn()
    reports_to_be_validated(rank, "a")
    rank.ends(returned=1.0)
    rank.dies()  # Its lane may be lost: the trial is not.
    until = time.monotonic() + LONG_S
    while not lanes.validator.began and time.monotonic() < until:
        assert lane.gather() == ([], None)
    lanes.validator.ends("a", Validated(VALIDATED, {"valid": 0.25}))
    reports, outcome = gather(lane)
    assert [report.metrics["valid"] for report in reports] == [0.25]
    assert outcome == Outcome(RETURNED, returned=1.0)


def test_rung_is_judged_by_validated_metrics(lanes: Lanes) -> None:
    lane, (rank,) = lanes.in_turn(asha=AshaConf(max_resource=9))
    reports_to_be_validated(rank, "a")
    lanes.validator.ends("a", Validated(VALIDATED, {"loss": 0.1}))
    assert losses(gather(lane)[0]) == [0.1]
    stopped = lane_stop(lane)
    assert rank.reports().result(LONG_S) is STOP
    rank.ends(STOPPED)
    assert stopped.result(LONG_S)


def test_trial_that_is_to_leave_is_not_done_without_its_validations(lanes: Lanes) -> None:
    lane, (rank,) = lanes.in_turn(stop_grace_s=0.1)
    rank.makes_report(0.6)
    reports_to_be_validated(rank, "a")
    rank.ends(returned=1.0)
    reports, outcome = gather(lane)
    assert losses(reports) == [0.6]
    assert outcome is None
    lane.request_stop()
    assert gather(lane) == ([], Outcome(STOPPED))
    assert lane.is_usable


def test_rank_is_told_what_its_turn_has_reported(lanes: Lanes) -> None:
    lane, (rank,) = lanes.in_turn()
    rank.makes_report(0.6, checkpoint="a")
    reports_to_be_validated(rank, "b")
    told = rank.asks_for_checkpoints()
    assert [(each.uri, each.status) for each in told.checkpoints] == [
        ("a", "COMMITTED"),
        ("b", "PENDING_VALIDATION"),
    ]
    assert (told.num_reports, told.is_validating, told.is_stopping) == (2, True, False)
    lane.request_stop()
    assert rank.asks_for_checkpoints().is_stopping
