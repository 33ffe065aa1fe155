"""A rank's sign of life while it runs a turn: how long it has been idle, and where it is."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import psutil

from heats.lane.kept import has_children, is_user_file
from heats.lane.messages import RankPreempted, RankPulse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from heats.lane.mailbox import RankMailbox

logger = logging.getLogger(__name__)

_EVERY_S = 2.0
_MIN_CPU_SHARE = 0.05
"""Share of one CPU below which a process only waits."""


class Pulse:
    """Sends a `RankPulse` every two seconds of a turn, from a thread of its own.

    `is_preempted` says whether this rank's node goes away; that is sent once.
    """

    def __init__(self, rank: int, mailbox: RankMailbox, is_preempted: Callable[[], bool]) -> None:
        self._rank, self._mailbox = rank, mailbox
        self._is_preempted = is_preempted
        self._process = psutil.Process()
        self._turn: int | None = None
        self._in_report = False
        self._thread_id = 0
        self._moved_s = 0.0
        self._seen: tuple[float, float, object] = (0.0, 0.0, None)
        threading.Thread(target=self._run, daemon=True, name="heats-pulse").start()

    @contextmanager
    def turn(self, index: int) -> Iterator[None]:
        """While it is entered, the calling thread runs the turn."""
        self._thread_id = threading.get_ident()
        self._moved_s = time.monotonic()
        self._turn = index
        try:
            yield
        finally:
            self._turn = None

    @contextmanager
    def report(self) -> Iterator[None]:
        """While it is entered, the rank is in a report."""
        self._in_report = True
        self._moved_s = time.monotonic()
        try:
            yield
        finally:
            self._in_report = False
            self._moved_s = time.monotonic()

    def moved(self) -> None:
        """Say that the rank waits for something that goes on elsewhere."""
        self._moved_s = time.monotonic()

    def _run(self) -> None:
        has_told = False
        while True:
            time.sleep(_EVERY_S)
            turn = self._turn
            if turn is None:
                continue
            try:
                self._beat(turn)
                if not has_told and self._is_preempted():
                    self._mailbox.send(RankPreempted(self._rank))
                    has_told = True
            except OSError:
                return  # The lane is gone, and so will be this rank.
            except psutil.Error as exc:
                logger.debug("no pulse: %r", exc)

    def _beat(self, turn: int) -> None:
        now_s, cpu_s, frames = time.monotonic(), self._cpu_s(), self._frames()
        before_s, before_cpu_s, before = self._seen
        self._seen = now_s, cpu_s, [(frame.f_code, frame.f_lasti) for frame in frames]
        is_busy = cpu_s - before_cpu_s >= _MIN_CPU_SHARE * (now_s - before_s)
        if is_busy or self._seen[2] != before:
            self._moved_s = now_s
        idle_s = now_s - self._moved_s
        self._mailbox.send(RankPulse(self._rank, turn, idle_s, self._in_report, _place(frames)))

    def _cpu_s(self) -> float:
        """CPU time of the process and of its children, such as data loaders."""
        processes = [self._process]
        if has_children():
            processes += self._process.children(recursive=True)
        total = 0.0
        for process in processes:
            try:
                times = process.cpu_times()
            except psutil.Error:
                continue
            total += times.user + times.system
        return total

    def _frames(self) -> list[FrameType]:
        frame = sys._current_frames().get(self._thread_id)
        frames = []
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
        return frames


def _place(frames: list[FrameType]) -> str:
    """The innermost line of user code, and the function in which that waits."""
    if not frames:
        return "an unknown place"
    own = next((each for each in frames if is_user_file(each.f_code.co_filename)), frames[0])
    code = own.f_code
    place = f"{os.path.relpath(code.co_filename)}:{own.f_lineno} in {code.co_name}"
    inner = frames[0].f_code
    return place if own is frames[0] else f"{place}, in {inner.co_qualname}"
