"""Tokens per second of the recipe gpt2_pretraining in a lane, beside the bare loop under torchrun.

Both take the same steps with the same model and number of ranks, each time in a new process, taking
turns. In the lane Ray Data gives the blocks; the bare loop has all of them in memory.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from benchmarks.machine import PROJECT
from benchmarks.throughput import compare, torchrun

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

DATA_DIR = PROJECT / ".cache" / "data"
_EPOCHS = 2  # The first one warms up.

# Dense bf16, in FLOP per second, from NVIDIA's data sheets.
PEAKS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "L4": 121e12, "T4": 65e12}
_SMALL = {"n_layer": 4, "n_head": 4, "n_embd": 64, "block_size": 128}
_GPT2 = {"n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 256}


def train(config: dict[str, Any]) -> None:
    """The recipe as a trial; `out` takes tokens per second of the last epoch."""
    import ray.train

    from heats.recipes import gpt2_pretraining

    gpt2_pretraining.train(config)
    *_, last = ray.train.get_all_reported_checkpoints()
    if ray.train.get_context().get_world_rank() == 0:
        speed = last.metrics["tokens_per_sec"]
        Path(config["out"]).write_text(json.dumps(speed), encoding="utf-8")


def bare(config: dict[str, Any], out: str) -> None:
    """The same steps under torchrun, without Ray and heats."""
    from heats.recipes import gpt2, gpt2_pretraining

    has_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if has_gpu else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # As a lane's worker with one CPU has it.
    network: torch.nn.Module = gpt2.build_model(config)
    model = torch.nn.parallel.DistributedDataParallel(network.to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batches = _batches(config, device)
    for _ in range(_EPOCHS):
        began_s, num_tokens = time.perf_counter(), 0
        for batch in islice(batches, config["steps_per_epoch"]):
            loss = gpt2_pretraining.optimizer_step(model, optimizer, [batch], config["precision"])
            num_tokens += batch.numel() * dist.get_world_size()
        loss.item()  # Waits for the GPU.
        dist.barrier()
        speed = num_tokens / (time.perf_counter() - began_s)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(speed), encoding="utf-8")
    dist.destroy_process_group()


def _batches(config: dict[str, Any], device: torch.device) -> Iterator[Tensor]:
    """Batches of full size without an end."""
    from heats.recipes import gpt2

    found = [each.to(device) for each in gpt2.batches(config, "train")]
    return cycle([each for each in found if len(each) == config["batch_size"]])


def utilization(config: dict[str, Any], tokens_per_s: float, device_name: str) -> float | None:
    """Share of a GPU's bf16 peak that the model's own arithmetic takes; None: unknown GPU.

    6 N + 12 L d T floating-point operations for a token (PaLM, arXiv:2204.02311, appendix B).

    Args:
        config: Sizes of the model.
        tokens_per_s: Of one GPU.
        device_name: As `torch.cuda.get_device_name` tells it.
    """
    from heats.recipes import gpt2

    peak = next((peak for name, peak in PEAKS.items() if name in device_name), None)
    if peak is None:
        return None
    with torch.device("meta"):
        num_parameters = gpt2.build_model(config).num_parameters()
    attention: int = 12 * config["n_layer"] * config["n_embd"] * config["block_size"]
    return tokens_per_s * (6 * num_parameters + attention) / peak


# --- the command ------------------------------------------------------------------------------


def main(arguments: list[str]) -> None:
    """Run both in turns, print the ratio, and write the numbers to `benchmarks/results`."""
    has_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpt2", description=__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each")
    parser.add_argument("--ranks", type=int, default=1, help="workers, one CPU or GPU each")
    parser.add_argument("--steps", type=int, default=100 if has_gpu else 20, help="of an epoch")
    parser.add_argument("--batch-size", type=int, default=16 if has_gpu else 2, help="of a worker")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--size", choices=["small", "gpt2"], default="gpt2" if has_gpu else "small")
    options = parser.parse_args(arguments)
    sizes = _GPT2 if options.size == "gpt2" else _SMALL
    config: dict[str, Any] = {
        **sizes,
        "n_positions": sizes["block_size"],
        "dropout": 0.0,
        "seed": 0,
        "source": "wikipedia-gensim",
        "name": None,
        "data_dir": str(DATA_DIR),
        "lines_per_part": 1024,
        "max_val_lines": 20,
        "batch_size": options.batch_size,
        "steps_per_epoch": options.steps,
        "precision": options.precision,
    }

    def command(name: str, out: Path) -> list[str]:
        if name == "bare":
            call = f"from benchmarks.gpt2 import bare; bare({config!r}, {str(out)!r})"
            return torchrun(options.ranks, call)
        top = {"batch_size", "seed"}
        given = {key: value for key, value in config.items() if key not in top}
        return [
            str(PROJECT / "sweep.py"),
            "recipe=gpt2_pretraining",
            "recipe._target_=benchmarks.gpt2.train",
            f"+recipe.config.out={out}",
            f"batch_size={options.batch_size}",
            f"epochs={_EPOCHS}",
            *(f"recipe.config.{key}={_as_hydra(value)}" for key, value in given.items()),
            "scheduler=none",
            "study_name=gpt2",
            f"scaling.num_workers={options.ranks}",
            *(
                ()
                if has_gpu
                else (
                    "scaling.resources_per_worker={CPU:1}",
                    f"cluster.num_cpus={options.ranks + 1}",  # One for Ray Data.
                )
            ),
        ]

    def facts(speeds: dict[str, list[float]]) -> dict[str, Any]:
        if not has_gpu:
            return {"config": config}
        name = torch.cuda.get_device_name()
        each = [speed / options.ranks for speed in speeds["lane"]]
        mfu = [utilization(config, speed, name) for speed in each]
        return {"config": config, "gpu": name, "mfu": mfu}

    compare("gpt2", "tokens", arguments, options.repeats, options.ranks, command, facts)


def _as_hydra(value: object) -> object:
    return "null" if value is None else value
