"""A Hydra app that is not ours, with trials that try a lane's patience.

Everything that makes it hard to run a function elsewhere is in it: an Enum and a dataclass of
`__main__`, a structured config registered at import, a resolver under the main guard. It knows
nothing of heats; `hydra/sweeper=heats` on its command line is all.
"""

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import hydra
import psutil
import ray.train
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf


class Case(Enum):
    """What a trial does."""

    returns = "returns"
    reports = "reports"
    dies = "dies"
    loses_its_lane = "loses_its_lane"
    tells = "tells"
    swallows = "swallows"
    hangs = "hangs"
    exits = "exits"
    uneven = "uneven"
    preempted = "preempted"
    raises = "raises"
    slow = "slow"


@dataclass
class Probe:
    """The app's config; `doubled` needs the resolver."""

    case: Case = Case.returns
    x: int = 0
    epochs: int = 6
    doubled: int = 0
    folder: str = "probes"
    workers: int = 1


@dataclass
class Point:
    """A class of `__main__`, made in the trial."""

    x: int


ConfigStore.instance().store(name="probe", node=Probe)


@hydra.main(version_base="1.3", config_path=None, config_name="probe")
def main(cfg: Probe) -> float | None:
    """Run the case; the returned number is x + 2 * doubled."""
    case: object = cfg.case
    if type(case) is not Case:
        msg = f"{case!r} is of another {Case.__name__} than this module's"
        raise TypeError(msg)
    point = Point(cfg.x)
    match cfg.case:
        case Case.returns:
            pass
        case Case.tells:
            _tell(cfg)
        case Case.exits:
            if cfg.x == 1:
                sys.exit("no data")
        case _:
            _train(cfg)
    return float(point.x + cfg.doubled)


def _train(cfg: Probe) -> None:
    """Report `loss` = x in each epoch, with a file of each rank in the checkpoint."""
    rank = ray.train.get_context().get_world_rank()
    start = _epoch_of(ray.train.get_checkpoint())
    Path(cfg.folder).mkdir(exist_ok=True)
    done = Path(cfg.folder, f"epochs-{HydraConfig.get().job.num}-{rank}")
    if ray.train.get_context().get_world_size() < cfg.workers:
        msg = f"{ray.train.get_context().get_world_size()} workers instead of {cfg.workers}"
        raise ValueError(msg)
    if rank == 0:
        Path(cfg.folder, f"pid-{HydraConfig.get().job.num}").write_text(str(os.getpid()))
    for epoch in range(start + 1, cfg.epochs + 1):
        if cfg.case is Case.slow:
            time.sleep(0.5)
            if cfg.x == 0 and epoch == cfg.epochs:
                _wait_until(Path(cfg.folder, "epochs-1-0").exists)
            if cfg.x == 1 and epoch == 3 and start == 0:
                _wait_until(lambda: ray.train.get_preemption_info() is not None)
                time.sleep(4)  # The lane learns of it in this step.
        if cfg.case is Case.hangs and cfg.x == 1 and epoch == 3:
            Path(cfg.folder, "hanging").write_text(str(os.getpid()))
            time.sleep(600)
        if cfg.case is Case.dies and cfg.x == 1 and epoch == 4 and start == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if cfg.case is Case.loses_its_lane and cfg.x == 1 and epoch == 4 and start == 0:
            time.sleep(3)  # What it reported in its last second, the driver would not know.
            os.kill(_pid_of_lane(), signal.SIGKILL)
            time.sleep(600)
        if cfg.case is Case.preempted and cfg.x == 1 and epoch == 4 and start == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)  # The rest of a step, in which the lane learns of it.
        if cfg.case is Case.raises and cfg.x == 1 and epoch == 4:
            msg = f"no data on {os.getpid()}"
            raise ValueError(msg)
        if cfg.case is Case.uneven and rank == 1 and epoch == 3:
            return
        with done.open("a") as file:
            file.write(f"{epoch}\n")
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, f"rank-{rank}.json").write_text(json.dumps({"epoch": epoch}))
            checkpoint = ray.train.Checkpoint(directory)
            metrics = {"loss": float(cfg.x), "epoch": epoch, "start": start}
            if cfg.case is not Case.swallows:
                ray.train.report(metrics, checkpoint=checkpoint)
                continue
            try:
                ray.train.report(metrics, checkpoint=checkpoint)
            except Exception as exc:  # noqa: BLE001 - what such code does is the point
                print("not stopped by", exc)  # noqa: T201


def _wait_until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 120
    while not holds() and time.monotonic() < deadline_s:
        time.sleep(0.2)


def _tell(cfg: Probe) -> None:
    """Write down what `ray.train` says of a trial, before and after its first report."""
    context = ray.train.get_context()
    told: dict[str, object] = {
        "name": context.get_experiment_name(),
        "rank": context.get_world_rank(),
        "size": context.get_world_size(),
        "local rank": context.get_local_rank(),
        "local size": context.get_local_world_size(),
        "node rank": context.get_node_rank(),
        "first checkpoint": ray.train.get_checkpoint() is None,
        "job": HydraConfig.get().job.num,
        "mlflow": sorted(key for key in os.environ if key.startswith("MLFLOW_RUN")),
    }
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "rank-0.json").write_text(json.dumps({"epoch": 1}))
        ray.train.report({"loss": 0.5, "epoch": 1}, checkpoint=ray.train.Checkpoint(directory))
    told["epoch"] = _epoch_of(ray.train.get_checkpoint())
    told["reported"] = [each.metrics for each in ray.train.get_all_reported_checkpoints()]
    Path(cfg.folder).mkdir(exist_ok=True)
    Path(cfg.folder, f"told-{cfg.x}.json").write_text(json.dumps(told))


def _pid_of_lane() -> int:
    """The one other process on this node that Ray calls a Trainable."""
    siblings = psutil.Process(os.getppid()).children()
    (lane,) = [each.pid for each in siblings if "Trainable" in "".join(each.cmdline())]
    return lane


def _epoch_of(checkpoint: ray.train.Checkpoint | None) -> int:
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as directory:
        return int(json.loads(Path(directory, "rank-0.json").read_text())["epoch"])


if __name__ == "__main__":
    OmegaConf.register_new_resolver("doubled", lambda x: 2 * x)
    main()
