"""The Train context of one turn: what `ray.train` gives a train function.

Every turn gets its own `TrainContext` inside the long-lived worker, so `ray.train.report`,
`get_checkpoint`, `get_context`, collectives and framework callbacks work unmodified. Verified on
ray 2.60; tests/integration/test_ray_contract.py covers each private name and says what to do when a
release moves it.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import pickle
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from ray import cloudpickle
from ray.train import (
    Checkpoint,
    CheckpointConsistencyMode,
    CheckpointUploadMode,
    ReportedCheckpoint,
    ReportedCheckpointStatus,
)
from ray.train.v2._internal.execution import context as train_context
from ray.train.v2._internal.execution import train_fn_utils
from ray.train.v2._internal.execution.context import TrainContext
from ray.train.v2._internal.execution.storage import StorageContext

from heats.checkpoints import CHECKPOINTS_DIR
from heats.errors import TrialStoppedError
from heats.lane.datasets import TurnShards
from heats.lane.leftovers import TemporaryFolders
from heats.lane.messages import CheckpointsRequest, RankReport, VerdictRequest
from heats.lane.validation import validation_task
from heats.trial import Report, Verdict, clean_metrics

if TYPE_CHECKING:
    from heats.config import ValidationConf
    from heats.lane.mailbox import Address, RankMailbox
    from heats.lane.messages import Turn
    from heats.lane.pulse import Pulse
    from heats.trial import TrialSpec


_LOOK_EVERY_S = 0.2
"""How often a report that waits for earlier uploads looks whether one of them failed, in s."""

_CHECKPOINTS_LOOK_S = 0.05
"""How often `get_all_reported_checkpoints` asks for what it waits for, in s."""


def checkpoint_uri(checkpoint: Checkpoint) -> str:
    """Local path, or URI on another file system; `Checkpoint(checkpoint_uri(c))` reads it back."""
    scheme = checkpoint.filesystem.type_name
    return str(checkpoint.path) if scheme == "local" else f"{scheme}://{checkpoint.path}"


class TurnStorage(StorageContext):
    """Ray's storage rooted at a trial's artifact directory, without marker files in it."""

    def __init__(self, artifact_dir: str) -> None:
        super().__init__(artifact_dir, CHECKPOINTS_DIR)

    def _create_validation_file(self) -> None:
        """Not needed: the first checkpoint creates the directory and tests it."""

    def _check_validation_file(self) -> None:
        """See `_create_validation_file`."""


class TurnQueue:
    """Stands in for the worker's result queue: reports go to the lane, one way."""

    def __init__(
        self, turn: Turn, rank: int, mailbox: RankMailbox, pulse: Pulse, validation: ValidationConf
    ) -> None:
        self._turn, self._rank, self._mailbox = turn, rank, mailbox
        self._pulse, self._validation = pulse, validation
        self._num_reports = 0
        self.tags: dict[str, str] = {}

    def put(self, training_report: Any) -> None:
        """Take a `_TrainingReport` of Ray Train; called in the training or an upload thread.

        Ray Train keeps the calls of a rank in the order of its reports.
        """
        checkpoint, metrics = training_report.checkpoint, training_report.metrics
        asked, task = training_report.validation, None
        if asked and checkpoint is not None:
            task = validation_task(self._validation, asked, self._turn.spec.job_dir)
        self._num_reports += 1
        uri = None if checkpoint is None else checkpoint_uri(checkpoint)
        cleaned, pickled = {}, b""
        if self._rank == 0:
            cleaned, pickled = clean_metrics(metrics), _pickled(metrics)
        report = Report(time.time(), cleaned, uri, tags=dict(self.tags))
        self.tags.clear()
        message = RankReport(self._turn.index, self._num_reports, report, pickled, task)
        self._mailbox.send(message)

    def get_nowait(self) -> Any:
        """Nothing ever waits here for Ray Train's health check to take it."""
        raise queue.Empty

    def verdict(self, index: int) -> Verdict:
        """Whether the turn goes on after report `index`; every rank gets the same answer."""
        return self._mailbox.ask(VerdictRequest(self._turn.index, index))

    def reported(
        self, index: int, mode: CheckpointConsistencyMode, timeout_s: float | None
    ) -> list[ReportedCheckpoint]:
        """The turn's checkpoints, once its first `index` reports are in the state of `mode`.

        Sooner where `timeout_s` passed, or the turn is to stop.
        """
        until = time.monotonic() + (math.inf if timeout_s is None else timeout_s)
        is_validated = mode is CheckpointConsistencyMode.VALIDATED
        while True:
            answer = self._mailbox.ask(CheckpointsRequest(self._turn.index))
            is_validating = is_validated and answer.is_validating
            is_whole = answer.num_reports >= index
            if (is_whole and not is_validating) or answer.is_stopping:
                break
            train_context.get_train_context().execution_context.training_thread_runner.raise_first()
            if is_whole:
                self._pulse.moved()  # A validation has its own time limit: it is no hang.
            if time.monotonic() >= until:
                break
            time.sleep(_CHECKPOINTS_LOOK_S)
        return [
            ReportedCheckpoint(
                Checkpoint(each.uri),
                {key: value for part in each.pickled for key, value in pickle.loads(part).items()},
                ReportedCheckpointStatus(each.status),
            )
            for each in answer.checkpoints
        ]


