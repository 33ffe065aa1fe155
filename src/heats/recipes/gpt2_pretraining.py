"""Pretraining a GPT-2 in a plain PyTorch loop that is fed by Ray Data.

After Ray's example of pretraining GPT-2 on WikiText-103. The ways to spread it over several GPUs,
and to save memory and time on one, are switches of the config.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from contextlib import contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from ray.train import Checkpoint, CheckpointUploadMode
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

import heats
from heats.recipes import gpt2, hub
from heats.recipes.gpt2 import TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pandas as pd
    import transformers

STRATEGIES = ("ddp", "fsdp", "fsdp2")
WEIGHTS, OPTIMIZER = "model.safetensors", "optimizer.pt"
MAX_GRADIENT_NORM = 1.0

# The other name of the embeddings, which a checkpoint need not have twice.
_TIED = "lm_head.weight"
_WHOLE = StateDictOptions(full_state_dict=True)
_SHARDED = StateDictOptions(strict=False)  # But for the name above.


def train(config: dict[str, Any]) -> None:
    """Train on every rank; after each epoch, validate, save, and report both.

    Reads the datasets `train`, split between the workers, and `validation`, of which every worker
    gets all (`gpt2.dataset`).

    Args:
        config: `lr`, `batch_size` (blocks of a worker for one forward pass), `epochs`,
            `weight_decay`, `seed`; sizes of the model (`gpt2.build_model`); the text
            (`gpt2.blocks`); `parallel_strategy` (ddp, fsdp, fsdp2), `precision` (fp32, bf16),
            `gradient_accumulation` (forward passes for one step of the optimizer), `compile`,
            `activation_checkpointing`, `checkpoint_upload` (sync, async), `steps_per_epoch` (None:
            all data), `shuffle_buffer` (blocks).

    Raises:
        ValueError: A switch has an unknown value.
        RuntimeError: `parallel_strategy` is fsdp, for several workers without GPUs.
    """
    _check(config)
    gpt2.quiet()
    encoding = gpt2.encoding(config["source"], config["data_dir"])
    network = gpt2.build_model(config)
    heats.set_tags(
        hub.tags(
            data=config["source"],
            data_fingerprint=gpt2.fingerprint(config),
            model=f"GPT-2, {network.num_parameters():,} parameters",
            model_fingerprint=hub.model_fingerprint(network),
        )
    )
    checkpoint = ray.train.get_checkpoint()
    with checkpoint.as_directory() if checkpoint else nullcontext() as directory:
        if directory:
            load_weights(network, directory)
        model = parallelize(network, config)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=config["lr"], weight_decay=config["weight_decay"]
        )
        epochs_done = load_state(model, optimizer, directory) if directory else 0

    for epoch in range(epochs_done + 1, config["epochs"] + 1):
        metrics = train_epoch(model, optimizer, config, epoch)
        metrics["val_loss"] = validate(model, config)
        with checkpoint_folder(config) as folder:
            if save_checkpoint(folder, network, model, optimizer, epoch):
                gpt2.save_encoding(encoding, folder)
            _report(metrics, folder, config)


def evaluate(config: dict[str, Any], checkpoint_dir: str) -> dict[str, float]:
    """`val_loss` of a checkpoint, computed anew on the validation blocks."""
    from heats.recipes import gpt2_predictor  # Here, since it tells MLflow that it is the model.

    gpt2.quiet()
    model = gpt2_predictor.load_model(checkpoint_dir)
    losses = [
        (float(loss), len(batch))
        for batch in gpt2.batches(config, "validation")
        for loss in [_validation_loss(model, batch, config)]
    ]
    return {"val_loss": sum(loss * size for loss, size in losses) / sum(size for _, size in losses)}


def example(config: dict[str, Any]) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Prompts as the predictor takes them, and its parameters."""
    import pandas as pd

    frame = pd.DataFrame({"prompt": [" = Aristotle = \n", "The capital of France is"]})
    return frame, {"max_new_tokens": 16, "temperature": 0.0, "seed": config["seed"]}


# --- the loop ---------------------------------------------------------------------------------


