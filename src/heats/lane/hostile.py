"""A trial that leaves its process in a mess, to see whether the next one notices.

For `heats doctor --isolation`, which wraps the task function in a worker by its name.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from heats.lane.task import TaskFunction

MARK = "HEATS_HOSTILE"
"""Environment variable that makes a trial hostile; its config sets it (`hydra.job.env_set`)."""


def hostile_where_marked(function: TaskFunction) -> TaskFunction:
    """The task function, followed by `disturb` in trials that carry the mark."""

    @functools.wraps(function)
    def task(config: DictConfig) -> Any:
        returned = function(config)
        if os.environ.get(MARK):
            disturb()
        return returned

    return task


def disturb() -> None:
    """Change what user code can change in its process, all at once."""
    import numpy as np
    import torch
    import torch.distributed as dist

    random.seed(1)
    np.random.seed(1)  # noqa: NPY002 - the global generator is what others draw from
    torch.manual_seed(1)
    os.environ.update(OMP_NUM_THREADS="7", PYTHONHASHSEED="7", HEATS_LEFT_BEHIND="1")
    os.chdir(tempfile.gettempdir())
    sys.path.insert(0, tempfile.gettempdir())
    sys.setrecursionlimit(sys.getrecursionlimit() + 1000)
    warnings.simplefilter("error")
    logging.disable(logging.CRITICAL)
    logging.getLogger().setLevel(logging.DEBUG)
    logging.getLogger().addHandler(logging.NullHandler())
    multiprocessing.set_start_method("spawn", force=True)
    threading.Thread(target=time.sleep, args=(0.5,), name="left-behind").start()
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    torch.set_num_threads(torch.get_num_threads() + 3)
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_float32_matmul_precision("medium")
    torch.set_autocast_enabled("cpu", True)
    torch.autograd.set_detect_anomaly(True)
    torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
    if dist.is_available() and dist.is_initialized():
        dist.new_group(list(range(dist.get_world_size())))
    if "matplotlib" in sys.modules:
        import matplotlib as mpl

        mpl.rcParams["lines.linewidth"] = 77
