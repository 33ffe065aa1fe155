"""A rank's signs of life."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, cast

import pytest

from heats.lane import pulse as pulse_module
from heats.lane.messages import RankPreempted
from heats.lane.pulse import Pulse

if TYPE_CHECKING:
    from collections.abc import Callable

    from heats.lane.mailbox import RankMailbox
    from heats.lane.messages import RankPulse


class Wire:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[RankPulse] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)


@pytest.fixture
def felt(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[RankPulse]]:
    """The pulses while a function runs as a turn, in a thread of its own."""
    monkeypatch.setattr(pulse_module, "_EVERY_S", 0.5)  # Linux counts CPU time by 10 ms.

    def feel(
        function: Callable[[], object],
        *,
        in_report: bool = False,
        cpu_s: float | None = None,
        is_preempted: bool = False,
    ) -> list[RankPulse]:
        wire = Wire()
        if cpu_s is not None:  # What else the tests' own process does is not to count.
            monkeypatch.setattr(Pulse, "_cpu_s", lambda _: cpu_s)
        pulse = Pulse(3, cast("RankMailbox", wire), lambda: is_preempted)

        def run() -> None:
            with pulse.turn(5):
                if in_report:
                    with pulse.report():
                        function()
                else:
                    function()

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        time.sleep(0.6)
        count = len(wire.sent)
        time.sleep(0.6)
        assert len(wire.sent) == count  # Between turns there is none.
        return wire.sent

    return feel


def test_rank_whose_node_goes_away_says_so_once(felt: Callable[..., list[Any]]) -> None:
    told = felt(lambda: time.sleep(1.2), is_preempted=True)
    assert [message for message in told if isinstance(message, RankPreempted)] == [RankPreempted(3)]


def sleep() -> None:
    time.sleep(3)


def test_rank_that_only_waits_is_idle_and_says_where(
    felt: Callable[..., list[RankPulse]],
) -> None:
    beats = felt(sleep, cpu_s=7.0)
    assert {(beat.rank, beat.turn, beat.in_report) for beat in beats} == {(3, 5, False)}
    assert beats[-1].idle_s > 1.8
    assert "test_pulse.py:" in beats[-1].place
    assert "in sleep" in beats[-1].place


def test_rank_in_a_report_says_so(felt: Callable[..., list[RankPulse]]) -> None:
    beats = felt(sleep, in_report=True, cpu_s=7.0)
    assert all(beat.in_report for beat in beats)
    assert beats[-1].idle_s > 1.8


def busy() -> None:
    until = time.monotonic() + 3
    while time.monotonic() < until:
        sum(range(10_000))


def in_steps() -> None:
    for _ in range(4):
        time.sleep(0.4)
        time.sleep(0.37)


def child() -> None:
    script = "import time\nuntil = time.monotonic() + 3\nwhile time.monotonic() < until: pass"
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("function", [busy, in_steps, child])
def test_rank_that_does_something_is_not_idle(
    felt: Callable[..., list[RankPulse]], function: Callable[[], object]
) -> None:
    assert max(beat.idle_s for beat in felt(function)) < 1.8
