"""The kinds of process state that belong to no trial.

Each is taken when its object is made; `restore` puts it back and yields what cannot be put back, in
words for people. What no class here covers is listed in docs/architecture.md.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import math
import multiprocessing
import os
import signal
import site
import sys
import sysconfig
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import psutil
import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

_MIB = 1024 * 1024
_GRACE_S = 2.0
"""How long threads and child processes that a trial left may take to end, in seconds."""

_SHARED_CHILDREN = (
    "torch._inductor.compile_worker",
    "multiprocessing.resource_tracker",
    "multiprocessing.forkserver",
)
"""Children that libraries start once for a process and go on using."""


_TRIM_MIB = 4.0
"""Growth of a process at which its allocator is asked to give free memory back, in MiB."""


class Kept(Protocol):
    """One kind of state."""

    def restore(self) -> Iterator[str]:
        """Put it back; yields what could not be."""
        ...


class Surroundings:
    """Current directory, that of temporary files, environment, import path, arguments, streams."""

    def __init__(self) -> None:
        self._cwd = os.getcwd()
        self._env = dict(os.environ)
        self._path, self._argv = list(sys.path), list(sys.argv)
        self._streams = sys.stdin, sys.stdout, sys.stderr
        self._recursion_limit = sys.getrecursionlimit()
        self._tempdir = tempfile.gettempdir()

    def restore(self) -> Iterator[str]:
        """Put it back."""
        try:
            os.chdir(self._cwd)
        except OSError as exc:
            yield f"the directory {self._cwd} is gone: {exc.strerror}"
        for key in set(os.environ) - set(self._env):
            del os.environ[key]
        for key, value in self._env.items():
            if os.environ.get(key) != value:
                os.environ[key] = value
        sys.path[:], sys.argv = self._path, list(self._argv)
        sys.stdin, sys.stdout, sys.stderr = self._streams
        sys.setrecursionlimit(self._recursion_limit)
        tempfile.tempdir = self._tempdir


class Hooks:
    """Signal handlers, exception hooks, warning filters, and how child processes are started."""

    def __init__(self) -> None:
        self._signals = {number: signal.getsignal(number) for number in signal.valid_signals()}
        self._excepthook = sys.excepthook
        self._thread_excepthook = threading.excepthook
        self._filters = list(warnings.filters)
        self._showwarning = warnings.showwarning
        self._start_method = multiprocessing.get_start_method(allow_none=True)

    def restore(self) -> Iterator[str]:
        """Put it back."""
        for number, handler in self._signals.items():
            if signal.getsignal(number) is handler:
                continue
            try:
                signal.signal(number, handler)
            except (ValueError, OSError, TypeError):  # Only a main thread may; C code's is None.
                yield f"the handler of {signal.Signals(number).name} was replaced"
        sys.excepthook, threading.excepthook = self._excepthook, self._thread_excepthook
        warnings.filters[:] = self._filters  # type: ignore[index]
        warnings.showwarning = self._showwarning
        if multiprocessing.get_start_method(allow_none=True) != self._start_method:
            multiprocessing.set_start_method(self._start_method, force=True)


class Logging:
    """Handlers and levels of every logger, and of loggers that user code made, none at all."""

    def __init__(self) -> None:
        self._loggers = {logger: _logger_state(logger) for logger in _loggers()}

    def restore(self) -> Iterator[str]:
        """Put it back."""
        logging.disable(logging.NOTSET)
        for logger in _loggers():
            state = self._loggers.get(logger)
            if state is None:
                if _is_library(logger.name):
                    # It was imported in this trial, and is as its import left it.
                    self._loggers[logger] = _logger_state(logger)
                    continue
                state = [], logging.NOTSET, True, False
            handlers, level, logger.propagate, logger.disabled = state
            for handler in list(logger.handlers):
                if handler not in handlers:
                    logger.removeHandler(handler)
                    handler.close()
            for handler in handlers:
                if handler not in logger.handlers:
                    logger.addHandler(handler)
            if logger.level != level:
                logger.setLevel(level)
        yield from ()


class Torch:
    """torch's defaults and switches, and its extra process groups."""

    def __init__(self) -> None:
        self._dtype = torch.get_default_dtype()
        self._device = torch.get_default_device()
        self._threads = torch.get_num_threads()
        self._deterministic = torch.are_deterministic_algorithms_enabled()
        self._precision = torch.get_float32_matmul_precision()
        self._autocast = {kind: torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")}
        cudnn = torch.backends.cudnn
        self._cudnn = cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32
        self._has_group = dist.is_available() and dist.is_initialized()
        self._groups = list(_process_groups())

    def restore(self) -> Iterator[str]:
        """Put it back."""
        torch.set_grad_enabled(True)
        torch.autograd.set_detect_anomaly(False)
        torch.set_default_dtype(self._dtype)
        if torch.get_default_device() != self._device:
            is_plain = self._device == torch.device("cpu")
            torch.set_default_device(None if is_plain else self._device)
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        if torch.are_deterministic_algorithms_enabled() != self._deterministic:
            # Not without need: its first call loads torch's compiler, which takes seconds.
            torch.use_deterministic_algorithms(self._deterministic)
        torch.set_float32_matmul_precision(self._precision)
        for kind, is_on in self._autocast.items():
            torch.set_autocast_enabled(kind, is_on)
        cudnn = torch.backends.cudnn
        cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32 = self._cudnn
        compiler = sys.modules.get("torch._dynamo.convert_frame")
        if compiler is not None and getattr(compiler, "FRAME_COUNTER", True):
            # What it compiled is kept by code object: after a few trials it would compile no more.
            # Not without need: every optimizer loads the compiler, and this takes 12 ms.
            torch.compiler.reset()
        yield from self._restore_groups()

    def _restore_groups(self) -> Iterator[str]:
        if self._has_group and not dist.is_initialized():
            yield "the process group that the lane's trials share was destroyed"
            return
        for group in _process_groups():
            if group not in self._groups:
                dist.destroy_process_group(group)


class Singletons:
    """What libraries keep for a whole process: Accelerate, DeepSpeed, matplotlib, MLflow's runs."""

    def restore(self) -> Iterator[str]:
        """Put it back."""
        if "accelerate.state" in sys.modules:
            from accelerate.state import AcceleratorState, GradientState, PartialState

            for state in (AcceleratorState, GradientState, PartialState):
                state._shared_state.clear()
        if "deepspeed.utils.groups" in sys.modules:
            from deepspeed.utils import groups

            groups._release_process_group_references()  # They end with the trial: see `Torch`.
        if "matplotlib.pyplot" in sys.modules:
            import matplotlib.pyplot as plt

            plt.close("all")
        if "matplotlib" in sys.modules:
            import matplotlib as mpl

            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                mpl.rc_file_defaults()
        if "mlflow.tracking.fluent" in sys.modules:
            import mlflow

            while mlflow.active_run() is not None:
                mlflow.end_run()
        yield from ()


class Helpers:
    """Threads and child processes that a trial started: they end, or the rank does.

    A library's thread may go on, because libraries keep pools; one that runs user code may not.
    """

    def __init__(self) -> None:
        self._threads = set(threading.enumerate())
        self._children = {child.pid for child in psutil.Process().children()}

    def restore(self) -> Iterator[str]:
        """End them."""
        deadline_s = time.monotonic() + _GRACE_S
        self._end_children(deadline_s)
        for thread in threading.enumerate():
            if thread in self._threads or thread is threading.current_thread():
                continue
            while _runs_user_code(thread) and time.monotonic() < deadline_s:
                thread.join(0.02)
            if _runs_user_code(thread):
                yield f"the thread {thread.name!r} goes on"

    def _end_children(self, deadline_s: float) -> None:
        if not has_children():
            return
        left = []
        for child in psutil.Process().children():
            if child.pid not in self._children and not _is_shared(child):
                with contextlib.suppress(psutil.NoSuchProcess):
                    left += [child, *child.children(recursive=True)]
        for signalled in (psutil.Process.terminate, psutil.Process.kill):
            for child in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    signalled(child)
            _, left = psutil.wait_procs(left, timeout=max(0.1, deadline_s - time.monotonic()))


class Memory:
    """What a turn leaves allocated, on the host and on this rank's GPU, since the first turn.

    Args:
        max_growth_mib: How much more than after the first turn is too much, in MiB.
    """

    def __init__(self, max_growth_mib: float) -> None:
        self._max_growth_mib = max_growth_mib
        self._first: dict[str, float] = {}
        self._trimmed_mib = math.inf

    def restore(self) -> Iterator[str]:
        """Free what is free."""
        gc.collect()
        if not self._first:
            gc.freeze()  # What was imported stays; from now on only what is new is looked through.
        used = {"host": self._host_mib()}
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()
            used["GPU"] = torch.cuda.memory_allocated() / _MIB
        for kind, mib in used.items():
            growth = mib - self._first.setdefault(kind, mib)
            if growth > self._max_growth_mib:
                yield (
                    f"its process holds {growth:.0f} MiB of {kind} memory more than after its"
                    f" first trial (lane.max_memory_growth_mib={self._max_growth_mib:g})"
                )

    def _host_mib(self) -> float:
        """Resident memory, without much that is free.

        glibc gives back what is free at the end of a heap only. A train function's tensors come and
        go in the heap of its thread, small things that stay come between, and so it would grow with
        every turn (0.1 MiB for a small network).
        """
        process = psutil.Process()
        used_mib = float(process.memory_info().rss / _MIB)
        if used_mib - self._trimmed_mib > _TRIM_MIB:
            _trim()
            used_mib = float(process.memory_info().rss / _MIB)
            self._trimmed_mib = used_mib
        self._trimmed_mib = min(self._trimmed_mib, used_mib)
        return used_mib


# --- helpers ------------------------------------------------------------------------------------


def _trim() -> None:
    with contextlib.suppress(AttributeError):  # Other C libraries do not have it.
        ctypes.CDLL(None).malloc_trim(0)


def _loggers() -> Iterator[logging.Logger]:
    yield logging.getLogger()
    for logger in list(logging.getLogger().manager.loggerDict.values()):
        if isinstance(logger, logging.Logger):
            yield logger


def _logger_state(logger: logging.Logger) -> tuple[list[logging.Handler], int, bool, bool]:
    return list(logger.handlers), logger.level, logger.propagate, logger.disabled


def _is_library(name: str) -> bool:
    """Whether a logger's name is a package that is installed or Python's own."""
    module: Any = sys.modules.get(name.partition(".")[0])
    source = getattr(module, "__file__", None)
    return source is not None and not is_user_file(source)


def _library_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    folders = {paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders |= {*site.getsitepackages(), site.getusersitepackages(), str(Path(__file__).parents[2])}
    return tuple(os.path.join(folder, "") for folder in folders)


_LIBRARIES = _library_folders()


def is_user_file(path: str) -> bool:
    """Whether code is neither a library's nor Python's nor heats' own."""
    return not path.startswith((*_LIBRARIES, "<"))


def _runs_user_code(thread: threading.Thread) -> bool:
    frame: FrameType | None = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False


def has_children() -> bool:
    """Whether this process has any child, dead or alive, for the price of one system call."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _is_shared(child: psutil.Process) -> bool:
    try:
        command = " ".join(child.cmdline())
    except psutil.Error:
        return False
    return any(helper in command for helper in _SHARED_CHILDREN)


def _process_groups() -> Iterator[dist.ProcessGroup]:
    """All process groups, in the order in which they were made."""
    if dist.is_available() and dist.is_initialized():
        from torch.distributed import distributed_c10d

        yield from list(distributed_c10d._world.pg_map)
