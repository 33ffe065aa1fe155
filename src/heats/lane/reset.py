"""What a turn may change in its process, put back before the next trial comes.

Anything that leaks from one trial into the next is a bug.
"""

from __future__ import annotations

import random

import numpy as np
import torch

from heats.lane.kept import Helpers, Hooks, Kept, Logging, Memory, Singletons, Surroundings, Torch


def seed_rank(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators: a trial must not depend on its past."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - user code may draw from the global generator
    torch.manual_seed(seed)


class RankState:
    """A snapshot of the process state that belongs to no trial; `restore` puts it back."""

    def __init__(self, *, max_memory_growth_mib: float) -> None:
        """Take the snapshot.

        Args:
            max_memory_growth_mib: How much more memory than after its first turn the process may
                hold after a later one, in MiB.
        """
        self._kinds: tuple[Kept, ...] = (
            Helpers(),  # First: what still runs could change the rest.
            Surroundings(),
            Hooks(),
            Logging(),
            Singletons(),
            Torch(),
            Memory(max_memory_growth_mib),
        )

    def restore(self) -> list[str]:
        """Put the state back; gives what cannot be, and then no further trial may run here."""
        reasons: list[str] = []
        for kind in self._kinds:
            try:
                reasons.extend(kind.restore())
            except Exception as exc:  # noqa: BLE001 - libraries raise anything here
                reasons.append(f"{type(kind).__name__.lower()} could not be restored: {exc!r}")
        return reasons
