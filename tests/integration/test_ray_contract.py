"""What heats relies on in Ray beyond its public API; no cluster is started here.

A failure means that this Ray release moved a private name. Each message says what that name is for
and where heats uses it: adapt that place, keep both ways while both releases are supported, and
then run tests/integration/test_lane.py, which shows whether lanes still work.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import os
import pickle
import queue
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
import ray
import ray.train
from ray._private import serialization
from ray.air.execution._internal import actor_manager
from ray.air.execution._internal.actor_manager import RayActorManager
from ray.exceptions import OutOfMemoryError, RayActorError
from ray.train.torch import config as torch_config
from ray.train.v2._internal.execution import collective_impl, train_fn_utils
from ray.train.v2._internal.execution import context as train_context
from ray.train.v2._internal.execution.preemption import PreemptionWatcher
from ray.train.v2._internal.execution.storage import StorageContext
from ray.train.v2._internal.execution.training_report import _TrainingReport
from ray.train.v2._internal.execution.worker_group import state as worker_group_state
from ray.train.v2._internal.execution.worker_group import thread_runner, worker, worker_group
from ray.train.v2.api import reported_checkpoint
from ray.tune.execution.tune_controller import TuneController
from ray.tune.experiment.trial import _get_trainable_kwargs
from ray.tune.schedulers import PopulationBasedTraining
from ray.tune.schedulers.pb2 import PB2
from ray.tune.utils.object_cache import _ObjectCache

from heats import cluster
from heats.config import ValidationConf
from heats.errors import TrialStoppedError
from heats.lane.backend import WorkerTorchBackend
from heats.lane.context import turn_context
from heats.lane.deaths import memory_kills_are_deaths
from heats.lane.health import fault_of_group
from heats.lane.inline_context import inline_context
from heats.lane.mailbox import Address
from heats.lane.messages import (
    CheckpointsRequest,
    RankReport,
    Turn,
    TurnCheckpoints,
    TurnSettings,
    VerdictRequest,
)
from heats.lane.pulse import Pulse
from heats.lane.reports import TurnReports
from heats.lane.validation import validate_in_task
from heats.trial import Fault, LaneShape, Report, TrialSpec, Verdict
from heats.tune import loop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from heats.lane.mailbox import RankMailbox

CONTEXT = "src/heats/lane/context.py"
TRAINER = "src/heats/lane/trainer.py"
RESERVATION = "src/heats/lane/reservation.py"
REPO = Path(__file__).parents[2]


def require(holds: bool, what: str, why: str, where: str = CONTEXT) -> None:
    assert holds, (
        f"ray {ray.__version__}: {what} is not as expected. heats needs it because {why}: adapt "
        f"{where} to this release, then run tests/integration/test_lane.py."
    )


def parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


# --- names ------------------------------------------------------------------------------------

LIFE = "the life of a lane's workers"
V2 = "ray.train.v2._internal"
CONTROLLER = f"{V2}.execution.controller.controller.TrainController"
SCALING = f"{V2}.execution.scaling_policy.fixed.FixedScalingPolicy"
GROUP = f"{V2}.execution.worker_group"
TRAIN_CONTEXT = f"{V2}.execution.context.TrainContext"
STORAGE = f"{V2}.execution.storage.StorageContext"
UTILS = f"{V2}.execution.train_fn_utils"
LOCAL = f"{UTILS}.LocalTrainFnUtils"
INLINE = "src/heats/lane/inline_context.py"
TUNE = "src/heats/lane/trainable.py"

PREEMPTION, IDLE = "src/heats/lane/preemption.py", "src/heats/lane/idle.py"
ACTORS = "src/heats/lane/actors.py"
PRIVATE: dict[str, tuple[str, str]] = {
    TRAIN_CONTEXT: ("every turn has one of its own", CONTEXT),
    f"{TRAIN_CONTEXT}.report": ("a turn ends at a report", CONTEXT),
    f"{TRAIN_CONTEXT}._wait_then_report": ("a failed upload must not block others", CONTEXT),
    f"{TRAIN_CONTEXT}._sync_checkpoint_dir_name_across_ranks": ("one rank asks nobody", CONTEXT),
    f"{TRAIN_CONTEXT}.get_all_reported_checkpoints": ("a turn gives its own", CONTEXT),
    f"{TRAIN_CONTEXT}.get_storage": ("a trial has its own folder", CONTEXT),
    f"{TRAIN_CONTEXT}.get_result_queue": ("a turn takes reports", CONTEXT),
    f"{TRAIN_CONTEXT}.get_checkpoint": ("a turn gives its trial's", CONTEXT),
    f"{TRAIN_CONTEXT}.get_dataset_shard": ("it asks the turn's shard provider", CONTEXT),
    f"{TRAIN_CONTEXT}.get_world_rank": ("a turn belongs to a rank", CONTEXT),
    f"{TRAIN_CONTEXT}.get_world_size": ("a turn belongs to a lane", CONTEXT),
    f"{V2}.execution.context.get_train_context": ("a turn puts its context in place", CONTEXT),
    f"{V2}.execution.context.set_train_context": ("a turn puts its context in place", CONTEXT),
    f"{V2}.execution.context.logger.setLevel": ("it would write into every trial's log", CONTEXT),
    f"{V2}.execution.context.DistributedContext": ("an inline trial is rank 0 of 1", INLINE),
    f"{V2}.execution.context.ExecutionContext": ("an inline trial has a queue", INLINE),
    f"{V2}.execution.context.TrainRunContext": ("an inline trial has a name", INLINE),
    f"{V2}.execution.preemption.PreemptionContext": ("an inline trial is not preempted", INLINE),
    STORAGE: ("a turn writes into its trial's folder", CONTEXT),
    f"{STORAGE}._create_validation_file": ("no marker files among artifacts", CONTEXT),
    f"{STORAGE}._check_validation_file": ("no marker files among artifacts", CONTEXT),
    f"{UTILS}.get_train_fn_utils": ("heats.report asks whether it is in a trial", CONTEXT),
    f"{UTILS}.set_train_fn_utils": ("an inline trial puts its own in place", INLINE),
    LOCAL: ("an inline trial is like Ray's local mode", INLINE),
    f"{LOCAL}.report": ("an inline trial reports as a turn does", INLINE),
    f"{LOCAL}.get_checkpoint": ("an inline trial reports as a turn does", INLINE),
    f"{LOCAL}.get_all_reported_checkpoints": ("an inline trial reports as a turn does", INLINE),
    f"{LOCAL}.get_dataset_shard": ("an inline trial makes its datasets itself", INLINE),
    f"{V2}.callbacks.datasets.DatasetsCallback": ("a lane leaves it out", TRAINER),
    f"{V2}.callbacks.placement_group_callback.PlacementGroupCleanerCallback": (
        "a lane leaves it out",
        TRAINER,
    ),
    CONTROLLER: (LIFE, TRAINER),
    f"{CONTROLLER}.worker_group_cls": ("a lane brings its own", TRAINER),
    f"{CONTROLLER}.run": ("a lane runs it to its end", TRAINER),
    f"{CONTROLLER}.get_result": ("a lane learns of errors so", TRAINER),
    SCALING: (LIFE, TRAINER),
    f"{SCALING}.after_controller_start": ("a lane does not ask the autoscaler", TRAINER),
    f"{SCALING}.before_controller_shutdown": ("see after_controller_start", TRAINER),
    f"{SCALING}.before_controller_abort": ("see after_controller_start", TRAINER),
    f"{SCALING}._maybe_send_resource_request": ("see after_controller_start", TRAINER),
    f"{GROUP}.placement_group_handle.DefaultPlacementGroupHandle": (
        "a lane's placement group has a name of its own",
        TRAINER,
    ),
    f"{GROUP}.state._shutdown_sync_actor": ("it ends what is no actor with one rank", TRAINER),
    f"{GROUP}.worker_group.SynchronizationActor": ("one rank needs none", TRAINER),
    f"{GROUP}.worker_group.WorkerGroup": (LIFE, TRAINER),
    f"{GROUP}.worker_group.WorkerGroup._create_placement_group": (
        "a lane's has a name of its own",
        TRAINER,
    ),
    f"{GROUP}.worker_group.WorkerGroup._start_impl": (
        "one rank needs no synchronization actor",
        TRAINER,
    ),
    f"{V2}.util.TrainingFramework.TORCH": ("Ray is told what a run uses", TRAINER),
    "ray.train.v2.api.data_parallel_trainer.DataParallelTrainer._create_default_callbacks": (
        "a lane leaves two of them out",
        TRAINER,
    ),
    "ray.train.v2.api.data_parallel_trainer.DataParallelTrainer._initialize_and_run_controller": (
        "it runs in the lane's process",
        TRAINER,
    ),
    "ray.train._internal.utils.get_address_and_port": ("ranks meet there", TRAINER),
    "ray.train.torch.config.TorchConfigContextManager": ("workers take their device", TRAINER),
    "ray.train.torch.config._set_torch_distributed_env_vars": ("ranks join a group", TRAINER),
    "ray.train.torch.config._setup_torch_process_group": ("ranks join a group", TRAINER),
    "ray.tune.execution.tune_controller.TuneController._schedule_trial_task": (
        "a lane is told at once that its turn ends",
        TUNE,
    ),
    "ray.tune.execution.tune_controller.TuneController._trial_task_failure": (
        "a lane that died then is noticed",
        TUNE,
    ),
    f"{V2}.execution.callback.WorkerGroupCallback": ("lanes learn of preemption", PREEMPTION),
    f"{V2}.execution.callback.WorkerGroupCallback.after_worker_group_start": (
        "workers begin to listen for SIGTERM",
        PREEMPTION,
    ),
    f"{V2}.execution.callback.WorkerGroupCallback.before_worker_group_shutdown": (
        "nobody watches for the dead",
        PREEMPTION,
    ),
    f"{V2}.execution.callback.WorkerGroupCallback.after_worker_group_abort": (
        "nobody watches for the dead",
        PREEMPTION,
    ),
    f"{V2}.execution.preemption.PreemptionWatcher": ("it runs in the lane's process", PREEMPTION),
    "ray.tune.execution.class_cache._ActorClassCache": ("it makes the class of lanes", ACTORS),
    "ray.tune.execution.class_cache._ActorClassCache.get": (
        "lanes that stand are given to Tune here",
        ACTORS,
    ),
    "ray.tune.utils.object_cache._ObjectCache": ("idle lanes wait in one of ours", IDLE),
    "ray.tune.utils.object_cache._ObjectCache.cache_object": ("a lane becomes idle", IDLE),
    "ray.tune.utils.object_cache._ObjectCache.flush_cached_objects": ("lanes are retired", IDLE),
    "ray.tune.utils.object_cache._ObjectCache.pop_cached_object": ("a lane is used again", IDLE),
    "ray._private.serialization.OutOfMemoryError": (
        "a lane that Ray ended for want of memory has died",
        "src/heats/lane/deaths.py",
    ),
    "ray._private.state.actors": ("what dead lanes reserved is freed", RESERVATION),
    "ray._private.worker.get_dashboard_url": ("a sweep shows it", "src/heats/cluster.py"),
}
"""Each private name of Ray that heats uses: what for, and where."""


def of_ray(dotted: str) -> object:
    """What stands under a dotted name; raises where there is nothing."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise AttributeError(dotted)


