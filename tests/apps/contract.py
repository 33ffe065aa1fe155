"""A Hydra app that asks for everything `ray.train` gives a train function, and writes it down.

Each case is one trial. The same functions run in a plain `TorchTrainer`, for
tests/integration/test_ray_train_contract.py to compare what both see.
"""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import ray
import ray.data
import ray.train
import ray.train.collective
import ray.train.torch
import torch
import torch.distributed as dist
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from torch.utils.data import DataLoader, TensorDataset

NUM_ROWS = 42


@dataclass
class Contract:
    """The app's config; what a case saw goes to `folder`."""

    case: str = "context"
    folder: str = "told"
    loss: float = 0.0
    rows: int = 0


ConfigStore.instance().store(name="contract", node=Contract)


@hydra.main(version_base="1.3", config_path=None, config_name="contract")
def main(cfg: Contract) -> None:
    """Run the case."""
    if cfg.case == "stops":
        read_until_stopped(cfg)
    else:
        tell(cfg.case, cfg.folder)


def tell(case: str, folder: str) -> None:
    """Write down what a rank saw."""
    told = CASES[case]()
    rank = ray.train.get_context().get_world_rank()
    Path(folder).mkdir(parents=True, exist_ok=True)
    Path(folder, f"{case}-{rank}.json").write_text(json.dumps(told))


def make_dataset(rows: int, step: int) -> ray.data.Dataset:
    """Numbers in blocks of uneven size, made by tasks."""
    numbers = ray.data.range(rows, override_num_blocks=5)
    return numbers.map_batches(lambda batch: {"x": batch["id"] * step})


def make_shuffled(rows: int) -> ray.data.Dataset:
    """Numbers in another order in each epoch, the first of which is always the same."""
    seed = ray.data.RandomSeedConfig(seed=5, reseed_after_execution=True)
    return ray.data.range(rows, override_num_blocks=5).random_shuffle(seed=seed)


def read_until_stopped(cfg: Contract) -> None:
    """Two epochs, with a report after every other batch; writes down what it read of each."""
    rank = ray.train.get_context().get_world_rank()
    file = Path(cfg.folder, f"rows-{HydraConfig.get().job.num}-{rank}.json")
    file.parent.mkdir(exist_ok=True)
    shard = ray.train.get_dataset_shard("train")
    epochs: list[list[int]] = []
    for epoch in range(2):
        epochs.append([])
        for index, batch in enumerate(shard.iter_torch_batches(batch_size=4)):
            epochs[-1] += batch["id"].tolist()
            file.write_text(json.dumps(epochs))
            if index % 2:
                ray.train.report({"loss": cfg.loss, "epoch": epoch + 1})


def validate(checkpoint: ray.train.Checkpoint, **kwargs: Any) -> dict[str, Any]:
    """Metrics of a checkpoint's file; fails or takes long where it is told to."""
    assert isinstance(checkpoint, ray.train.Checkpoint)
    if kwargs.get("fails"):
        msg = "not a good checkpoint"
        raise RuntimeError(msg)
    if kwargs.get("hangs"):
        time.sleep(600)
    with checkpoint.as_directory() as directory:
        epoch = float(Path(directory, "rank-0").read_text())
    return {"valid_loss": epoch * kwargs["factor"], "what": "validated"}


# --- cases --------------------------------------------------------------------------------------


