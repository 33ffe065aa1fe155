"""The Ray Train run of a lane, with no process that a lane does not need.

A `TorchTrainer` starts, besides its workers, a process each for its controller, for freeing its
placement group should the controller die, for its datasets even where there are none, for its
collectives even where there is one rank, and for talks with the autoscaler. Each first imports Ray
Train, the controller also torch, which on two cores is most of the wait for a sweep's first report.
Here the controller runs in the lane's own process, which does not load torch, and the driver frees
the placement group of a lane whose process died.
Verified on ray 2.60; tests/integration/test_ray_contract.py covers the private names.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Self

import ray
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.execution.controller.controller import TrainController
from ray.train.v2._internal.execution.scaling_policy.fixed import FixedScalingPolicy
from ray.train.v2._internal.execution.worker_group import state as worker_group_state
from ray.train.v2._internal.execution.worker_group import worker_group
from ray.train.v2._internal.execution.worker_group.placement_group_handle import (
    DefaultPlacementGroupHandle,
)
from ray.train.v2._internal.execution.worker_group.worker_group import WorkerGroup
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from heats.lane.preemption import PreemptionCallback

if TYPE_CHECKING:
    from collections.abc import Callable

    from ray.train import Result
    from ray.util.placement_group import PlacementGroup


class LaneTrainer(DataParallelTrainer):
    """A data-parallel trainer whose `fit` needs no processes but the workers'.

    `reserve(bundles, strategy)` makes the workers' placement group, which may take
    `start_timeout_s` seconds to be ready.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., None],
        *,
        reserve: Callable[[list[dict[str, float]], str], PlacementGroup],
        start_timeout_s: float,
        **options: Any,
    ) -> None:
        super().__init__(train_loop_per_worker, **options)
        self._reserve, self._start_timeout_s = reserve, start_timeout_s

    def _create_default_callbacks(self) -> list[Any]:
        unneeded = (PlacementGroupCleanerCallback, DatasetsCallback)
        callbacks = super()._create_default_callbacks()
        needed = [each for each in callbacks if not isinstance(each, unneeded)]
        return [*needed, PreemptionCallback()]

    def _initialize_and_run_controller(self, **arguments: Any) -> Result:
        own_reserve, own_timeout_s = self._reserve, self._start_timeout_s

        class Group(LaneWorkerGroup):
            reserve, start_timeout_s = staticmethod(own_reserve), own_timeout_s

        class Controller(TrainController):
            worker_group_cls = Group

        scaling = FixedSize(self.scaling_config)
        controller = Controller(**{**arguments, "scaling_policy": scaling})
        asyncio.run(controller.run())
        return controller.get_result()


class LaneWorkerGroup(WorkerGroup):
    """Has `reserve` make its placement group; one rank's collectives need no process."""

    reserve: Callable[[list[dict[str, float]], str], PlacementGroup]
    start_timeout_s: float

    def _create_placement_group(self, scaling_config: Any, context: Any) -> Any:
        bundles = [context.resources_per_worker] * context.num_workers
        return DefaultPlacementGroupHandle(self.reserve(bundles, context.placement_strategy))

    def _start_impl(self, builder: Any) -> None:
        self._worker_group_start_timeout_s = self.start_timeout_s
        if self._worker_group_context.num_workers > 1:
            super()._start_impl(builder)
            return
        saved = worker_group.SynchronizationActor
        worker_group.SynchronizationActor = OneRankCollectives
        worker_group_state._shutdown_sync_actor = _end_collectives
        try:
            super()._start_impl(builder)
        finally:
            worker_group.SynchronizationActor = saved


class OneRankCollectives:
    """Stands in for Ray Train's synchronization actor where there is nobody to wait for."""

    @classmethod
    def options(cls, **_: Any) -> type[Self]:
        """As of an actor class."""
        return cls

    @classmethod
    def remote(cls, **_: Any) -> Self:
        """As of an actor class."""
        return cls()

    @property
    def broadcast_from_rank_zero(self) -> type[_OwnData]:
        """As of an actor: barriers and broadcasts are this call."""
        return _OwnData


class _OwnData:
    @staticmethod
    def remote(*_: Any, data: Any, **__: Any) -> ray.ObjectRef:
        return ray.put(data)


def _end_collectives(actor: Any) -> None:
    if not isinstance(actor, OneRankCollectives):
        ray.kill(actor)


class FixedSize(FixedScalingPolicy):
    """So many workers; the pending placement group tells the autoscaler all that it needs."""

    def after_controller_start(self, train_run_context: Any) -> None:
        """Nothing, as in the other three: see the class."""

    async def before_controller_shutdown(self) -> None:
        """Nothing."""

    def before_controller_abort(self) -> None:
        """Nothing."""

    def _maybe_send_resource_request(self) -> None:
        """Nothing."""