def is_of_ray(dotted: str) -> bool:
    try:
        of_ray(dotted)
    except (AttributeError, ImportError):
        return False
    return True


def private_names(source: str) -> set[str]:
    """Ray's private names in a module: imported, read from what was imported, or overridden."""
    tree = ast.parse(source)
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "ray":
            known |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
        elif isinstance(node, ast.Import):
            has_ray = any(each.name.partition(".")[0] == "ray" for each in node.names)
            known |= {"ray": "ray"} if has_ray else {}
    used = set(known.values())
    for node in ast.walk(tree):
        match node:
            case ast.Attribute():
                first, _, rest = ast.unparse(node).partition(".")
                used |= {f"{known[first]}.{rest}"} if first in known else set()
            case ast.arg(annotation=ast.Name(id=kind)) if kind in known:
                own = rf"\b{node.arg}\.(_\w+)"
                used |= {f"{known[kind]}.{name}" for name in re.findall(own, source)}
            case ast.ClassDef():
                bases = [known[name] for name in map(ast.unparse, node.bases) if name in known]
                methods = [each.name for each in node.body if isinstance(each, ast.FunctionDef)]
                used |= {f"{base}.{method}" for base in bases for method in methods}
    parts = {name: [part for part in name.split(".") if not part.startswith("__")] for name in used}
    found = {name for name in used if any(part.startswith("_") for part in parts[name])}
    found = {name for name in found if is_of_ray(name) and not name.endswith("__")}
    return {name for name in found if not inspect.ismodule(of_ray(name))}