def context() -> dict[str, Any]:
    """Everything that is asked rather than done."""
    current = ray.train.get_context()
    assert isinstance(current, ray.train.TrainContext)
    getters = sorted(name for name in dir(current) if name.startswith("get_"))
    told = {name: outcome(getattr(current, name)) for name in getters if name != "get_storage"}
    storage = current.get_storage()
    rank = current.get_world_rank()
    model = ray.train.torch.prepare_model(torch.nn.Linear(2, 1))
    data = TensorDataset(torch.arange(8.0).reshape(4, 2))
    loader = ray.train.torch.prepare_data_loader(DataLoader(data, batch_size=1))
    ray.train.torch.enable_reproducibility(seed=7)
    drawn = float(torch.rand(()))
    ray.train.collective.barrier()
    return told | {
        "storage": [
            storage.storage_filesystem.type_name,
            Path(storage.experiment_fs_path).is_dir(),
        ],
        "checkpoint": outcome(ray.train.get_checkpoint),
        "reported": outcome(ray.train.get_all_reported_checkpoints),
        "preemption": outcome(ray.train.get_preemption_info),
        "broadcast": ray.train.collective.broadcast_from_rank_zero({"from": rank}),
        "model": type(model).__name__,
        "device": str(ray.train.torch.get_device()),
        "devices": [str(device) for device in ray.train.torch.get_devices()],
        "sampler": type(loader.sampler).__name__,
        "batches": [batch[0].tolist() for batch in loader],
        "drawn": drawn,
        "is deterministic": torch.are_deterministic_algorithms_enabled(),
        "group": [dist.get_backend(), dist.get_rank(), dist.get_world_size()],
        "accelerate": outcome(lambda: ray.train.torch.accelerate(amp=True)),
        "backward": outcome(lambda: ray.train.torch.backward(torch.zeros(()))),
        "prepare_optimizer": outcome(lambda: ray.train.torch.prepare_optimizer(None)),
        "environment": [os.environ[key] for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK")],
        "resources": ray.get_runtime_context().get_assigned_resources(),
        "no shard": outcome(lambda: ray.train.get_dataset_shard("unknown")),
        "no shard, no name": outcome(ray.train.get_dataset_shard),
        "default name": ray.train.TRAIN_DATASET_KEY,
    }


def reports() -> dict[str, Any]:
    """Every way to report, and what is known after each."""
    modes = ray.train.CheckpointUploadMode
    rank = ray.train.get_context().get_world_rank()
    seen: list[Any] = []

    def after(what: str, **told: Any) -> None:
        seen.append({"after": what, "last": last_checkpoint(), **told})

    ray.train.report({"loss": 1.0, "note": "text", "list": [1, 2]})
    after("metrics")
    with tempfile.TemporaryDirectory() as folder:
        ray.train.report({"loss": 0.9, "note": "a text"}, checkpoint=written(folder, 1))
        after("checkpoint", left=os.listdir(folder), reported=reported())
    folder = tempfile.mkdtemp()
    ray.train.report(
        {"loss": 0.8},
        checkpoint=written(folder, 2),
        checkpoint_dir_name="named",
        delete_local_checkpoint_after_upload=True,
    )
    after("name", left=Path(folder).exists())
    with tempfile.TemporaryDirectory() as folder:
        ray.train.report(
            {"loss": 0.7},
            checkpoint=written(folder, 3),
            checkpoint_dir_name="own-upload",
            checkpoint_upload_fn=upload,
        )
    after("upload function")
    folder = tempfile.mkdtemp()
    ray.train.report(
        {"loss": 0.6},
        checkpoint=written(folder, 4),
        checkpoint_upload_mode=modes.ASYNC,
        checkpoint_dir_name="async",
    )
    committed = ray.train.CheckpointConsistencyMode.COMMITTED
    after("asynchronous", reported=reported(committed), left=Path(folder).exists())
    storage = ray.train.get_context().get_storage()
    direct = Path(storage.experiment_fs_path, "direct")
    direct.mkdir(exist_ok=True)
    ray.train.report(
        {"loss": 0.5},
        checkpoint=written(str(direct), 5),
        checkpoint_upload_mode=modes.NO_UPLOAD,
    )
    after("no upload", left=sorted(os.listdir(direct))[0])
    checkpoint = written(tempfile.mkdtemp(), 6) if rank == 0 else None
    ray.train.report({"loss": 0.4 + rank}, checkpoint=checkpoint, checkpoint_dir_name="of-rank-0")
    after("checkpoint of rank 0")
    model = torch.nn.Linear(1, 1)
    torch.nn.init.ones_(model.weight)
    torch_checkpoint = ray.train.torch.TorchCheckpoint.from_state_dict(model.state_dict())
    ray.train.report({"loss": 0.3}, checkpoint=torch_checkpoint, checkpoint_dir_name="torch")
    ray.train.collective.barrier()
    last = ray.train.get_checkpoint()
    assert last is not None
    with last.as_directory() as directory:
        files = sorted(os.listdir(directory))
    outside = written(tempfile.mkdtemp(), 7)
    return {
        "seen": seen,
        "files": files,
        "all": reported(),
        "at once": len(ray.train.get_all_reported_checkpoints(timeout_s=0.01)),
        "tensor": outcome(lambda: ray.train.report({"loss": torch.zeros(())})),
        "elsewhere": outcome(
            lambda: ray.train.report({}, outside, checkpoint_upload_mode=modes.NO_UPLOAD)
        ),
        "nothing to validate": outcome(lambda: ray.train.report({}, validation=True)),
    }


def validations() -> dict[str, Any]:
    """Checkpoints that are validated, that fail, and that take too long."""
    asked = [
        True,
        ray.train.ValidationTaskConfig(fn_kwargs={"factor": 100}),
        ray.train.ValidationTaskConfig(fn_kwargs={"fails": True}),
        ray.train.ValidationTaskConfig(fn_kwargs={"hangs": True}, timeout_s=2.0),
        False,
    ]
    committed = ray.train.CheckpointConsistencyMode.COMMITTED
    early = None
    for epoch, validation in enumerate(asked, 1):
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = written(folder, epoch)
            ray.train.report({"epoch": epoch}, checkpoint=checkpoint, validation=validation)
        if epoch == 1:
            early = len(ray.train.get_all_reported_checkpoints(committed))
    ray.train.collective.barrier()
    everything = ray.train.get_all_reported_checkpoints()
    assert all(isinstance(each, ray.train.ReportedCheckpoint) for each in everything)
    assert all(isinstance(each.status, ray.train.ReportedCheckpointStatus) for each in everything)
    return {"early": early, "all": reported()}


def shards() -> dict[str, Any]:
    """Rows of each rank, epoch by epoch, one of them left in the middle."""
    train, whole = ray.train.get_dataset_shard("train"), ray.train.get_dataset_shard("whole")
    assert train is not None
    assert whole is not None
    epochs = []
    for epoch in range(3):
        rows: list[int] = []
        for batch in train.iter_torch_batches(batch_size=4):
            rows += batch["x"].tolist()
            if epoch == 1 and len(rows) >= 8:
                break
        epochs.append(rows)
        ray.train.report({"loss": 1.0 / (epoch + 1)})
    return {
        "epochs": epochs,
        "whole": [int(row["x"]) for row in whole.iter_rows()],
        "is the same": ray.train.get_dataset_shard("train") is train,
    }


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "context": context,
    "reports": reports,
    "validations": validations,
    "shards": shards,
}


