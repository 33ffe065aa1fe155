"""The coordinator as a Tune scheduler: it takes reports and gives verdicts."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray.tune.schedulers import FIFOScheduler, TrialScheduler

from heats.lane.health import fault_of_group
from heats.lane.trainable import OUTCOME, REPORTS, end_turn, has_begun
from heats.trial import Ending, Fault, Outcome, TrialSpec, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable

    from ray.tune.execution.tune_controller import TuneController
    from ray.tune.experiment import Trial

    from heats.trial import Coordinator


class VerdictScheduler(FIFOScheduler):
    """Passes every result of a lane to the coordinator and its verdict to Tune.

    `on_trial` is called with Tune's controller for each trial before anything is done for it;
    `on_lane_death` when the process of a lane has died.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        on_trial: Callable[[TuneController, TrialSpec], None],
        on_lane_death: Callable[[], None],
    ) -> None:
        super().__init__()
        self._coordinator = coordinator
        self._on_trial, self._on_lane_death = on_trial, on_lane_death

    def __getstate__(self) -> dict[str, Any]:
        """Nothing: the Tuner writes itself to a file that nobody will read."""
        return {}

    def on_trial_add(self, tune_controller: TuneController, trial: Trial) -> None:
        """Tune has taken a suggestion."""
        super().on_trial_add(tune_controller, trial)
        self._on_trial(tune_controller, trial.config["spec"])

    def on_trial_result(
        self, tune_controller: TuneController, trial: Trial, result: dict[str, Any]
    ) -> str:
        """Record the reports of a step; end the attempt where it is over or to be stopped."""
        number = _number(trial)
        verdict = self._coordinator.record(number, result[REPORTS])
        outcome: Outcome | None = result[OUTCOME]
        if outcome is None and verdict is not Verdict.CONTINUE:
            end_turn(tune_controller, trial)
        if outcome is None and verdict is Verdict.STOP:
            outcome = Outcome(Ending.STOPPED)  # Not waited for: the next trial can be prepared.
        if outcome is None:
            return str(TrialScheduler.CONTINUE)
        self._coordinator.end(number, outcome)
        return str(TrialScheduler.STOP)

    def on_trial_error(self, tune_controller: TuneController, trial: Trial) -> None:
        """The process that held the lane died, so the attempt is lost and its workers are gone."""
        error = _error(trial)
        fault = fault_of_group(error, num_oom_kills=0)
        if fault is None:  # One that died while it was idle, which nobody could know, is free.
            had_begun = has_begun(tune_controller, trial)
            fault = Fault.lane_died if had_begun else Fault.retired
        reason = f"The process of its lane ended: {error}"
        self._coordinator.end(_number(trial), Outcome.failed(fault, reason))
        self._on_lane_death()


def _number(trial: Trial) -> int:
    spec: TrialSpec = trial.config["spec"]
    return spec.number


def _error(trial: Trial) -> str:
    """The last line of what Tune wrote down of an error."""
    with suppress(OSError, TypeError):
        lines = Path(trial.error_file).read_text(encoding="utf-8").strip().splitlines()
        return lines[-1] if lines else "no message"
    return "no message"