@pytest.mark.parametrize("name", sorted(PRIVATE))
def test_private_name_still_exists(name: str) -> None:
    why, where = PRIVATE[name]
    require(is_of_ray(name), name, why, where)


def test_every_private_name_in_use_has_its_contract() -> None:
    sources = sorted((REPO / "src/heats").rglob("*.py"))
    used = set[str]().union(*(private_names(path.read_text("utf-8")) for path in sources))
    assert used, "the search itself is broken"
    listed = " ".join(["", *(f"{name}." for name in PRIVATE)])  # A class counts with its methods.
    missing = {name for name in used if f" {name}." not in listed}
    assert not missing, (
        f"Private names of Ray without a contract: {sorted(missing)}. Use a public one, or add each"
        " to PRIVATE with what it is for, and test here what heats takes for granted about it."
    )


@pytest.mark.parametrize(
    ("field", "why"),
    [
        ("train_run_context", "a turn carries its trial's name in it"),
        ("distributed_context", "ranks and world size come from it"),
        ("execution_context", "a turn brings its own result queue"),
        ("storage_context", "a turn writes checkpoints into its trial's folder"),
        ("checkpoint", "get_checkpoint gives a turn its trial's checkpoint"),
        ("current_report_index", "every turn counts its reports from 1"),
        ("report_call_index", "every turn counts its reports from 1"),
        ("collective_seq", "collectives are counted over all turns"),
        ("report_order_condition", "reports of two turns must not wait for each other"),
        ("checkpoint_upload_threadpool", "a turn waits for its own uploads"),
    ],
)
def test_train_context_has_field(field: str, why: str) -> None:
    fields = {each.name: each for each in dataclasses.fields(train_context.TrainContext)}
    require(field in fields and fields[field].init, f"the field TrainContext.{field}", why)