class ReportQueue(Protocol):
    """Where a `TurnContext` leaves reports, and asks about them: see `TurnQueue`.

    `tags` go with the next report.
    """

    tags: dict[str, str]

    def put(self, training_report: Any) -> None:
        """Take a report."""
        ...

    def verdict(self, index: int) -> Verdict:
        """Whether to go on after it."""
        ...

    def reported(
        self, index: int, mode: CheckpointConsistencyMode, timeout_s: float | None
    ) -> list[ReportedCheckpoint]:
        """The checkpoints so far."""
        ...


class TurnRunner:
    """Stands in for the worker's thread runner: keeps what asynchronous uploads raise.

    To Ray Train's health checks the worker's own thread, which serves the turns, goes on running.
    """

    def __init__(self, base: Any) -> None:
        self._base = base
        self._errors: list[BaseException] = []

    def __getattr__(self, name: str) -> Any:
        """Whatever else Ray Train asks is the worker's own."""
        return getattr(self._base, name)

    def get_exception_queue(self) -> TurnRunner:
        """Where Ray Train puts an upload's exception."""
        return self

    def put(self, error: BaseException) -> None:
        """Take an upload's exception."""
        self._errors.append(error)

    def raise_first(self) -> None:
        """Raise the first upload error, if there was one."""
        if self._errors:
            raise self._errors[0]


