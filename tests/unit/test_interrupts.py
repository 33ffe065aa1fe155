from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING

import pytest

from heats.interrupts import Interrupts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[Sequence[object]]:
    """The handlers before the test, which must be in place after it too."""
    before = [signal.getsignal(number) for number in SIGNALS]
    remaining, _ = signal.getitimer(signal.ITIMER_REAL)
    yield before
    assert [signal.getsignal(number) for number in SIGNALS] == before
    signal.setitimer(signal.ITIMER_REAL, remaining)  # pytest-timeout's, which shares the clock.


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0.01)  # Python runs the handler between two steps of its own.


@pytest.mark.parametrize(
    ("number", "reason"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")]
)
def test_first_signal_asks_to_leave_and_says_how_to_insist(
    number: signal.Signals, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    reasons: list[str] = []
    with Interrupts(reasons.append, grace_s=60):
        send(number)
    assert reasons == [reason]
    assert caplog.messages == [
        f"{reason}: running trials stop at their next report; again to leave at once."
    ]


def test_second_signal_leaves_at_once() -> None:
    reasons: list[str] = []

    def leave() -> None:
        with Interrupts(reasons.append, grace_s=60):
            send(signal.SIGTERM)
            send(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        leave()
    assert reasons == ["SIGTERM"]


def test_who_does_not_leave_in_time_is_interrupted() -> None:
    def stay() -> None:
        with Interrupts(lambda reason: None, grace_s=0.05):
            send(signal.SIGINT)
            time.sleep(5)

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        stay()
    assert time.monotonic() - began < 2


def test_who_leaves_in_time_is_not_interrupted() -> None:
    with Interrupts(lambda reason: None, grace_s=0.05):
        send(signal.SIGINT)
    time.sleep(0.1)


def test_earlier_handlers_are_back_afterwards(handlers: Sequence[object]) -> None:
    with Interrupts(lambda reason: None, grace_s=60):
        assert all(
            signal.getsignal(number) != before
            for number, before in zip(SIGNALS, handlers, strict=True)
        )


def test_nothing_is_installed_outside_the_main_thread(handlers: Sequence[object]) -> None:
    seen: list[object] = []

    def enter() -> None:
        with Interrupts(lambda reason: None, grace_s=60):
            seen.extend(signal.getsignal(number) for number in SIGNALS)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == handlers