def test_run_config_and_execution_context_can_be_replaced_in_part() -> None:
    run = {each.name for each in dataclasses.fields(train_context.TrainRunContext)}
    execution = {each.name for each in dataclasses.fields(train_context.ExecutionContext)}
    config = {each.name for each in dataclasses.fields(ray.train.RunConfig)}
    require("run_config" in run, "TrainRunContext.run_config", "it holds the trial's name")
    require("name" in config, "RunConfig.name", "get_experiment_name gives it to user code")
    require(
        {"result_queue", "training_thread_runner"} <= execution,
        "ExecutionContext with result_queue and training_thread_runner",
        "a turn brings its own of both",
    )


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("__init__", ["self", "storage_path", "experiment_dir_name"]),
        ("_create_validation_file", ["self"]),
        ("_check_validation_file", ["self"]),
        ("make_default_checkpoint_dir_name", []),
        ("persist_current_checkpoint", ["self", "checkpoint", "checkpoint_dir_name"]),
    ],
)
def test_storage_context_has_method(method: str, expected: list[str]) -> None:
    function = getattr(StorageContext, method, None)
    holds = function is not None and parameters(function)[: len(expected)] == expected
    require(holds, f"StorageContext.{method}({', '.join(expected)})", "TurnStorage builds on it")


def test_worker_takes_results_from_queue_without_waiting() -> None:
    for name in ("poll_status", "clear_result_queue"):
        source = inspect.getsource(getattr(worker.RayTrainWorker, name))
        calls = source.count("result_queue.")
        known = source.count("result_queue.get_nowait()") + source.count("result_queue.task_done()")
        require(
            calls == known and "queue.Empty" in source,
            f"what RayTrainWorker.{name} does with the result queue",
            "TurnQueue has put and get_nowait only",
        )


def test_worker_asks_known_things_of_thread_runner() -> None:
    runner = thread_runner.ThreadRunner
    for name in ("get_exception_queue", "is_running", "get_error", "get_return_value"):
        require(
            callable(getattr(runner, name, None)), f"ThreadRunner.{name}", "TurnRunner wraps it"
        )


@pytest.mark.parametrize("name", ["report", "get_all_reported_checkpoints"])
def test_local_train_fn_utils_has_method(name: str) -> None:
    function = getattr(train_fn_utils.LocalTrainFnUtils, name, None)
    require(function is not None, f"LocalTrainFnUtils.{name}", "inline trials override it")
    if name == "report":
        first = ["self", "metrics", "checkpoint", "checkpoint_dir_name"]
        assert function is not None
        require(
            parameters(function)[:4] == first,
            f"LocalTrainFnUtils.report({', '.join(first)})",
            "inline trials override it",
        )


def test_local_train_fn_utils_gives_last_checkpoint() -> None:
    utils: Any = train_fn_utils.LocalTrainFnUtils(experiment_name="trial-0")
    checkpoint = ray.train.Checkpoint("/somewhere")
    utils._last_checkpoint = checkpoint
    require(
        utils.get_checkpoint() is checkpoint,
        "LocalTrainFnUtils.get_checkpoint giving _last_checkpoint",
        "inline trials set it",
    )


