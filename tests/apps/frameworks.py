"""`sweep.py`, with trials that do badly or die, and that write down what they find on arrival.

What a trial is to do is `recipe.config.case`; the train function of the recipe knows nothing of it.
"""

import gc
import json
import logging
import os
import re
import signal
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
import psutil
import ray.train
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, open_dict
from torch.distributed import distributed_c10d
from torch.utils.data import DataLoader

from heats.recipes.frameworks import common


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> Any:
    """Train as the recipe does, with a temporary folder for each trial."""
    number, rank = HydraConfig.get().job.num, ray.train.get_context().get_world_rank()
    with open_dict(cfg.recipe.config):
        case = cfg.recipe.config.pop("case")
        start = cfg.recipe.config.pop("start", None)
    if case == "bad":
        cfg.recipe.config.lr = 1e-9
    found = Path(f"found-{number}-{rank}.jsonl").absolute()
    with found.open("a") as file:
        file.write(json.dumps(_found()) + "\n")
    tempfile.tempdir = str(Path(f"tmp-{number}").absolute())
    os.makedirs(tempfile.tempdir, exist_ok=True)
    train = hydra.utils.instantiate(cfg.recipe, _partial_=True, _convert_="all")
    match case:
        case "dies":
            with _dying():
                return train()
        case "continues":
            with _replaced("get_checkpoint", lambda: ray.train.Checkpoint(start)):
                return train()
        case "reports while it loads":
            return _report_while_loading(cfg.recipe.config)
        case _:
            return train()


def _found() -> dict[str, Any]:
    """What an earlier trial could have left in this process, and where this one begins."""
    gc.collect()
    modules = [each for each in gc.get_objects() if isinstance(each, torch.nn.Module)]
    hooks = torch.nn.modules.module
    return {
        "pid": os.getpid(),
        "goes on": ray.train.get_checkpoint() is not None,
        "left": {
            "children": [each.name() for each in psutil.Process().children()],
            "threads": Counter(re.sub(r"\d+", "", each.name) for each in threading.enumerate()),
            "process groups": len(distributed_c10d._world.pg_map),
            "modules": Counter(type(each).__name__ for each in modules),
            "hooks": len(hooks._global_forward_hooks) + len(hooks._global_backward_hooks),
            "signals": str([signal.getsignal(number) for number in (2, 15)]),
            "environment": sorted(os.environ),
            "handlers": len(logging.getLogger().handlers),
            "threads of torch": torch.get_num_threads(),
        },
    }


@contextmanager
def _replaced(name: str, function: Any) -> Iterator[None]:
    original = getattr(ray.train, name)
    setattr(ray.train, name, function)
    try:
        yield
    finally:
        setattr(ray.train, name, original)


@contextmanager
def _dying() -> Iterator[None]:
    """Rank 1 is killed at its second report, unless it went on from a checkpoint."""
    report, num_reports = ray.train.report, 0
    is_first_attempt = ray.train.get_checkpoint() is None

    def report_or_die(*args: Any, **kwargs: Any) -> None:
        nonlocal num_reports
        num_reports += 1
        rank = ray.train.get_context().get_world_rank()
        if num_reports == 2 and rank == 1 and is_first_attempt:
            os.kill(os.getpid(), signal.SIGKILL)
        report(*args, **kwargs)

    with _replaced("report", report_or_die):
        yield


def _report_while_loading(config: DictConfig) -> None:
    """Report after each batch, while a process of the loader's prepares the next ones."""
    train, _ = common.datasets()
    for step, _ in enumerate(DataLoader(train, batch_size=32, num_workers=1), 1):
        processes = len(psutil.Process().children())
        ray.train.report({"val_accuracy": config.lr, "epoch": step, "processes": processes})


if __name__ == "__main__":
    main()
