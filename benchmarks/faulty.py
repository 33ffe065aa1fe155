"""A training that is hit by a fault at a random moment: what the fault table injects into.

`train` is a recipe for `sweep.py`. Every second trial is hit, once; the others never are. Run as a
program, this module is `sweep.py` with a program that does not always load in a worker.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
import psutil
import ray

from benchmarks.machine import PROJECT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from omegaconf import DictConfig

HIT_EPOCHS, OTHER_EPOCHS = 10, 20
"""The others are longer, so that they are there while a lane recovers."""
EPOCH_S = 0.2
_STEPS = 10
_EDGE = 0.02
"""Share of a training at its ends where no fault comes: there it might miss the trial."""
_MIB = 1024 * 1024
LEAK_MIB = 128

_num_turns = 0
_leaked: list[bytearray] = []


def num_epochs(number: int) -> int:
    """Epochs of a trial: one that is hit is shorter."""
    return HIT_EPOCHS if number % 2 == 0 else OTHER_EPOCHS


def next_loss(loss: float, lr: float, epoch: int) -> float:
    """The loss after an epoch; it depends on every one before, so a wrong restart shows."""
    return 0.9 * loss + lr / epoch


def train(config: dict[str, Any]) -> None:
    """Train for some epochs, with a checkpoint after every second one.

    Args:
        config: `lr`; `seed` of the moments; `fault`, a key of `IN_STEP` or `ANY_TIME`, or null;
            `folder`, which gets `epochs/TRIAL.jsonl` with a line for each attempt (epoch 0) and
            each epoch, and `hits/TRIAL.json` with the time of a fault.
    """
    import ray.train
    from hydra.core.hydra_config import HydraConfig

    global _num_turns
    _num_turns += 1
    number = int(HydraConfig.get().job.num)
    context = ray.train.get_context()
    rank, size = context.get_world_rank(), context.get_world_size()
    folder = Path(config["folder"])
    last, loss = _restored(ray.train.get_checkpoint())
    _note(folder, number, 0, rank)
    with _fault(config, number, rank, size) as fault:
        for epoch in range(last + 1, num_epochs(number) + 1):
            for _ in range(_STEPS):
                fault.at_step()
                _step(size)
            loss = next_loss(loss, config["lr"], epoch)
            _note(folder, number, epoch, rank)
            if not fault.skips_reports:
                _report(epoch, loss, rank)


def _step(size: int) -> None:
    """Compute for a moment and wait for three, so that a machine has CPUs left for what recovers.

    Several ranks then wait for each other.
    """
    step_s = EPOCH_S / _STEPS
    until = time.perf_counter() + step_s / 4
    while time.perf_counter() < until:
        pass
    time.sleep(step_s * 3 / 4)
    if size > 1:
        import torch
        import torch.distributed as dist

        dist.all_reduce(torch.ones(1))


def _report(epoch: int, loss: float, rank: int) -> None:
    import ray.train

    metrics = {"loss": loss, "epoch": epoch}
    if epoch % 2 or rank > 0:
        ray.train.report(metrics)
        return
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "state.json").write_text(json.dumps(metrics), encoding="utf-8")
        ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(directory))


def _restored(checkpoint: Any) -> tuple[int, float]:
    if checkpoint is None:
        return 0, 1.0
    with checkpoint.as_directory() as directory:
        state = json.loads(Path(directory, "state.json").read_text(encoding="utf-8"))
    return state["epoch"], state["loss"]


def _note(folder: Path, number: int, epoch: int, rank: int) -> None:
    if rank == 0:
        path = folder / "epochs" / f"{number}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"epoch": epoch, "time_s": time.time()}) + "\n")


# --- faults -----------------------------------------------------------------------------------


class _Fault:
    """What happens to this rank in this turn; `act` None: nothing.

    It happens `after_s` seconds from now: to the process from a thread, or in user code at the next
    step. `note` writes its time down before.
    """

    def __init__(
        self,
        act: Callable[[], None] | None = None,
        *,
        after_s: float = 0.0,
        is_in_step: bool = True,
        note: Callable[[], None] = lambda: None,
    ) -> None:
        self._act, self._note = act, note
        self._due_s = time.monotonic() + after_s if is_in_step else float("inf")
        self.skips_reports = False
        self.timer: threading.Timer | None = None
        if act is not None and not is_in_step:
            self.timer = threading.Timer(after_s, self._strike)
            self.timer.start()

    def at_step(self) -> None:
        """Let it happen where its moment has come."""
        if self._act is not None and time.monotonic() >= self._due_s:
            self._strike()

    def _strike(self) -> None:
        act, self._act = self._act, None
        if act is None:
            return
        self._note()
        self.skips_reports = act is _skip_reports
        act()


@contextmanager
def _fault(config: dict[str, Any], number: int, rank: int, size: int) -> Iterator[_Fault]:
    name = config.get("fault")
    note = Path(config["folder"], "hits", f"{number}.json")
    # The first turn of a process is what the memory of later ones is compared with.
    is_hit = _num_turns > 1 if name == "leak" else number % 2 == 0
    chance = random.Random(f"{config['seed']} {number}")
    share, victim = chance.uniform(_EDGE, 1 - _EDGE), chance.randrange(size)
    if name is None or not is_hit or rank != victim or note.exists():
        yield _Fault()
        return

    def write() -> None:
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(json.dumps({"time_s": time.time()}), encoding="utf-8")

    after_s = share * num_epochs(number) * EPOCH_S
    is_in_step = name in IN_STEP
    act = IN_STEP[name] if is_in_step else ANY_TIME[name]
    fault = _Fault(act, after_s=after_s, is_in_step=is_in_step, note=write)
    try:
        yield fault
    finally:
        if fault.timer is not None:
            fault.timer.cancel()


def _raise() -> None:
    msg = "no data"
    raise ValueError(msg)


def _exit() -> None:
    sys.exit("no data")


def _interrupt() -> None:
    raise KeyboardInterrupt


def _allocate_too_much() -> None:
    _leaked.append(bytearray(1 << 60))


def _sleep_for_ever() -> None:
    while True:
        time.sleep(60)


def _skip_reports() -> None:
    """Nothing here: the loop goes on without them."""


def _leak() -> None:
    _leaked.append(bytearray(b"\1") * (LEAK_MIB * _MIB))


def _fill_memory() -> None:
    """Take memory until Ray ends this process, and never more than the table allows for."""
    limit_s = time.monotonic() + 30
    for _ in range(FILL_MIB // 64):
        _leaked.append(bytearray(b"\1") * (64 * _MIB))
        time.sleep(0.02)
    while time.monotonic() < limit_s:
        time.sleep(0.1)
    _leaked.clear()
    msg = "Ray did not end a process that holds too much memory."
    raise RuntimeError(msg)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _kill_lane() -> None:
    """End the process of this rank's lane: the one on this node whose mailbox we talk to."""
    siblings = psutil.Process(os.getppid()).children()
    lanes = [each for each in siblings if "Trainable" in "".join(each.cmdline())]
    ours = {each.raddr for each in psutil.Process().net_connections("tcp") if each.raddr}
    (lane,) = [each for each in lanes if ours & _listening(each)]
    lane.kill()


