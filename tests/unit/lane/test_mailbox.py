from __future__ import annotations

import dataclasses
import queue
import socket
import threading
from multiprocessing import AuthenticationError
from typing import TYPE_CHECKING

import pytest
from tests.fakes import fake_spec

from heats.lane.mailbox import Mailbox, RankMailbox
from heats.lane.messages import (
    RankBroken,
    RankReport,
    RankSample,
    RankStarting,
    Turn,
    TurnSettings,
    VerdictRequest,
)
from heats.trial import Fault, Report, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator

    from heats.lane.messages import RankMessage

SPEC = fake_spec(7)
SETTINGS = TurnSettings("sweep", 0, "sqlite:///mlflow.db", None)
TURN = Turn(1, SPEC, SETTINGS)


class Heard:
    """What a lane hears; a request gets STOP."""

    def __init__(self) -> None:
        self.messages: queue.Queue[tuple[int, RankMessage]] = queue.Queue()
        self.gone: queue.Queue[int] = queue.Queue()
        self.mailbox = Mailbox("127.0.0.1", self._on_message, self.gone.put)

    def _on_message(self, rank: int, message: RankMessage) -> Verdict | None:
        self.messages.put((rank, message))
        return Verdict.STOP if isinstance(message, VerdictRequest) else None

    def next(self) -> tuple[int, RankMessage]:
        return self.messages.get(timeout=5)

    def rank(self, number: int) -> RankMailbox:
        mailbox = RankMailbox(self.mailbox.address)
        mailbox.send(RankStarting(number))
        assert self.next()[0] == number
        return mailbox


@pytest.fixture
def lane() -> Iterator[Heard]:
    heard = Heard()
    yield heard
    heard.mailbox.close()


def test_turn_reaches_its_rank_and_no_other(lane: Heard) -> None:
    ranks = [lane.rank(number) for number in range(2)]
    other = Turn(2, SPEC, SETTINGS)
    lane.mailbox.post(0, TURN)
    lane.mailbox.post(1, other)
    assert [rank.next_turn() for rank in ranks] == [TURN, other]


def test_none_says_that_there_are_no_more_turns(lane: Heard) -> None:
    rank = lane.rank(0)
    lane.mailbox.post(0, None)
    assert rank.next_turn() is None


def test_messages_of_a_rank_come_in_order_with_its_number(lane: Heard) -> None:
    rank = lane.rank(3)
    reports = [RankReport(1, i + 1, Report(float(i), {"loss": 0.1 * i})) for i in range(20)]
    for report in reports:
        rank.send(report)
    assert [lane.next() for _ in reports] == [(3, report) for report in reports]


def test_request_gets_its_verdict_while_another_thread_sends(lane: Heard) -> None:
    rank = lane.rank(0)
    sample = RankSample(1, Report(0.0, {"system/x": 1.0}, is_system=True))

    def send() -> None:
        for _ in range(50):
            rank.send(sample)

    sender = threading.Thread(target=send)
    sender.start()
    verdicts = {rank.ask(VerdictRequest(1, index)) for index in range(1, 51)}
    sender.join()
    assert verdicts == {Verdict.STOP}
    assert {lane.next()[0] for _ in range(100)} == {0}


def test_rank_that_cannot_serve_is_known_by_its_number(lane: Heard) -> None:
    rank = lane.rank(2)
    broken = RankBroken(2, "Traceback ...", Fault.broken_program)
    rank.send(broken)
    assert lane.next() == (2, broken)


def test_rank_that_goes_away_is_told_once(lane: Heard) -> None:
    rank = lane.rank(1)
    rank.close()
    assert lane.gone.get(timeout=5) == 1
    assert lane.gone.empty()


def test_lane_that_hangs_up_ends_its_ranks_wait_and_is_told_of_nobody(lane: Heard) -> None:
    rank = lane.rank(0)
    ended: queue.Queue[Turn | None] = queue.Queue()
    threading.Thread(target=lambda: ended.put(rank.next_turn()), daemon=True).start()
    lane.mailbox.close()
    assert ended.get(timeout=5) is None
    with pytest.raises((OSError, EOFError)):
        rank.ask(VerdictRequest(1, 1))
    assert lane.gone.empty()


def test_closed_mailbox_leaves_no_thread_behind() -> None:
    before = set(threading.enumerate())
    heard = Heard()
    heard.rank(0)
    heard.mailbox.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
        assert not thread.is_alive()


def test_stranger_without_the_key_is_refused_and_ranks_are_still_served(
    lane: Heard, caplog: pytest.LogCaptureFixture
) -> None:
    address = lane.mailbox.address
    with pytest.raises(AuthenticationError):
        RankMailbox(dataclasses.replace(address, key=b"guess"))
    assert lane.rank(0) is not None
    assert "Refused a connection to a lane" in caplog.text


def test_stranger_that_says_nothing_keeps_no_rank_out(lane: Heard) -> None:
    address = lane.mailbox.address
    with socket.create_connection((address.host, address.port)):
        assert lane.rank(0) is not None


def test_key_is_not_shown(lane: Heard) -> None:
    assert "key" not in repr(lane.mailbox.address)


def test_post_to_a_rank_that_hung_up_raises(lane: Heard) -> None:
    rank = lane.rank(0)
    rank.close()
    assert lane.gone.get(timeout=5) == 0
    with pytest.raises(OSError):  # noqa: PT011 - as the socket says
        lane.mailbox.post(0, TURN)