def train_epoch(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, Any], epoch: int
) -> dict[str, float]:
    """Metrics of one pass over this rank's share of the data, or of so many steps, for all ranks.

    All randomness depends on (seed, epoch, rank) alone: so a run that goes on from a checkpoint is
    the same as one that was never stopped.
    """
    context = ray.train.get_context()
    seeds = np.random.SeedSequence((config["seed"], epoch, context.get_world_rank()))
    dropout_seed, shuffle_seed = map(int, seeds.generate_state(2))
    torch.manual_seed(dropout_seed)
    batches = ray.train.get_dataset_shard("train").iter_torch_batches(
        batch_size=config["batch_size"],
        drop_last=True,  # All ranks take as many steps, with as many tokens.
        local_shuffle_buffer_size=config["shuffle_buffer"],
        local_shuffle_seed=shuffle_seed,
    )
    model.train()
    losses, num_tokens, began_s = [], 0, time.perf_counter()
    for step in islice(
        _grouped(batches, config["gradient_accumulation"]), config["steps_per_epoch"]
    ):
        losses.append(optimizer_step(model, optimizer, step, config["precision"]))
        num_tokens += sum(batch.numel() for batch in step)
    if not losses:
        msg = (
            f"{config['gradient_accumulation']} batches of {config['batch_size']} blocks for each "
            "worker are more than all data: no step was taken. Lower batch_size."
        )
        raise ValueError(msg)
    train_loss, num_tokens_of_all = _sums(torch.stack(losses).mean(), num_tokens)
    took_s = time.perf_counter() - began_s  # The sum has waited for all ranks and for the GPU.
    return {
        "epoch": epoch,
        "train_loss": train_loss / context.get_world_size(),
        "epoch_time_sec": took_s,
        "epoch_tokens": num_tokens_of_all,
        "tokens_per_sec": num_tokens_of_all / took_s,
    }


def optimizer_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor], precision: str
) -> Tensor:
    """Mean loss of the batches, each (batch, block_size) int64, whose gradients are added up."""
    total = torch.zeros((), device=batches[0].device)
    for index, batch in enumerate(batches):
        with _gradient_sync(model, is_last=index == len(batches) - 1):
            with _autocast(batch.device, precision):
                logits = model(input_ids=batch).logits
            loss = gpt2.next_token_loss(logits, batch) / len(batches)
            loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    if isinstance(model, FullyShardedDataParallel):
        model.clip_grad_norm_(MAX_GRADIENT_NORM)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
    optimizer.step()
    optimizer.zero_grad()
    return total


def validate(model: nn.Module, config: dict[str, Any]) -> float:
    """Mean loss over the validation blocks, of which each rank computes every n-th batch.

    A rank without a batch of its own at the end computes another's, which does not count: sharded
    models need all ranks for each forward pass.
    """
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    batches = ray.train.get_dataset_shard("validation").iter_torch_batches(
        batch_size=config["batch_size"]
    )
    total, num_blocks = 0.0, 0
    for group in _grouped(batches, world_size, whole=False):
        batch = group[rank % len(group)]
        loss = _validation_loss(model, batch, config)
        if rank < len(group):
            total += float(loss) * len(batch)
            num_blocks += len(batch)
    sum_of_all, num_of_all = _sums(torch.tensor(total, dtype=torch.float64), num_blocks)
    return sum_of_all / num_of_all


@torch.no_grad()
def _validation_loss(model: nn.Module, batch: Tensor, config: dict[str, Any]) -> Tensor:
    model.eval()
    with _autocast(batch.device, config["precision"]):
        logits = model(input_ids=batch).logits
    return gpt2.next_token_loss(logits, batch).double()


def _grouped(batches: Any, size: int, *, whole: bool = True) -> Iterator[list[Tensor]]:
    """Lists of `size` batches of tokens; what is left at the end only where `whole` is false."""
    tokens = (batch[TOKENS].long() for batch in batches)
    while group := list(islice(tokens, size)):
        if len(group) == size or not whole:
            yield group


def _sums(value: Tensor, count: int) -> tuple[float, float]:
    """Both, added up over all ranks."""
    device = ray.train.torch.get_device()
    sums = torch.stack([value.double().cpu(), torch.tensor(float(count), dtype=torch.float64)])
    sums = sums.to(device)
    if ray.train.get_context().get_world_size() > 1:
        dist.all_reduce(sums)
    total, count_of_all = sums.tolist()
    return total, count_of_all


def _autocast(device: torch.device, precision: str) -> torch.autocast:
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16")


# --- more than one device ---------------------------------------------------------------------


