"""The worker group of a lane: what starts its ranks, and ends those that do not listen."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Protocol

from heats.lane.worker import serve_turns

if TYPE_CHECKING:
    from heats.lane.lane import LaneSettings
    from heats.lane.worker import WorkerSettings
    from heats.trial import LaneShape


class WorkerGroup(Protocol):
    """Where the ranks of a lane run."""

    def host(self) -> str:
        """Address of this process that the ranks can reach."""
        ...

    def run(self, worker: WorkerSettings, lane: LaneSettings, shape: LaneShape) -> None:
        """Run the ranks until all of them have left; raises what ended them otherwise."""
        ...

    def release(self) -> None:
        """End the ranks by force, those that only start included, and free what they hold."""
        ...


class RayWorkerGroup:
    """One Ray Train run with torch's process group, as a `TorchTrainer` has it."""

    def __init__(self, sweep_id: str) -> None:
        from heats.lane.reservation import Reservation

        self._reservation = Reservation(sweep_id)

    def host(self) -> str:
        """This node's address in the Ray cluster."""
        import ray

        return str(ray.util.get_node_ip_address())

    def run(self, worker: WorkerSettings, lane: LaneSettings, shape: LaneShape) -> None:
        """Fit a trainer whose train function serves turns."""
        import ray.train

        from heats.lane.backend import backend_config
        from heats.lane.datasets import release_shards
        from heats.lane.trainer import LaneTrainer

        trainer = LaneTrainer(
            serve_turns,
            backend_config=backend_config(shape),
            reserve=self._reservation.make,
            start_timeout_s=lane.lane.start_timeout_s,
            train_loop_config={"worker": worker},
            scaling_config=ray.train.ScalingConfig(
                num_workers=shape.num_workers,
                use_gpu=shape.use_gpu,
                resources_per_worker=shape.resources_per_worker,
                placement_strategy=shape.placement.value,
            ),
            run_config=ray.train.RunConfig(
                name=f"lane-{secrets.token_hex(8)}",
                storage_path=lane.storage_path,
                # Whether and where a trial starts again is the driver's decision.
                failure_config=ray.train.FailureConfig(
                    max_failures=0, max_preemption_failures=0, controller_failure_limit=0
                ),
            ),
        )
        try:
            trainer.fit()
        finally:
            self._reservation.release()
            release_shards(lane, worker.address.name)

    def release(self) -> None:
        """Free the placement group: Ray ends the workers in it."""
        self._reservation.release()