# --- helpers ------------------------------------------------------------------------------------


def outcome(call: Callable[[], object]) -> object:
    """What a call gives or raises, as JSON."""
    try:
        value = call()
    except Exception as exc:  # noqa: BLE001 - whatever it is, it is to be the same in both
        return type(exc).__name__
    return value.item() if isinstance(value, np.generic) else value


def written(folder: str, epoch: int) -> ray.train.Checkpoint:
    """A checkpoint with a file of this rank, and metadata."""
    rank = ray.train.get_context().get_world_rank()
    Path(folder, f"rank-{rank}").write_text(str(epoch))
    return ray.train.Checkpoint.from_directory(folder)


def upload(checkpoint: ray.train.Checkpoint, name: str) -> ray.train.Checkpoint:
    """Copy a checkpoint to where the trial's checkpoints are."""
    target = Path(ray.train.get_context().get_storage().experiment_fs_path, name)
    shutil.copytree(checkpoint.path, target, dirs_exist_ok=True)
    return ray.train.Checkpoint(str(target))


def named(checkpoint: ray.train.Checkpoint) -> str:
    """A checkpoint's name, without the time that Ray puts into it."""
    storage = ray.train.get_context().get_storage()
    name = Path(checkpoint.path).relative_to(storage.experiment_fs_path).as_posix()
    return "checkpoint" if name.startswith("checkpoint_") else name


def last_checkpoint() -> object:
    """The newest checkpoint's name, and the number in its file of this rank."""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return None
    rank = ray.train.get_context().get_world_rank()
    with checkpoint.as_directory() as directory:
        return [named(checkpoint), Path(directory, f"rank-{rank}").read_text()]


def reported(
    mode: ray.train.CheckpointConsistencyMode = ray.train.CheckpointConsistencyMode.VALIDATED,
) -> object:
    """All checkpoints that were reported."""
    return [
        [named(each.checkpoint), each.metrics, each.status.value]
        for each in ray.train.get_all_reported_checkpoints(mode)
    ]


if __name__ == "__main__":
    main()