def test_start_timeout_of_a_worker_group_is_an_attribute() -> None:
    names = worker_group.WorkerGroup.__init__.__code__.co_names
    require(
        "_worker_group_start_timeout_s" in names,
        "WorkerGroup._worker_group_start_timeout_s",
        "lane.start_timeout_s goes there",
        "heats/lane/trainer.py",
    )


def test_train_fn_utils_are_missing_outside_of_a_worker() -> None:
    try:
        train_fn_utils.get_train_fn_utils()
    except RuntimeError:
        return
    require(False, f"{train_fn_utils.__name__}.get_train_fn_utils", "heats.report relies on it")


def test_reported_checkpoint_is_made_of_checkpoint_metrics_and_status() -> None:
    names = parameters(reported_checkpoint.ReportedCheckpoint)[:3]
    require(
        names == ["checkpoint", "metrics", "status"]
        and hasattr(reported_checkpoint.ReportedCheckpointStatus, "COMMITTED"),
        "ReportedCheckpoint(checkpoint, metrics, status) with the status COMMITTED",
        "get_all_reported_checkpoints gives a turn's own",
    )


def test_training_report_has_checkpoint_and_metrics() -> None:
    report = _TrainingReport(checkpoint=None, metrics={"loss": 1.0}, validation=False)
    holds = report.checkpoint is None and report.metrics == {"loss": 1.0}
    require(holds, "_TrainingReport with checkpoint and metrics", "TurnQueue.put takes it apart")


def test_synchronization_actor_is_made_and_ended_as_expected() -> None:
    made = inspect.getsource(worker_group.WorkerGroup._start_impl)
    ended = inspect.getsource(worker_group_state)
    require(
        "SynchronizationActor.options(" in made and ").remote(" in made,
        "how WorkerGroup._start_impl makes its SynchronizationActor",
        "with one rank OneRankCollectives takes its place",
        TRAINER,
    )
    require(
        ended.count("ray.kill(sync_actor)") == 1,
        "how WorkerGroupState ends its synchronization actor",
        "with one rank it is no actor",
        TRAINER,
    )
    collectives = inspect.getsource(collective_impl) + inspect.getsource(train_context)
    calls = re.findall(r"sync_actor\.(\w+)\.remote", collectives)
    require(
        set(calls) == {"broadcast_from_rank_zero"},
        f"what workers call on their synchronization actor ({sorted(set(calls))})",
        "OneRankCollectives has broadcast_from_rank_zero only",
        TRAINER,
    )


def test_lane_that_ray_ended_for_want_of_memory_is_a_dead_actor_to_tune() -> None:
    text = (
        "1 worker(s) were killed due to the node running low on memory.\nTop 10 memory users: ..."
    )

    with memory_kills_are_deaths():
        killed = serialization.OutOfMemoryError(text)

    require(
        "return OutOfMemoryError(" in inspect.getsource(serialization.SerializationContext)
        and serialization.OutOfMemoryError is OutOfMemoryError
        and isinstance(killed, RayActorError)
        and fault_of_group(str(killed), num_oom_kills=0) is Fault.oom_killed,
        "ray._private.serialization.OutOfMemoryError",
        "Tune ends the whole sweep where an actor's task fails with it",
        "src/heats/lane/deaths.py",
    )
    assert pickle.loads(pickle.dumps(killed)).args == killed.args
    assert "OutOfMemoryError" not in inspect.getsource(actor_manager), (
        "Tune may know such deaths by now: then src/heats/lane/deaths.py can go."
    )


def test_torch_backend_starts_as_ours_does() -> None:
    source = inspect.getsource(torch_config._TorchBackend.on_start)
    joined = inspect.signature(torch_config._setup_torch_process_group)
    names = ["backend", "world_rank", "world_size", "init_method", "timeout_s"]
    require(
        list(joined.parameters) == names and "_set_torch_distributed_env_vars" in source,
        "how ray.train.torch starts a process group",
        "WorkerTorchBackend does the same without loading torch in the lane's process",
        TRAINER,
    )
    require(
        torch_config._TorchBackend.share_cuda_visible_devices
        and WorkerTorchBackend.share_cuda_visible_devices,
        "Ray's torch backend sharing CUDA_VISIBLE_DEVICES",
        "WorkerTorchBackend does the same",
        TRAINER,
    )


