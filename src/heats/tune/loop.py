"""Ray Tune's loop over the coordinator's trials."""

from __future__ import annotations

import logging
import os
import tempfile
from typing import TYPE_CHECKING, TypeVar

from heats.errors import HeatsError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ray.tune.execution.tune_controller import TuneController
    from ray.tune.experiment import Trial

    from heats.cluster import Node
    from heats.lane.actors import LaneActors
    from heats.lane.lane import LaneSettings
    from heats.trial import Coordinator, Outcome, Report, TrialSpec, Verdict

T = TypeVar("T")

_TUNE_ENV = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # The ledger and MLflow have it all.
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # Ctrl-C is the sweep's: it leaves things resumable.
    "TUNE_GLOBAL_CHECKPOINT_S": "1000000000",  # Tune's snapshots: nobody would read them.
    "RAY_AIR_NEW_OUTPUT": "0",  # The new output prints a table whatever `verbose` says.
    "TUNE_WARN_THRESHOLD_S": "30",
    "TUNE_MAX_PENDING_TRIALS_PG": "1000",  # How many lanes start at once is the pool's to say.
}


def run_trials(
    coordinator: Coordinator,
    settings: LaneSettings,
    lanes: LaneActors,
    *,
    nodes: Callable[[], list[Node]],
    max_concurrent: int | None,
) -> None:
    """Run the coordinator's trials in lanes until it is done.

    Args:
        coordinator: Says what runs, and learns how it went.
        settings: Of the lanes.
        lanes: Where they come from.
        nodes: The cluster's nodes as they are now: it may grow and shrink.
        max_concurrent: Most lanes at work at once; None: as many as fit.

    Raises:
        HeatsError: Ray Tune itself failed. What the coordinator raises is raised as it is.
    """
    from ray import tune

    from heats.lane.datasets import shared_datasets
    from heats.lane.deaths import memory_kills_are_deaths
    from heats.lane.idle import IdleLanes, install, resources_of
    from heats.lane.pool import LanePool
    from heats.lane.reservation import free_reservations, free_reservations_soon
    from heats.lane.trainable import LaneTrainable
    from heats.tune.scheduler import VerdictScheduler
    from heats.tune.search import TrialSearcher

    os.environ.update(_TUNE_ENV)
    remembering = _Remembering(coordinator)
    pool = LanePool(nodes, max_concurrent)
    idle = IdleLanes(pool)

    def on_trial(tune_controller: TuneController, spec: TrialSpec) -> None:
        idle.know(spec.shape)
        install(tune_controller, idle, lanes)

    def on_lane_death() -> None:
        free_reservations_soon(settings.sweep_id)

    trainable = tune.with_resources(LaneTrainable, lambda own: resources_of(own["spec"].shape))
    with (
        tempfile.TemporaryDirectory(prefix="heats-tune-", ignore_cleanup_errors=True) as folder,
        shared_datasets(settings),
    ):
        tuner = tune.Tuner(
            trainable,
            tune_config=tune.TuneConfig(
                search_alg=TrialSearcher(remembering, settings, pool),
                scheduler=VerdictScheduler(remembering, on_trial, on_lane_death),
                num_samples=-1,
                reuse_actors=True,
                trial_name_creator=_name,
                trial_dirname_creator=_name,
            ),
            run_config=tune.RunConfig(
                name="tune",
                storage_path=folder,
                verbose=0,
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
            ),
        )
        # What Tune prints of a trial's error is told by the sweep, once and with its log.
        logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
        try:
            with memory_kills_are_deaths():
                tuner.fit()
        except tune.TuneError as exc:
            if remembering.error is not None:
                raise remembering.error from None
            msg = f"Ray Tune failed: {exc}"
            raise HeatsError(msg) from exc
        finally:
            lanes.end_unused()
            # Where Ray goes on after the sweep, a lane that was cut off would hold its part.
            free_reservations(settings.sweep_id, of_the_dead=lanes.stay)


class _Remembering:
    """The coordinator, and the first error it raised: Tune turns errors into texts."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self.error: Exception | None = None

    def next_trial(self) -> TrialSpec | None:
        return self._remembered(self._coordinator.next_trial)

    def is_done(self) -> bool:
        return self._remembered(self._coordinator.is_done)

    def record(self, number: int, reports: list[Report]) -> Verdict:
        return self._remembered(lambda: self._coordinator.record(number, reports))

    def end(self, number: int, outcome: Outcome) -> None:
        self._remembered(lambda: self._coordinator.end(number, outcome))

    def _remembered(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except Exception as exc:
            self.error = self.error or exc
            raise


def _name(trial: Trial) -> str:
    """Tune's own name of a trial: its number would do, but a restart needs another one."""
    return str(trial.trial_id)
