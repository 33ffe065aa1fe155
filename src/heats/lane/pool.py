"""Which lanes there are: one for each running trial, and idle ones that wait for the next.

Pure bookkeeping: it follows what trials demand and what the cluster has, and Ray Tune does it.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

from heats.cluster import fits

if TYPE_CHECKING:
    from collections.abc import Callable

    from heats.cluster import Node
    from heats.trial import LaneShape

_LOOK_EVERY_S = 2.0
"""How often the cluster is asked for its nodes."""


class LanePool:
    """Admits trials to lanes of their shape, and says which idle lanes go to make room.

    A trial gets an idle lane of its shape, or a new one where the cluster has room for it; where
    only idle lanes of other shapes are in the way, those that have been idle longest are retired.
    """

    def __init__(self, nodes: Callable[[], list[Node]], max_concurrent: int | None) -> None:
        """Start without lanes.

        Args:
            nodes: The cluster's nodes as they are now.
            max_concurrent: Most trials at once; None: as many as fit.
        """
        self._ask_nodes, self._max_concurrent = nodes, max_concurrent
        self._nodes: list[Node] = []
        self._asked_s = -_LOOK_EVERY_S
        self._running: dict[str, LaneShape] = {}
        self._idle: list[LaneShape] = []
        self._claimed: Counter[LaneShape] = Counter()
        self._retired: list[LaneShape] = []
        self._known: dict[LaneShape, bool] = {}
        """Shapes seen so far, and whether a trial of it was refused since anything changed."""

    # --- trials ---------------------------------------------------------------------------------

    def may_admit(self) -> bool:
        """Whether a trial of any shape seen so far would be admitted now."""
        return not self._known or any(self._has_room(shape) for shape in list(self._known))

    def admit(self, trial_id: str, shape: LaneShape) -> bool:
        """Whether a trial can run now; if so, it does."""
        if not self._has_room(shape):
            return False
        if shape in self._unclaimed():
            self._claimed[shape] += 1
        else:
            while not self._fits(shape, self._unclaimed()):
                oldest = self._unclaimed()[0]
                self._idle.remove(oldest)
                self._retired.append(oldest)
        self._running[trial_id] = shape
        self._forget_refusals()
        return True

    @property
    def is_empty(self) -> bool:
        """Whether no trial runs."""
        return not self._running

    def leave(self, trial_id: str) -> None:
        """A trial does not run any more; its lane is gone unless `rest` follows."""
        self._running.pop(trial_id, None)
        self._forget_refusals()

    # --- lanes ----------------------------------------------------------------------------------

    def rest(self, shape: LaneShape) -> None:
        """A lane is idle now; it goes where a starting one needs its place, as a node has left."""
        self._idle.append(shape)
        self._retire_surplus()
        self._forget_refusals()

    def take(self, shape: LaneShape) -> None:
        """An idle lane was given to a trial; one that was to go may still be."""
        (self._idle if shape in self._idle else self._retired).remove(shape)
        if self._claimed[shape] > 0:
            self._claimed[shape] -= 1
        self._forget_refusals()

    def retire(self) -> list[LaneShape]:
        """Shapes of the idle lanes that go now, to make room."""
        retired, self._retired = self._retired, []
        return retired

    # --- room -----------------------------------------------------------------------------------

    def _has_room(self, shape: LaneShape) -> bool:
        self._look()
        if self._known.get(shape):
            return False
        has_room = (self._max_concurrent is None or len(self._running) < self._max_concurrent) and (
            shape in self._unclaimed() or self._fits(shape, [])
        )
        self._known[shape] = not has_room
        return has_room

    def _fits(self, shape: LaneShape, idle: list[LaneShape]) -> bool:
        return fits([*self._running.values(), *idle, shape], self._nodes)

    def _unclaimed(self) -> list[LaneShape]:
        claimed = self._claimed.copy()
        free = []
        for shape in self._idle:
            if claimed[shape] > 0:
                claimed[shape] -= 1
            else:
                free.append(shape)
        return free

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._asked_s < _LOOK_EVERY_S:
            return
        self._asked_s = now
        nodes = self._ask_nodes()
        if nodes != self._nodes:
            self._nodes = nodes
            self._retire_surplus()
            self._forget_refusals()

    def _retire_surplus(self) -> None:
        """Let idle lanes go for which there is no room beside the running ones."""
        while (idle := self._unclaimed()) and not fits(
            [*self._running.values(), *self._idle], self._nodes
        ):
            self._idle.remove(idle[0])
            self._retired.append(idle[0])

    def _forget_refusals(self) -> None:
        self._known = dict.fromkeys(self._known, False)
