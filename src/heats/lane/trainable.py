"""A lane as Ray Tune sees it: a class trainable whose steps are what the driver must decide on."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from ray import tune

from heats.config import Isolation
from heats.lane.health import ends_lane
from heats.lane.lane import Lane

if TYPE_CHECKING:
    from collections.abc import Callable

    from ray.tune.execution.tune_controller import TuneController
    from ray.tune.experiment import Trial

    from heats.lane.lane import LaneSettings
    from heats.trial import LaneShape, Outcome, TrialSpec

logger = logging.getLogger(__name__)

REPORTS = "heats_reports"
OUTCOME = "heats_outcome"
"""Keys of a step's result: the reports since the last step, and at the end the outcome."""


def end_turn(tune_controller: TuneController, trial: Trial) -> None:
    """Tell a trial's lane at once that its turn ends at the next report.

    Tune itself would only tell it with the next trial, and without one let it train on.
    """
    failed = tune_controller._trial_task_failure
    tune_controller._schedule_trial_task(trial, "end_turn", on_error=failed)


def has_begun(tune_controller: TuneController, trial: Trial) -> bool:
    """Whether a trial has arrived in its lane: one that was idle could be dead by then."""
    return trial not in tune_controller._resetting_trials


class LaneTrainable(tune.Trainable):
    """Owns a lane; with `reuse_actors=True` Tune gives it one trial after another.

    It starts without a trial: `config` has `settings` (LaneSettings) and the `shape` of its first
    one. `reset_config` brings a trial, before anything else of it, with its `spec` (TrialSpec) and
    the `settings` again; its turn starts in its first `step`.
    """

    make_lane: Callable[[LaneSettings, LaneShape], Lane] = Lane

    def setup(self, config: dict[str, Any]) -> None:
        """Start the lane; its workers load while Tune goes on."""
        self._settings: LaneSettings = config["settings"]
        self._spec: TrialSpec | None = None
        self._lane = self.make_lane(self._settings, config["shape"])

    def step(self) -> dict[str, Any]:
        """Reports up to the next decision, and the outcome when the turn is over."""
        if self._spec is not None:
            spec, self._spec = self._spec, None
            self._renew_if_needed(spec.shape)
            self._lane.begin(spec)
        reports, outcome = self._lane.gather()
        if outcome is not None and outcome.fault is not None:
            outcome = self._after_fault(outcome)
        # Not `done`: Tune would then end the trial without showing the result to the scheduler.
        return {REPORTS: reports, OUTCOME: outcome}

    def end_turn(self) -> None:
        """End the running turn at its next report; a step to come tells how it ended."""
        self._lane.request_stop()

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """End what still runs of the last trial and take the next one."""
        self._spec = new_config["spec"]
        self._settings = self._lane.settings = new_config["settings"]
        if self._lane.is_new and self._lane.is_usable:
            return True
        if not self._lane.stop():
            grace_s = self._settings.lane.stop_grace_s
            loss = self._lane.loss
            reason = (loss.error if loss is not None else None) or (
                f"a stopped trial did not reach a report within lane.stop_grace_s={grace_s:g} s"
            )
            logger.warning("A lane starts anew: %s.", reason)
            self._lane.close(is_broken=True)
        elif self._settings.lane.isolation is Isolation.process:
            self._lane.close()
        return True

    def cleanup(self) -> None:
        """End the lane with the trainable."""
        self._lane.close(is_broken=not self._lane.stop())

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Nothing: checkpoints are the trial's own, through `ray.train.report`."""

    def load_checkpoint(self, checkpoint: dict[str, Any] | None) -> None:
        """Nothing: a trial continues from `TrialSpec.checkpoint`."""

    def _setup_logdir(self) -> None:
        """Nothing is written there."""
        self._logdir = self.config["settings"].storage_path

    def _after_fault(self, outcome: Outcome) -> Outcome:
        """Close the lane where it cannot be trusted any more; what is known of the fault then."""
        assert outcome.fault is not None  # noqa: S101 - the caller's condition
        is_lost = self._lane.loss is not None
        if is_lost or ends_lane(outcome.fault, self._lane.shape.num_workers):
            was_the_loss = outcome is self._lane.loss
            self._lane.close(is_broken=is_lost)
            if was_the_loss and self._lane.loss is not None:
                return self._lane.loss
        return outcome

    def _renew_if_needed(self, shape: LaneShape) -> None:
        if self._lane.shape != shape:
            self._lane.close()
        if not self._lane.is_usable:
            self._lane = self.make_lane(self._settings, shape)