def _listening(process: psutil.Process) -> set[Any]:
    connections = process.net_connections("tcp")
    return {each.laddr for each in connections if each.status == psutil.CONN_LISTEN}


FILL_MIB = 3072
IN_STEP: dict[str, Callable[[], None]] = {
    "raise": _raise,
    "exit": _exit,
    "interrupt": _interrupt,
    "memory_error": _allocate_too_much,
    "fill_memory": _fill_memory,
    "leak": _leak,
    "hang": _sleep_for_ever,
    "uneven": _skip_reports,
}
"""What user code does."""
ANY_TIME: dict[str, Callable[[], None]] = {
    "kill": _kill,
    "terminate": _terminate,
    "kill_lane": _kill_lane,
}
"""What happens to a process, wherever it is at that moment."""


# --- as a program -----------------------------------------------------------------------------


@hydra.main(version_base="1.3", config_path=str(PROJECT / "conf"), config_name="config")
def main(cfg: DictConfig) -> Any:
    """What sweep.py does."""
    return hydra.utils.instantiate(cfg.recipe, _partial_=True, _convert_="all")()


def hang_at_every_second_load(starts: Path, num_hangs: int) -> None:
    """Never return where this is a worker, and the first, third, ... that loads the program.

    `starts` is a folder that gets a file for each load.
    """
    starts.mkdir(exist_ok=True)
    count = 0
    while True:
        try:
            (starts / f"{count}.json").touch(exist_ok=False)
            break
        except FileExistsError:
            count += 1
    if count % 2 == 0 and count // 2 < num_hangs:
        (starts / f"{count}.json").write_text(json.dumps({"time_s": time.time()}), encoding="utf-8")
        _sleep_for_ever()


if __name__ == "__main__":
    if ray.is_initialized() and "HEATS_BENCH_HANGS" in os.environ:
        hang_at_every_second_load(Path("starts"), int(os.environ["HEATS_BENCH_HANGS"]))
    main()
