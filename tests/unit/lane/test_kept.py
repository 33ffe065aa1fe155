"""Each kind of state is put back, or named where that is impossible."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from typing import TYPE_CHECKING

import matplotlib as mpl
import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from heats.lane import kept
from heats.lane.kept import Helpers, Hooks, Logging, Memory, Singletons, Surroundings, Torch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from heats.lane.kept import Kept


def restored(state: Kept) -> list[str]:
    return list(state.restore())


# --- interpreter --------------------------------------------------------------------------------


def test_streams_and_limits_that_a_trial_replaced_are_put_back(tmp_path: Path) -> None:
    state = Surroundings()
    before = sys.stdout, sys.getrecursionlimit()
    temporary = tempfile.gettempdir()
    tempfile.tempdir = str(tmp_path)
    sys.stdout = sys.stderr
    sys.setrecursionlimit(before[1] + 1)
    assert restored(state) == []
    assert (sys.stdout, sys.getrecursionlimit()) == before
    assert tempfile.gettempdir() == temporary


def test_signal_handlers_and_hooks_are_put_back() -> None:
    state = Hooks()
    before = signal.getsignal(signal.SIGUSR1), sys.excepthook, threading.excepthook
    shown = warnings.showwarning
    signal.signal(signal.SIGUSR1, lambda *_: None)
    sys.excepthook = lambda *_: None
    threading.excepthook = lambda *_: None
    warnings.showwarning = lambda *_, **__: None
    assert restored(state) == []
    assert (signal.getsignal(signal.SIGUSR1), sys.excepthook, threading.excepthook) == before
    assert warnings.showwarning is shown


def test_signal_handler_cannot_be_put_back_outside_of_the_main_thread() -> None:
    state = Hooks()
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    told: list[str] = []
    thread = threading.Thread(target=lambda: told.extend(state.restore()))
    thread.start()
    thread.join()
    signal.signal(signal.SIGUSR1, before)
    assert told == ["the handler of SIGUSR1 was replaced"]


def test_trials_may_each_choose_how_processes_start() -> None:
    state = Hooks()
    before = multiprocessing.get_start_method(allow_none=True)
    for _ in range(2):
        # Twice is an error, unless it was put back.
        multiprocessing.set_start_method("spawn", force=before is not None)
        assert restored(state) == []
    assert multiprocessing.get_start_method(allow_none=True) == before


# --- logging ------------------------------------------------------------------------------------


def test_loggers_are_as_before() -> None:
    known = logging.getLogger("heats.test.known")
    handler = logging.NullHandler()
    known.addHandler(handler)
    known.setLevel(logging.ERROR)
    state = Logging()
    known.handlers.clear()
    known.addHandler(logging.NullHandler())
    known.setLevel(logging.DEBUG)
    known.propagate, known.disabled = False, True
    assert restored(state) == []
    assert (known.handlers, known.level) == ([handler], logging.ERROR)
    assert (known.propagate, known.disabled) == (True, False)
    known.handlers.clear()
    known.setLevel(logging.NOTSET)


def test_logger_of_user_code_starts_anew_and_that_of_a_library_stays() -> None:
    state = Logging()
    own, library = logging.getLogger("my_train_script"), logging.getLogger("numpy.test.new")
    for logger in (own, library):
        logger.addHandler(logging.NullHandler())
        logger.setLevel(logging.ERROR)
    assert restored(state) == []
    assert (own.handlers, own.level) == ([], logging.NOTSET)
    assert (len(library.handlers), library.level) == (1, logging.ERROR)
    library.handlers.clear()
    library.setLevel(logging.NOTSET)


# --- libraries ----------------------------------------------------------------------------------


def test_defaults_of_torch_are_put_back() -> None:
    state = Torch()
    torch.set_default_device("meta")
    torch.set_autocast_enabled("cpu", True)
    torch.autograd.set_detect_anomaly(True)
    torch.backends.cudnn.allow_tf32 = not torch.backends.cudnn.allow_tf32
    allow_tf32 = torch.backends.cudnn.allow_tf32
    assert restored(state) == []
    assert torch.zeros(1).device == torch.device("cpu")
    assert not torch.is_autocast_enabled("cpu")
    assert not torch.is_anomaly_enabled()
    assert torch.backends.cudnn.allow_tf32 is not allow_tf32


def test_compiler_is_reset_only_where_it_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo import convert_frame

    state = Torch()
    resets: list[int] = []
    torch.compiler.reset()
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append(1))
    assert restored(state) == []
    assert resets == []
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    assert convert_frame.FRAME_COUNTER > 0
    assert restored(state) == []
    assert resets == [1]


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    store = f"file://{tmp_path / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_process_groups_of_a_trial_go_and_those_of_the_lane_stay() -> None:
    lane_group = dist.new_group([0])
    state = Torch()
    trial_group = dist.new_group([0])
    assert restored(state) == []
    dist.barrier(lane_group)
    assert lane_group in distributed_c10d._world.pg_map
    assert trial_group not in distributed_c10d._world.pg_map


@pytest.mark.usefixtures("process_group")
def test_groups_of_deepspeed_are_made_anew_after_they_ended_with_their_trial() -> None:
    pytest.importorskip("deepspeed", reason="needs heats[deepspeed]")
    from deepspeed.utils import groups

    state = Torch()
    groups._WORLD_GROUP = dist.new_group([0])
    groups._DATA_PARALLEL_GROUP = groups._WORLD_GROUP
    assert restored(Singletons()) == []
    assert restored(state) == []
    assert groups._WORLD_GROUP is None
    assert groups._DATA_PARALLEL_GROUP is None


def test_figures_and_settings_of_matplotlib_are_gone() -> None:
    import matplotlib.pyplot as plt

    plt.switch_backend("agg")
    width = mpl.rcParams["lines.linewidth"]
    plt.figure()
    mpl.rcParams["lines.linewidth"] = width + 5
    assert restored(Singletons()) == []
    assert plt.get_fignums() == []
    assert mpl.rcParams["lines.linewidth"] == width
    assert mpl.get_backend().lower() == "agg"


def test_open_mlflow_run_is_ended(tmp_path: Path) -> None:
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'mlflow.db'}")
    mlflow.start_run()
    mlflow.start_run(nested=True)
    assert restored(Singletons()) == []
    assert mlflow.active_run() is None


# --- threads and processes ----------------------------------------------------------------------


def test_child_processes_of_a_trial_end() -> None:
    # A child of the lane's may start others: they are its own affair.
    kept_child = subprocess.Popen(["/bin/sh", "-c", "read _; sleep 60"], stdin=subprocess.PIPE)
    state = Helpers()
    assert kept_child.stdin is not None
    kept_child.stdin.write(b"go\n")
    kept_child.stdin.close()
    parent = psutil.Process(kept_child.pid)
    while not parent.children():
        time.sleep(0.01)
    mild = subprocess.Popen(["/bin/sleep", "60"])
    script = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); "
    stubborn = subprocess.Popen(
        [sys.executable, "-c", script + "time.sleep(60)"], stdout=subprocess.PIPE
    )
    assert stubborn.stdout is not None
    stubborn.stdout.readline()
    assert restored(state) == []
    assert not psutil.pid_exists(mild.pid)
    assert not psutil.pid_exists(stubborn.pid)
    assert kept_child.poll() is None
    (grandchild,) = parent.children()
    grandchild.kill()
    kept_child.kill()
    kept_child.wait()
    stubborn.stdout.close()
    for gone in (mild, stubborn):
        gone.returncode = -1  # It was reaped without its knowledge.


def test_thread_that_ends_soon_is_waited_for_and_one_that_does_not_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kept, "_GRACE_S", 0.3)
    state = Helpers()
    short = threading.Thread(target=time.sleep, args=(0.1,))
    short.start()
    assert restored(state) == []
    is_over = threading.Event()

    def stay() -> None:
        is_over.wait()

    long = threading.Thread(target=stay, name="loader")
    long.start()
    assert restored(state) == ["the thread 'loader' goes on"]
    is_over.set()
    long.join()
    assert restored(state) == []


def test_thread_pool_of_a_library_may_stay() -> None:
    state = Helpers()
    is_over = threading.Event()
    thread = threading.Thread(target=is_over.wait)  # Only code of the standard library runs in it.
    thread.start()
    assert restored(state) == []
    is_over.set()
    thread.join()


# --- memory -------------------------------------------------------------------------------------


def test_memory_that_a_later_turn_leaves_is_named() -> None:
    state = Memory(max_growth_mib=100)
    left = [bytearray(300 * 2**20)]
    assert restored(state) == []  # What the first trial leaves may be a cache.
    left.append(bytearray(b"x") * (200 * 2**20))
    (reason,) = restored(state)
    assert "host memory more than after its first trial" in reason
    left.clear()
    assert restored(state) == []


def test_memory_that_is_free_between_what_stays_is_given_back() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    size, num_blocks = 64 * 1024, 3200  # 200 MiB, each block too small to be mapped on its own.
    state = Memory(max_growth_mib=50)
    assert list(state.restore()) == []
    blocks = [ctypes.c_void_p(libc.malloc(size)) for _ in range(num_blocks)]
    for block in blocks:
        ctypes.memset(block, 1, size)
    for block in blocks[:-1]:
        libc.free(block)  # The last one stays, at the end of the heap.
    assert list(state.restore()) == []
    libc.free(blocks[-1])
