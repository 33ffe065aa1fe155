"""The coordinator as a Tune scheduler: it takes reports and gives verdicts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ray.tune.schedulers import FIFOScheduler, TrialScheduler

from heats.lane.trainable import OUTCOME, REPORTS
from heats.trial import Ending, Outcome, TrialSpec, Verdict

if TYPE_CHECKING:
    from ray.tune.execution.tune_controller import TuneController
    from ray.tune.experiment import Trial

    from heats.trial import Coordinator


class VerdictScheduler(FIFOScheduler):  # type: ignore[misc]
    """Passes every result of a lane to the coordinator and its verdict to Tune."""

    def __init__(self, coordinator: Coordinator) -> None:
        super().__init__()
        self._coordinator = coordinator

    def on_trial_result(
        self, tune_controller: TuneController, trial: Trial, result: dict[str, Any]
    ) -> str:
        """Record the reports of a step; end the attempt where it is over or to be stopped."""
        number = _number(trial)
        verdict = self._coordinator.record(number, result[REPORTS])
        outcome: Outcome | None = result[OUTCOME]
        if outcome is None and verdict is Verdict.STOP:
            outcome = Outcome(Ending.STOPPED)
        if outcome is None:
            return str(TrialScheduler.CONTINUE)
        self._coordinator.end(number, outcome)
        return str(TrialScheduler.STOP)

    def on_trial_error(self, tune_controller: TuneController, trial: Trial) -> None:
        """The process that held the lane died, so the attempt is lost."""
        reason = f"The process of its lane ended: {trial.get_error()}"
        self._coordinator.end(_number(trial), Outcome(Ending.LOST, error=reason))


def _number(trial: Trial) -> int:
    spec: TrialSpec = trial.config["spec"]
    return spec.number