@pytest.mark.parametrize(
    ("name", "where"),
    [
        *((name, "src/heats/cluster.py") for name in cluster._RAY_ENV),
        *((name, "src/heats/tune/loop.py") for name in loop._TUNE_ENV),
    ],
)
def test_ray_still_reads_environment_variable(name: str, where: str, ray_source: str) -> None:
    require(name in ray_source, f"the environment variable {name}", "it sets it", where)


@pytest.fixture(scope="module")
def ray_source() -> str:
    """Ray's source, as far as it reads these variables: Python, and the settings of its raylet."""
    root = Path(inspect.getfile(ray)).parent
    folders = ("_private", "air", "train", "tune")
    files = [path for folder in folders for path in (root / folder).rglob("*.py")]
    python = "\n".join(path.read_text(encoding="utf-8") for path in files)
    raylet = (root / "core/src/ray/raylet/raylet").read_bytes()
    settings = [name for name in cluster._RAY_ENV if name.removeprefix("RAY_").encode() in raylet]
    return "\n".join([python, *settings])


# --- behaviour --------------------------------------------------------------------------------


class Wire:
    """A rank's mailbox that keeps what is sent and stops a trial at a given report."""

    def __init__(self, stop_at: int) -> None:
        self.stop_at = stop_at
        self.reports: list[Report] = []
        self._made = TurnReports(validate_in_task, lambda: None)

    def send(self, message: RankReport) -> None:
        self._made.add({0: message})
        self.reports += self._made.take()

    def ask(self, message: VerdictRequest | CheckpointsRequest) -> Verdict | TurnCheckpoints:
        if isinstance(message, CheckpointsRequest):
            return self._made.checkpoints(is_stopping=False)
        return Verdict.STOP if message.index >= self.stop_at else Verdict.CONTINUE


def spec_in(folder: Path, number: int = 7) -> TrialSpec:
    return TrialSpec(
        number=number,
        attempt=0,
        config=b"",
        shape=LaneShape(1, False, {"CPU": 1.0}),
        run_id=None,
        artifact_dir=str(folder / f"artifacts-{number}"),
        job_dir=str(folder),
        checkpoint=None,
    )


@pytest.fixture
def worker_context() -> Iterator[Any]:
    """A Train context as a worker with world size 1 has it, in place in this process."""
    base = train_context.TrainContext(
        train_run_context=train_context.TrainRunContext(
            run_config=ray.train.RunConfig(name="lane"),
            train_loop_config=None,
            scaling_config=ray.train.ScalingConfig(num_workers=1),
            backend_config=cast("Any", None),
            dataset_config=cast("Any", None),
        ),
        distributed_context=train_context.DistributedContext(0, 1, 0, 1, 0),
        execution_context=train_context.ExecutionContext(
            synchronization_actor=cast("Any", None),
            result_queue=queue.Queue(maxsize=1),
            training_thread_runner=thread_runner.ThreadRunner(),
            train_context_callbacks=[],
        ),
        storage_context=cast("Any", None),
        preemption_context=cast("Any", None),
        controller_actor=cast("Any", None),
        dataset_shard_provider=cast("Any", None),
    )
    train_context.set_train_context(base)
    train_fn_utils.set_train_fn_utils(train_fn_utils.DistributedTrainFnUtils())
    yield base
    train_fn_utils.set_train_fn_utils(None)
    train_context.set_train_context(cast("Any", None))


def in_turn(folder: Path, wire: Wire) -> turn_context:
    mailbox = cast("RankMailbox", wire)
    settings = TurnSettings("sweep", 0, "sqlite:///mlflow.db", None)
    turn, own = Turn(1, spec_in(folder), settings), Address("127.0.0.1", 1, b"")
    return turn_context(turn, mailbox, Pulse(0, mailbox, lambda: False), own)


def report_with_checkpoint(folder: Path, epoch: int, **options: Any) -> None:
    source = folder / f"local-{epoch}"
    source.mkdir()
    (source / "weights").write_text(str(epoch))
    checkpoint = ray.train.Checkpoint(str(source))
    ray.train.report({"epoch": epoch}, checkpoint=checkpoint, **options)


def read_weights() -> str:
    checkpoint = ray.train.get_checkpoint()
    assert checkpoint is not None
    return Path(checkpoint.path, "weights").read_text()