def parallelize(network: transformers.GPT2LMHeadModel, config: dict[str, Any]) -> nn.Module:
    """The model on this worker's device, replicated or sharded over all workers."""
    strategy = config["parallel_strategy"]
    if config["activation_checkpointing"]:
        network.activation_checkpointing_enable()
    if config["compile"]:
        # Sharded: block by block, so that the gathering of weights stays outside.
        for module in [network] if strategy == "ddp" else network.transformer.h:
            module.compile()
    if strategy == "fsdp2":
        device = ray.train.torch.get_device()
        network.to(device)
        mesh = init_device_mesh(device.type, (ray.train.get_context().get_world_size(),))
        for block in network.transformer.h:
            fully_shard(block, mesh=mesh)
        fully_shard(network, mesh=mesh)
        return network
    options: dict[str, Any] = {
        "auto_wrap_policy": ModuleWrapPolicy({GPT2Block}),
        "use_orig_params": True,
    }
    prepared: nn.Module = ray.train.torch.prepare_model(
        network,
        parallel_strategy=strategy,
        parallel_strategy_kwargs=options if strategy == "fsdp" else None,
    )
    return prepared


@contextmanager
def _gradient_sync(model: nn.Module, *, is_last: bool) -> Iterator[None]:
    """Exchange gradients between ranks in the last backward pass of a step only."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last)
        yield
    elif isinstance(model, (DistributedDataParallel, FullyShardedDataParallel)) and not is_last:
        with model.no_sync():
            yield
    else:
        yield


# --- checkpoints ------------------------------------------------------------------------------


def save_checkpoint(
    directory: str,
    network: transformers.GPT2LMHeadModel,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    epoch: int,
) -> bool:
    """Write this rank's part of a checkpoint; every rank has to call it. Whether it is rank 0.

    Of fsdp2 each rank writes its shards; otherwise rank 0 writes all.
    """
    is_first = bool(ray.train.get_context().get_world_rank() == 0)
    if isinstance(model, FSDPModule):
        weights, moments = get_state_dict(model, optimizer)
        weights.pop(_TIED)
        state = {"model": weights, "optimizer": moments, "epoch": epoch}
        save(state, checkpoint_id=directory)
        if is_first:
            network.config.save_pretrained(directory)
        return is_first
    weights, moments = get_state_dict(model, optimizer, options=_WHOLE)
    if is_first:
        network.save_pretrained(directory, state_dict=weights)
        torch.save({"optimizer": moments, "epoch": epoch}, Path(directory, OPTIMIZER))
    return is_first


def load_weights(network: nn.Module, directory: str) -> None:
    """Set a network that is not sharded yet to a whole checkpoint; a sharded one comes later."""
    if (path := Path(directory, WEIGHTS)).exists():
        network.load_state_dict(load_file(path), strict=False)  # But for the tied weights.


def load_state(model: nn.Module, optimizer: torch.optim.Optimizer, directory: str) -> int:
    """Epochs done when the checkpoint was written; the optimizer, and shards, are set to it.

    The strategy and the number of workers need not be those that wrote it.
    """
    if (path := Path(directory, OPTIMIZER)).exists():
        whole = torch.load(path, map_location="cpu", weights_only=True)
        set_optimizer_state_dict(model, optimizer, whole["optimizer"], options=_WHOLE)
        return int(whole["epoch"])
    weights, moments = get_state_dict(model, optimizer)
    weights.pop(_TIED)
    state: dict[str, Any] = {"model": weights, "optimizer": moments, "epoch": 0}
    load(state, checkpoint_id=directory)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=_SHARDED,
    )
    return int(state["epoch"])


@contextmanager
def checkpoint_folder(config: dict[str, Any]) -> Iterator[str]:
    """A new folder on each rank; removed at the end, or by Ray once it is uploaded."""
    folder = tempfile.mkdtemp()
    try:
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    if config["checkpoint_upload"] == "sync":
        shutil.rmtree(folder, ignore_errors=True)


def _report(metrics: dict[str, float], folder: str, config: dict[str, Any]) -> None:
    """Report the metrics with what this rank has of the checkpoint, if anything."""
    checkpoint = Checkpoint.from_directory(folder) if any(Path(folder).iterdir()) else None
    if config["checkpoint_upload"] == "sync":
        ray.train.report(metrics, checkpoint=checkpoint)
        return
    ray.train.report(
        metrics,
        checkpoint=checkpoint,
        checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
        delete_local_checkpoint_after_upload=True,
    )


def _check(config: dict[str, Any]) -> None:
    known = {
        "parallel_strategy": STRATEGIES,
        "precision": ("fp32", "bf16"),
        "checkpoint_upload": ("sync", "async"),
    }
    for key, values in known.items():
        if config[key] not in values:
            msg = f"{key}={config[key]!r} is unknown. Known: {', '.join(values)}."
            raise ValueError(msg)
