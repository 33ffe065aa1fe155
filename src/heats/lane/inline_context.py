"""`ray.train` for a trial that runs in the driver itself: one worker, rank 0, no cluster."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ray.train import (
    CheckpointConsistencyMode,
    ReportedCheckpoint,
    ReportedCheckpointStatus,
    RunConfig,
    ScalingConfig,
)
from ray.train.v2._internal.execution import train_fn_utils
from ray.train.v2._internal.execution.context import (
    DistributedContext,
    ExecutionContext,
    TrainContext,
    TrainRunContext,
)
from ray.train.v2._internal.execution.preemption import PreemptionContext
from ray.train.v2._internal.execution.train_fn_utils import LocalTrainFnUtils
from ray.train.v2.api.context import LocalTrainContext

from heats.config import ValidationConf
from heats.lane.context import TurnContext, checkpoint_uri
from heats.lane.datasets import data_of, make_dataset, unknown_dataset
from heats.lane.validation import checked, validation_call
from heats.trial import Report, Verdict, clean_metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from heats.trial import TrialSpec


class InlineQueue:
    """Hands reports over at once; what asynchronous uploads report, at the next occasion.

    `on_report` takes each report and gives the verdict, in the training thread. Checkpoints are
    validated here as well, so neither a time limit nor the options of a Ray task apply.
    """

    def __init__(self, on_report: Callable[[Report], Verdict], validation: ValidationConf) -> None:
        self._on_report, self._validation = on_report, validation
        self._waiting: list[Any] = []
        self._reported: list[ReportedCheckpoint] = []
        self._verdict = Verdict.CONTINUE
        self.tags: dict[str, str] = {}

    def put(self, training_report: Any) -> None:
        """Take a `_TrainingReport` of Ray Train, in any thread."""
        self._waiting.append(training_report)

    def verdict(self, index: int) -> Verdict:
        """Hand over what there is; whether the trial goes on."""
        del index
        while self._waiting:
            self._hand_over(self._waiting.pop(0))
        return self._verdict

    def reported(
        self, index: int, mode: CheckpointConsistencyMode, timeout_s: float | None
    ) -> list[ReportedCheckpoint]:
        """The checkpoints so far."""
        del mode, timeout_s
        self.verdict(index)
        return list(self._reported)

    def _hand_over(self, report: Any) -> None:
        metrics, checkpoint = report.metrics, report.checkpoint
        if checkpoint is not None:
            status = ReportedCheckpointStatus.COMMITTED
            if report.validation:
                function, kwargs, _ = validation_call(self._validation, report.validation)
                metrics = {**metrics, **checked(function(checkpoint, **kwargs))}
                status = ReportedCheckpointStatus.VALIDATED
            self._reported.append(ReportedCheckpoint(checkpoint, metrics, status))
        uri = None if checkpoint is None else checkpoint_uri(checkpoint)
        tags = dict(self.tags)
        self.tags.clear()
        verdict = self._on_report(Report(time.time(), clean_metrics(metrics), uri, tags=tags))
        if verdict is not Verdict.CONTINUE:
            self._verdict = verdict


class InlineShards:
    """Makes each dataset when it is asked for, which starts a local Ray."""

    def __init__(self, spec: TrialSpec) -> None:
        self._spec = spec
        self._shards: dict[str, Any] = {}

    def get_dataset_shard(self, dataset_info: Any) -> Any:
        """The `ray.data.DataIterator` over the whole dataset.

        Raises:
            KeyError: There is no dataset of that name.
        """
        name, known = dataset_info.dataset_name, data_of(self._spec).datasets or {}
        if name not in known:
            raise unknown_dataset(name, known)
        if name not in self._shards:
            self._shards[name] = make_dataset(known[name]).iterator()
        return self._shards[name]


class InlineTrainContext(LocalTrainContext):
    """As Ray's, with the trial's storage."""

    def __init__(self, turn: TurnContext) -> None:
        super().__init__(experiment_name=turn.get_experiment_name())
        self._turn = turn

    def get_storage(self) -> Any:
        """The trial's storage."""
        return self._turn.get_storage()


class InlineTrainFnUtils(LocalTrainFnUtils):
    """As Ray's for one process, with reports and checkpoints as a turn has them."""

    def __init__(self, turn: TurnContext) -> None:
        super().__init__(experiment_name=turn.get_experiment_name())
        self.turn, self._context = turn, InlineTrainContext(turn)

    def report(self, *args: Any, **kwargs: Any) -> None:
        """See `TurnContext.report`.

        Raises:
            TrialStoppedError: The trial is to stop here.
        """
        self.turn.report(*args, **kwargs)

    def get_checkpoint(self) -> Any:
        """The newest checkpoint."""
        return self.turn.get_checkpoint()

    def get_all_reported_checkpoints(self, *args: Any, **kwargs: Any) -> list[ReportedCheckpoint]:
        """See `TurnContext.get_all_reported_checkpoints`."""
        return self.turn.get_all_reported_checkpoints(*args, **kwargs)

    def get_dataset_shard(self, dataset_info: Any) -> Any:
        """See `InlineShards`."""
        return self.turn.get_dataset_shard(dataset_info)


@contextmanager
def inline_context(
    spec: TrialSpec,
    on_report: Callable[[Report], Verdict],
    *,
    validation: ValidationConf | None = None,
) -> Iterator[None]:
    """Make `ray.train` work in this process for one trial."""
    validation = validation or ValidationConf()
    reports = InlineQueue(on_report, validation)
    shards = InlineShards(spec)
    turn = TurnContext.of_trial(_base_context(), spec, reports, shards, validation)
    train_fn_utils.set_train_fn_utils(InlineTrainFnUtils(turn))
    try:
        yield
        turn.end_uploads()
        reports.verdict(0)
        turn.raise_first()
    finally:
        turn.end_uploads()
        train_fn_utils.set_train_fn_utils(None)


def _base_context() -> TrainContext:
    """What a worker's context has that is not the trial's."""
    nobody: Any = None
    return TrainContext(
        train_run_context=TrainRunContext(
            run_config=RunConfig(name="inline"),
            train_loop_config=None,
            scaling_config=ScalingConfig(num_workers=1),
            backend_config=nobody,
            dataset_config=nobody,
        ),
        distributed_context=DistributedContext(0, 1, 0, 1, 0),
        execution_context=ExecutionContext(nobody, nobody, nobody, []),
        storage_context=nobody,
        preemption_context=PreemptionContext(),
        controller_actor=nobody,
        dataset_shard_provider=nobody,
    )
