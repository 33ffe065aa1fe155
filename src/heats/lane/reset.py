"""What a turn may change in its process, put back before the next trial comes.

Anything that leaks from one trial into the next is a bug; what is not covered here is listed in
docs/architecture.md.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import sys
import warnings
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import numpy as np
import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Iterator


def seed_rank(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators: a trial must not depend on its past."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - user code may draw from the global generator
    torch.manual_seed(seed)


class RankState:
    """A snapshot of the process state that belongs to no trial; `restore` puts it back."""

    def __init__(self) -> None:
        root = logging.getLogger()
        self._cwd = os.getcwd()
        self._env = dict(os.environ)
        self._path = list(sys.path)
        self._argv = list(sys.argv)
        self._handlers, self._level = list(root.handlers), root.level
        self._filters = list(warnings.filters)
        self._dtype = torch.get_default_dtype()
        self._threads = torch.get_num_threads()
        self._deterministic = torch.are_deterministic_algorithms_enabled()
        self._precision = torch.get_float32_matmul_precision()
        self._has_group = dist.is_available() and dist.is_initialized()
        self._cudnn = (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic)

    def restore(self) -> None:
        """Put the state back; raises whatever makes that impossible, and the rank then ends."""
        if self._has_group and not dist.is_initialized():
            msg = "the trial destroyed the process group that the lane's trials share"
            raise RuntimeError(msg)
        os.chdir(self._cwd)
        for key in set(os.environ) - set(self._env):
            del os.environ[key]
        for key, value in self._env.items():
            if os.environ.get(key) != value:
                os.environ[key] = value
        sys.path[:], sys.argv = self._path, list(self._argv)
        self._restore_logging()
        warnings.filters[:] = self._filters  # type: ignore[index]
        torch.set_grad_enabled(True)
        torch.set_default_dtype(self._dtype)
        torch.set_num_threads(self._threads)
        if torch.are_deterministic_algorithms_enabled() != self._deterministic:
            # Not without need: its first call loads torch's compiler, which takes seconds.
            torch.use_deterministic_algorithms(self._deterministic)
        torch.set_float32_matmul_precision(self._precision)
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = self._cudnn
        if "accelerate" in sys.modules:
            from accelerate.state import AcceleratorState, GradientState, PartialState

            for state in (AcceleratorState, GradientState, PartialState):
                state._shared_state.clear()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            gc.collect()
            torch.cuda.empty_cache()

    def _restore_logging(self) -> None:
        root = logging.getLogger()
        for handler in list(root.handlers):
            if handler not in self._handlers:
                root.removeHandler(handler)
                handler.close()
        for handler in self._handlers:
            if handler not in root.handlers:
                root.addHandler(handler)
        root.setLevel(self._level)
        logging.disable(logging.NOTSET)


@contextmanager
def output_to(path: Path) -> Iterator[TextIO]:
    """Send this process's standard output and error, C code's included, to the end of a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    log = path.open("a", buffering=1, encoding="utf-8", errors="replace")
    saved = os.dup(1), os.dup(2)
    streams = sys.stdout, sys.stderr
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = log
    try:
        yield log
    finally:
        with suppress(ValueError, OSError):
            log.flush()
        sys.stdout, sys.stderr = streams
        for number, descriptor in zip(saved, (1, 2), strict=True):
            os.dup2(number, descriptor)
            os.close(number)
        log.close()
