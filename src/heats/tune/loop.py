"""Ray Tune's loop over the coordinator's trials."""

from __future__ import annotations

import logging
import os
import tempfile
from typing import TYPE_CHECKING

from heats.errors import HeatsError

if TYPE_CHECKING:
    from ray.tune.experiment import Trial

    from heats.lane.lane import LaneSettings
    from heats.trial import Coordinator

_TUNE_ENV = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # The ledger and MLflow have it all.
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # Ctrl-C is the sweep's: it leaves things resumable.
    "TUNE_GLOBAL_CHECKPOINT_S": "1000000000",  # Tune's snapshots: nobody would read them.
    "RAY_AIR_NEW_OUTPUT": "0",  # The new output prints a table whatever `verbose` says.
    "TUNE_MAX_PENDING_TRIALS_PG": "1",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "TUNE_WARN_THRESHOLD_S": "30",
}


def run_trials(coordinator: Coordinator, settings: LaneSettings, max_concurrent: int) -> None:
    """Run the coordinator's trials in at most `max_concurrent` lanes until it is done.

    Raises:
        HeatsError: Ray Tune itself failed.
    """
    from ray import tune

    from heats.lane.trainable import LaneTrainable
    from heats.tune.scheduler import VerdictScheduler
    from heats.tune.search import TrialSearcher

    os.environ.update(_TUNE_ENV)
    # A lane's own process needs nothing but a little memory: its workers reserve what they need.
    trainable = tune.with_resources(LaneTrainable, {"CPU": 0, "memory": 1})
    with tempfile.TemporaryDirectory(prefix="heats-tune-", ignore_cleanup_errors=True) as folder:
        tuner = tune.Tuner(
            trainable,
            tune_config=tune.TuneConfig(
                search_alg=TrialSearcher(coordinator, settings, max_concurrent),
                scheduler=VerdictScheduler(coordinator),
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
            tuner.fit()
        except tune.TuneError as exc:
            msg = f"Ray Tune failed: {exc}"
            raise HeatsError(msg) from exc


def _name(trial: Trial) -> str:
    """Tune's own name of a trial: its number would do, but a restart needs another one."""
    return str(trial.trial_id)