def test_report_in_turn_sends_report_and_stores_checkpoint_in_trials_folder(
    worker_context: Any, tmp_path: Path
) -> None:
    wire = Wire(stop_at=2)
    with in_turn(tmp_path, wire):
        assert ray.train.get_checkpoint() is None
        assert ray.train.get_context().get_experiment_name() == "trial-7"
        report_with_checkpoint(tmp_path, 1)
        assert read_weights() == "1"
        assert [each.metrics for each in ray.train.get_all_reported_checkpoints()] == [{"epoch": 1}]
        with pytest.raises(TrialStoppedError):
            ray.train.report({"epoch": 2})
    assert train_context.get_train_context() is worker_context
    assert [report.metrics["epoch"] for report in wire.reports] == [1.0, 2.0]
    stored = Path(wire.reports[0].checkpoint or "")
    assert stored.parent == tmp_path / "artifacts-7" / "checkpoints"
    assert os.listdir(stored.parent) == [stored.name]


def test_asynchronous_upload_is_over_when_turn_is(worker_context: Any, tmp_path: Path) -> None:
    wire = Wire(stop_at=99)
    mode = ray.train.CheckpointUploadMode.ASYNC
    with in_turn(tmp_path, wire):
        report_with_checkpoint(tmp_path, 1, checkpoint_upload_mode=mode)
    assert [Path(report.checkpoint or "", "weights").read_text() for report in wire.reports] == [
        "1"
    ]


def test_failed_asynchronous_upload_fails_turn(worker_context: Any, tmp_path: Path) -> None:
    def upload(checkpoint: ray.train.Checkpoint, name: str) -> ray.train.Checkpoint:
        msg = "no space"
        raise OSError(msg)

    mode = ray.train.CheckpointUploadMode.ASYNC
    with pytest.raises(Exception, match="no space"), in_turn(tmp_path, Wire(stop_at=99)):
        report_with_checkpoint(
            tmp_path, 1, checkpoint_upload_mode=mode, checkpoint_upload_fn=upload
        )


def test_report_of_inline_trial_stores_checkpoint_in_trials_folder(tmp_path: Path) -> None:
    reports: list[Report] = []

    def take(report: Report) -> Verdict:
        reports.append(report)
        return Verdict.STOP if len(reports) == 2 else Verdict.CONTINUE

    with inline_context(spec_in(tmp_path), take):
        assert ray.train.get_checkpoint() is None
        assert ray.train.get_context().get_experiment_name() == "trial-7"
        report_with_checkpoint(tmp_path, 1)
        assert read_weights() == "1"
        assert [each.metrics for each in ray.train.get_all_reported_checkpoints()] == [{"epoch": 1}]
        with pytest.raises(TrialStoppedError):
            ray.train.report({"epoch": 2})
    assert Path(reports[0].checkpoint or "").parent == tmp_path / "artifacts-7" / "checkpoints"


def valid_loss(checkpoint: ray.train.Checkpoint, factor: int) -> dict[str, float]:
    return {"valid_loss": factor * float(Path(checkpoint.path, "weights").read_text())}


def test_inline_trial_has_every_way_to_report(tmp_path: Path) -> None:
    reports: list[Report] = []

    def take(report: Report) -> Verdict:
        reports.append(report)
        return Verdict.CONTINUE

    def upload(checkpoint: ray.train.Checkpoint, name: str) -> ray.train.Checkpoint:
        target = Path(ray.train.get_context().get_storage().experiment_fs_path, f"{name}-own")
        shutil.copytree(checkpoint.path, target)
        return ray.train.Checkpoint(str(target))

    modes = ray.train.CheckpointUploadMode
    validation = ValidationConf(fn=f"{__name__}.valid_loss", fn_kwargs={"factor": 10})
    with inline_context(spec_in(tmp_path), take, validation=validation):
        report_with_checkpoint(tmp_path, 1, checkpoint_dir_name="a", checkpoint_upload_fn=upload)
        report_with_checkpoint(tmp_path, 2, validation=True)
        report_with_checkpoint(tmp_path, 3, checkpoint_upload_mode=modes.ASYNC)
        with pytest.raises(ValueError, match="outside the experiment"):
            report_with_checkpoint(tmp_path, 4, checkpoint_upload_mode=modes.NO_UPLOAD)
    assert [report.metrics["epoch"] for report in reports] == [1.0, 2.0, 3.0]
    assert Path(reports[0].checkpoint or "").name == "a-own"
    assert reports[1].metrics["valid_loss"] == 20.0
    assert not (tmp_path / "local-3").exists(), "an asynchronous upload deletes what it uploaded"


def test_validation_without_a_function_says_which_setting_it_needs(
    worker_context: Any, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"validation\.fn is not set"), in_turn(tmp_path, Wire(9)):
        report_with_checkpoint(tmp_path, 1, validation=True)


