"""The worker group of a lane: what starts its ranks, and ends those that do not listen."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any, Protocol

from heats.lane.worker import serve_turns

if TYPE_CHECKING:
    from heats.lane.lane import LaneSettings
    from heats.lane.messages import RankReady
    from heats.lane.worker import WorkerSettings


class WorkerGroup(Protocol):
    """Where the ranks of a lane run.

    `reservation` is what the driver must free should the process that runs the group die: a
    placement group, or None.
    """

    @property
    def reservation(self) -> Any:
        """See above."""
        ...

    def host(self) -> str:
        """Address of this process that the ranks can reach."""
        ...

    def run(self, worker: WorkerSettings, lane: LaneSettings) -> None:
        """Run the ranks until all of them have left; raises what ended them otherwise."""
        ...

    def kill(self, rank: RankReady) -> None:
        """End a rank by force; raises where it is dead already."""
        ...


class RayWorkerGroup:
    """One Ray Train run with torch's process group, as a `TorchTrainer` has it."""

    reservation: Any = None

    def host(self) -> str:
        """This node's address in the Ray cluster."""
        import ray

        return str(ray.util.get_node_ip_address())

    def run(self, worker: WorkerSettings, lane: LaneSettings) -> None:
        """Fit a trainer whose train function serves turns."""
        import ray.train

        from heats.lane.trainer import LaneTrainer

        trainer = LaneTrainer(
            serve_turns,
            on_reserved=self._take_reservation,
            train_loop_config={"worker": worker},
            scaling_config=ray.train.ScalingConfig(
                num_workers=lane.num_workers,
                use_gpu=lane.use_gpu,
                resources_per_worker=lane.resources_per_worker,
            ),
            run_config=ray.train.RunConfig(
                name=f"lane-{secrets.token_hex(8)}", storage_path=lane.storage_path
            ),
        )
        try:
            trainer.fit()
        finally:
            if self.reservation is not None:  # A run that fails to start leaves it behind.
                ray.util.remove_placement_group(self.reservation)

    def _take_reservation(self, placement_group: Any) -> None:
        self.reservation = placement_group

    def kill(self, rank: RankReady) -> None:
        """Kill the rank's actor."""
        import ray

        ray.kill(rank.actor)
