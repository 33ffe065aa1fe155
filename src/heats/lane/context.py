"""The Train context of one turn. The only module that knows Ray Train's private names.

Every turn gets its own `TrainContext` inside the long-lived worker, so `ray.train.report`,
`get_checkpoint`, `get_context`, collectives and framework callbacks work unmodified. Verified on
ray 2.60; tests/integration/test_ray_contract.py covers each private name and says what to do when a
release moves it.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ray.train import Checkpoint
from ray.train.v2._internal.execution import context as train_context
from ray.train.v2._internal.execution import train_fn_utils
from ray.train.v2._internal.execution.context import TrainContext
from ray.train.v2._internal.execution.storage import StorageContext
from ray.train.v2._internal.execution.train_fn_utils import LocalTrainFnUtils
from ray.train.v2.api.reported_checkpoint import ReportedCheckpoint, ReportedCheckpointStatus

from heats.checkpoints import CHECKPOINTS_DIR
from heats.errors import TrialStoppedError
from heats.lane.leftovers import TemporaryFolders
from heats.lane.messages import RankReport, VerdictRequest
from heats.trial import Report, Verdict, clean_metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from heats.lane.mailbox import RankMailbox
    from heats.lane.messages import Turn
    from heats.lane.pulse import Pulse
    from heats.trial import TrialSpec


_UPLOAD_CHECK_S = 0.2
"""How often a report that waits for earlier uploads looks whether one of them failed, in s."""


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

    def __init__(self, turn: Turn, rank: int, mailbox: RankMailbox) -> None:
        self._turn, self._rank, self._mailbox = turn, rank, mailbox
        self._num_reports = 0
        self.reported: list[ReportedCheckpoint] = []

    def put(self, training_report: Any) -> None:
        """Take a `_TrainingReport` of Ray Train; called in the training or an upload thread.

        Ray Train keeps the calls of a rank in the order of its reports.
        """
        checkpoint, metrics = training_report.checkpoint, training_report.metrics
        if checkpoint is not None:
            committed = ReportedCheckpointStatus.COMMITTED
            self.reported.append(ReportedCheckpoint(checkpoint, metrics, committed))
        self._num_reports += 1
        uri = None if checkpoint is None else checkpoint_uri(checkpoint)
        report = Report(time.time(), clean_metrics(metrics) if self._rank == 0 else {}, uri)
        self._mailbox.send(RankReport(self._turn.index, self._num_reports, report))

    def get_nowait(self) -> Any:
        """Nothing ever waits here for Ray Train's health check to take it."""
        raise queue.Empty

    def verdict(self, index: int) -> Verdict:
        """Whether the turn goes on after report `index`; every rank gets the same answer."""
        return self._mailbox.ask(VerdictRequest(self._turn.index, index))


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
    """Ray's Train context, ending the turn at the report where the verdict is to stop."""

    pulse: Pulse
    last_reported: Checkpoint | None = None
    """The checkpoint of the report at which the trial was stopped, as user code wrote it."""

    def report(
        self,
        metrics: dict[str, Any],
        checkpoint: Checkpoint | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Report as Ray does, then take the verdict.

        Raises:
            TrialStoppedError: The trial is to stop here.
        """
        with self.pulse.report():
            super().report(metrics, checkpoint, *args, **kwargs)
        self.execution_context.training_thread_runner.raise_first()
        if self.get_result_queue().verdict(self.report_call_index) is Verdict.STOP:
            self.last_reported = checkpoint
            raise TrialStoppedError

    def _wait_then_report(self, training_report: Any, report_call_index: int) -> None:
        # A failed upload never makes its report, and those behind it would wait for ever.
        with self.report_order_condition:
            while self.current_report_index != report_call_index - 1:
                self.execution_context.training_thread_runner.raise_first()
                self.report_order_condition.wait(_UPLOAD_CHECK_S)
        super()._wait_then_report(training_report, report_call_index)

    def get_all_reported_checkpoints(self, *args: Any, **kwargs: Any) -> list[ReportedCheckpoint]:
        """This turn's checkpoints; Ray's controller knows nothing of turns."""
        del args, kwargs
        return list(self.get_result_queue().reported)

    def get_dataset_shard(self, dataset_info: Any) -> Any:
        """Nothing: no trial was given datasets.

        Raises:
            KeyError: Always, as Ray does for a name it does not know.
        """
        msg = (
            f"Dataset shard for {dataset_info.dataset_name!r} not found: heats gives trials no"
            " Ray Datasets. Make the dataset in the train function."
        )
        raise KeyError(msg)

    def _sync_checkpoint_dir_name_across_ranks(self, checkpoint_dir_name: str | None = None) -> str:
        if self.get_world_size() == 1:  # Nobody to agree with: saves a remote call at each report.
            return checkpoint_dir_name or self.storage_context.make_default_checkpoint_dir_name()
        name: str = super()._sync_checkpoint_dir_name_across_ranks(checkpoint_dir_name)
        return name


class turn_context:  # noqa: N801 - a context manager, used like a function
    """Put a context for `turn` in place, and the worker's own back at the end.

    Leaving waits for the turn's asynchronous uploads and raises what they raised, unless the turn
    already ends with an exception.
    """

    def __init__(self, turn: Turn, mailbox: RankMailbox, pulse: Pulse) -> None:
        self._base = base = train_context.get_train_context()
        spec = turn.spec
        fields = {f.name: getattr(base, f.name) for f in dataclasses.fields(TrainContext)}
        run_config = dataclasses.replace(
            base.train_run_context.run_config, name=f"trial-{spec.number}"
        )
        fields.update(
            train_run_context=dataclasses.replace(base.train_run_context, run_config=run_config),
            execution_context=dataclasses.replace(
                base.execution_context,
                result_queue=TurnQueue(turn, base.get_world_rank(), mailbox),
                training_thread_runner=TurnRunner(base.execution_context.training_thread_runner),
            ),
            storage_context=TurnStorage(spec.artifact_dir),
            checkpoint=None if spec.checkpoint is None else Checkpoint(spec.checkpoint),
            current_report_index=0,
            report_call_index=0,
            report_order_condition=threading.Condition(),
            checkpoint_upload_threadpool=ThreadPoolExecutor(1),
        )
        self._context = TurnContext(**fields)
        self._context.pulse = pulse
        self._temporary = TemporaryFolders()

    def __enter__(self) -> TrainContext:
        """Give the turn's context, now in place."""
        train_context.set_train_context(self._context)
        return self._context

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Put the worker's own context back; collectives go on counting where the turn left."""
        self._context.checkpoint_upload_threadpool.shutdown(wait=True)
        if self._context.last_reported is not None:
            self._temporary.remove(self._context.last_reported.path)
        self._base.collective_seq = self._context.collective_seq
        train_context.set_train_context(self._base)
        if error is None:
            self._context.execution_context.training_thread_runner.raise_first()


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


def rank_and_world_size() -> tuple[int, int]:
    """This worker's rank and the number of workers."""
    context = train_context.get_train_context()
    return context.get_world_rank(), context.get_world_size()


class InlineTrainFnUtils(LocalTrainFnUtils):
    """`ray.train` for a trial that runs in the driver itself: one worker, rank 0, no cluster.

    `on_report` takes each report and gives the verdict.
    """

    def __init__(self, spec: TrialSpec, on_report: Callable[[Report], Verdict]) -> None:
        super().__init__(experiment_name=f"trial-{spec.number}")
        self._storage = TurnStorage(spec.artifact_dir)
        self._on_report = on_report
        self._last_checkpoint = None if spec.checkpoint is None else Checkpoint(spec.checkpoint)
        self._reported: list[ReportedCheckpoint] = []

    def report(
        self,
        metrics: dict[str, Any],
        checkpoint: Checkpoint | None = None,
        checkpoint_dir_name: str | None = None,
        *_: Any,
        **__: Any,
    ) -> None:
        """Store the checkpoint, then report; uploads are synchronous, whatever mode was asked for.

        Raises:
            TrialStoppedError: The trial is to stop here.
        """
        uri = None
        if checkpoint is not None:
            name = checkpoint_dir_name or self._storage.make_default_checkpoint_dir_name()
            stored = self._storage.persist_current_checkpoint(checkpoint, name)
            committed = ReportedCheckpointStatus.COMMITTED
            self._reported.append(ReportedCheckpoint(stored, metrics, committed))
            self._last_checkpoint = stored
            uri = checkpoint_uri(stored)
        report = Report(time.time(), clean_metrics(metrics), uri)
        if self._on_report(report) is not Verdict.CONTINUE:
            raise TrialStoppedError

    def get_all_reported_checkpoints(self, *_: Any, **__: Any) -> list[ReportedCheckpoint]:
        """The checkpoints of this attempt."""
        return list(self._reported)


@contextmanager
def inline_context(spec: TrialSpec, on_report: Callable[[Report], Verdict]) -> Iterator[None]:
    """Make `ray.train` work in this process for one trial."""
    train_fn_utils.set_train_fn_utils(InlineTrainFnUtils(spec, on_report))
    try:
        yield
    finally:
        train_fn_utils.set_train_fn_utils(None)