def test_preemption_of_a_worker_is_seen_in_its_turn(worker_context: Any, tmp_path: Path) -> None:
    with in_turn(tmp_path, Wire(stop_at=9)) as context:
        require(
            context.preemption_context is worker_context.preemption_context,
            "TrainContext.preemption_context",
            "Ray says there that a worker's node goes away, and get_preemption_info reads it",
        )


def test_tunes_controller_keeps_idle_actors_where_heats_puts_its_own() -> None:
    source = inspect.getsource(TuneController.__init__)
    what = "TuneController._actor_cache"
    require("self._actor_cache = _ObjectCache(" in source, what, "idle lanes wait in it", IDLE)
    cache = _ObjectCache(may_keep_one=True)
    fields = {"_cached_objects", "_num_cached_objects"}
    require(fields <= set(vars(cache)), "_ObjectCache's fields", "IdleLanes counts in them", IDLE)
    wrapped = inspect.getsource(TuneController._wrapped)
    require("TrialRunnerWrapper(" in wrapped, "TrialRunnerWrapper", "it is unwrapped", IDLE)


def test_tune_knows_which_trials_have_not_arrived_in_their_lane_yet() -> None:
    reset = inspect.getsource(TuneController._schedule_trial_reset)
    done = inspect.getsource(TuneController._on_trial_reset)
    holds = "self._resetting_trials.add(trial)" in reset
    holds &= "self._resetting_trials.remove(trial)" in done
    why = "a lane that died idle is not held against its trial"
    require(holds, "TuneController._resetting_trials", why, TUNE)


def test_tune_takes_its_actors_from_a_class_that_heats_gives_it() -> None:
    source = inspect.getsource(TuneController)
    holds = "self._class_cache = _ActorClassCache()" in source
    holds &= "_actor_cls = self._class_cache.get(trainable_cls)" in source
    require(holds, "TuneController._class_cache", "lanes that stand are taken there", ACTORS)
    source = inspect.getsource(RayActorManager._try_start_actors)
    holds = "isinstance(actor_cls, ray.actor.ActorClass)" in source
    holds &= "remote_actor_cls.remote(**kwargs)" in source
    require(holds, "RayActorManager", "it takes what looks like an actor's class", ACTORS)
    expected = ["self", "tracked_actor", "method_name", "args", "kwargs"]
    holds = parameters(RayActorManager.schedule_actor_task)[:5] == expected
    require(holds, "RayActorManager.schedule_actor_task", "a lane is told to end", IDLE)
    trial_kwargs = inspect.getsource(_get_trainable_kwargs)
    holds = '"config": trial_config' in trial_kwargs and '"storage": trial.storage' in trial_kwargs
    require(holds, "_get_trainable_kwargs", "a standing lane is reset with them", ACTORS)
    reset = parameters(ray.tune.Trainable.reset)
    require("storage" in reset, "Trainable.reset(storage)", "a standing lane is reset", ACTORS)


def test_preemption_watcher_tells_workers_and_can_be_stopped() -> None:
    expected = ["self", "node_to_ranks", "poll_interval_s", "worker_actors_by_rank"]
    holds = parameters(PreemptionWatcher.__init__) == expected
    what = f"PreemptionWatcher({', '.join(expected[1:])})"
    require(holds, what, "it runs in the lane's process", PREEMPTION)
    source = inspect.getsource(PreemptionWatcher)
    holds = "self._stop_event" in source and "mark_preempt" in source
    require(holds, "PreemptionWatcher._stop_event", "a closed lane stops it", PREEMPTION)


POPULATION = "src/heats/tune/population.py"


@pytest.mark.parametrize("kind", [PopulationBasedTraining, PB2])
def test_population_schedulers_decide_and_leave_the_doing_to_one_method(kind: Any) -> None:
    decides = inspect.getsource(PopulationBasedTraining._checkpoint_or_exploit)
    what = f"{kind.__name__}._exploit(tune_controller, trial, trial_to_clone)"
    expected = ["self", "tune_controller", "trial", "trial_to_clone"]
    holds = parameters(kind._exploit) == expected and "self._exploit(" in decides
    require(holds, what, "an exploit is noted, not done", POPULATION)
    holds = parameters(kind._get_new_config) == ["self", "trial", "trial_to_clone"]
    require(holds, f"{kind.__name__}._get_new_config", "it gives the new values", POPULATION)
    expected = ["self", "state", "time", "result", "trial"]
    holds = parameters(kind._save_trial_state) == expected
    require(holds, f"{kind.__name__}._save_trial_state", "a resumed one recalls", POPULATION)