class TurnContext(TrainContext):
    """Ray's Train context, ending the turn at the report where the verdict is to stop.

    What belongs to the trial: the experiment name (`trial-<number>`), the storage, checkpoints and
    reports. What belongs to the lane: ranks and sizes, the resources and the device of the worker,
    the process group, and preemption.
    """

    pulse: Pulse | None = None
    last_reported: Checkpoint | None = None
    """The checkpoint of the report at which the trial was stopped, as user code wrote it."""
    earlier: tuple[tuple[str, dict[str, float]], ...] = ()

    @classmethod
    def of_trial(
        cls,
        base: TrainContext,
        spec: TrialSpec,
        reports: ReportQueue,
        shards: Any,
        validation: ValidationConf,
    ) -> TurnContext:
        """A context like `base`, but for one attempt at a trial."""
        run_config = dataclasses.replace(
            base.train_run_context.run_config, name=f"trial-{spec.number}"
        )
        runner = TurnRunner(base.execution_context.training_thread_runner)
        fields = {f.name: getattr(base, f.name) for f in dataclasses.fields(TrainContext)}
        fields.update(
            train_run_context=dataclasses.replace(base.train_run_context, run_config=run_config),
            execution_context=dataclasses.replace(
                base.execution_context, result_queue=reports, training_thread_runner=runner
            ),
            storage_context=TurnStorage(spec.artifact_dir),
            dataset_shard_provider=shards,
            has_validation_fn=validation.fn is not None,
            checkpoint=None if spec.checkpoint is None else Checkpoint(spec.checkpoint),
            current_report_index=0,
            report_call_index=0,
            report_order_condition=threading.Condition(),
            checkpoint_upload_threadpool=ThreadPoolExecutor(1),
        )
        context = cls(**fields)
        context.earlier = spec.reported
        return context

    def report(
        self,
        metrics: dict[str, Any],
        checkpoint: Checkpoint | None = None,
        checkpoint_dir_name: str | None = None,
        checkpoint_upload_mode: CheckpointUploadMode = CheckpointUploadMode.SYNC,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Report as Ray does, then take the verdict.

        Raises:
            TrialStoppedError: The trial is to stop here.
        """
        with nullcontext() if self.pulse is None else self.pulse.report():
            try:
                super().report(
                    metrics,
                    checkpoint,
                    checkpoint_dir_name,
                    checkpoint_upload_mode,
                    *args,
                    **kwargs,
                )
            except ValueError as exc:
                if not self.has_validation_fn and "validation_config" in str(exc):
                    msg = "A validation was requested, but validation.fn is not set."
                    raise ValueError(msg) from exc
                raise
        self.execution_context.training_thread_runner.raise_first()
        if self.get_result_queue().verdict(self.report_call_index) is not Verdict.CONTINUE:
            if checkpoint_upload_mode is not CheckpointUploadMode.NO_UPLOAD:
                self.last_reported = checkpoint  # Else it is the trial's only one.
            raise TrialStoppedError

    def _wait_then_report(self, training_report: Any, report_call_index: int) -> None:
        # A failed upload never makes its report, and those behind it would wait for ever.
        with self.report_order_condition:
            while self.current_report_index != report_call_index - 1:
                self.execution_context.training_thread_runner.raise_first()
                self.report_order_condition.wait(_LOOK_EVERY_S)
        super()._wait_then_report(training_report, report_call_index)

    def get_storage(self) -> StorageContext:
        """The trial's storage, in a directory that exists: user code may write there itself."""
        storage = self.storage_context
        storage.storage_filesystem.create_dir(storage.experiment_fs_path)
        return storage

    def get_all_reported_checkpoints(
        self,
        consistency_mode: CheckpointConsistencyMode = CheckpointConsistencyMode.VALIDATED,
        timeout_s: float | None = None,
    ) -> list[ReportedCheckpoint]:
        """The trial's checkpoints that still exist; Ray's controller knows nothing of turns."""
        committed = ReportedCheckpointStatus.COMMITTED
        earlier = [
            ReportedCheckpoint(Checkpoint(uri), dict(metrics), committed)
            for uri, metrics in self.earlier
        ]
        own = self.get_result_queue().reported(self.report_call_index, consistency_mode, timeout_s)
        return [each for each in [*earlier, *own] if _exists(each.checkpoint)]

    def _sync_checkpoint_dir_name_across_ranks(self, checkpoint_dir_name: str | None = None) -> str:
        if self.get_world_size() == 1:  # Nobody to agree with: saves a remote call at each report.
            return checkpoint_dir_name or self.storage_context.make_default_checkpoint_dir_name()
        name: str = super()._sync_checkpoint_dir_name_across_ranks(checkpoint_dir_name)
        return name

    def end_uploads(self) -> None:
        """Wait until what was to be uploaded is."""
        self.checkpoint_upload_threadpool.shutdown(wait=True)

    def raise_first(self) -> None:
        """Raise what the first upload that failed raised, if one did."""
        self.execution_context.training_thread_runner.raise_first()


class turn_context:  # noqa: N801 - a context manager, used like a function
    """Put a context for `turn` in place, and the worker's own back at the end.

    Leaving waits for the turn's asynchronous uploads and raises what they raised, unless the turn
    already ends with an exception.
    """

    def __init__(self, turn: Turn, mailbox: RankMailbox, pulse: Pulse, address: Address) -> None:
        self._base = base = train_context.get_train_context()
        own = turn.settings
        world_size = base.get_world_size()
        self._context = TurnContext.of_trial(
            base,
            turn.spec,
            TurnQueue(turn, base.get_world_rank(), mailbox, pulse, own.validation),
            TurnShards(turn.spec, own.sweep_id, address.name, turn.index, world_size, pulse),
            own.validation,
        )
        self._context.pulse = pulse
        self._temporary = TemporaryFolders()

    def __enter__(self) -> TrainContext:
        """Give the turn's context, now in place."""
        train_context.set_train_context(self._context)
        return self._context

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Put the worker's own context back; collectives go on counting where the turn left."""
        self._context.end_uploads()
        if self._context.last_reported is not None:
            self._temporary.remove(self._context.last_reported.path)
        self._base.collective_seq = self._context.collective_seq
        train_context.set_train_context(self._base)
        if error is None:
            self._context.raise_first()


def quiet_ray_train() -> None:
    """Leave what Ray Train tells of every report and checkpoint out of the trials' logs."""
    logging.getLogger("ray").setLevel(logging.WARNING)
    train_context.logger.setLevel(logging.WARNING)  # It is named after its file, not `ray...`.


def is_in_train_worker() -> bool:
    """Whether `ray.train.report` and the like work here."""
    try:
        train_fn_utils.get_train_fn_utils()
    except RuntimeError:
        return False
    return True


def set_tags(tags: dict[str, str]) -> None:
    """Have the trial's MLflow run get these tags with its next report; elsewhere nothing."""
    utils = train_fn_utils.get_train_fn_utils()
    context = getattr(utils, "turn", None) or train_context.get_train_context()
    if isinstance(context, TurnContext):
        context.get_result_queue().tags.update(tags)


def rank_and_world_size() -> tuple[int, int]:
    """This worker's rank and the number of workers."""
    context = train_context.get_train_context()
    return context.get_world_rank(), context.get_world_size()


def _pickled(metrics: dict[str, Any]) -> bytes:
    try:
        return pickle.dumps(metrics)
    except (pickle.PicklingError, AttributeError, TypeError):
        return bytes(cloudpickle.dumps(metrics))


def _exists(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint was not dropped: a sweep keeps the best and the newest of a trial."""
    (info,) = checkpoint.filesystem.get_file_info([checkpoint.path])
    return bool(info.type.name != "NotFound")
