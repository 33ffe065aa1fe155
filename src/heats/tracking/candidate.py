"""The checkpoint of a sweep that asks to be promoted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from heats.errors import ConfigError, PromotionRefusedError
from heats.trial import TrialState
from heats.wording import STATE_WORDS

if TYPE_CHECKING:
    from heats.record import SweepRecord, TrialRecord
    from heats.trial import Objective, Reported

STUDY, TRIAL, RUN_ID = "heats.study", "heats.trial", "heats.run_id"
OBJECTIVE, VALUE, DIRECTION = "heats.objective", "heats.value", "heats.direction"
CHECKPOINT, PREDICTOR = "heats.checkpoint", "heats.predictor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A checkpoint with the objective's value that was logged for it.

    `checkpoint` is a directory path or URI, `resource` the amount spent when it was written.
    """

    study: str
    trial: int
    run_id: str
    objective: Objective
    value: float
    checkpoint: str
    resource: int

    def tags(self) -> dict[str, str]:
        """What a model version says of where it comes from, and what it is compared by."""
        return {
            STUDY: self.study,
            TRIAL: str(self.trial),
            RUN_ID: self.run_id,
            OBJECTIVE: self.objective.name,
            VALUE: repr(self.value),
            DIRECTION: self.objective.direction.value,
            CHECKPOINT: self.checkpoint,
        }


def choose_trial(record: SweepRecord, number: int | None) -> TrialRecord:
    """The complete trial of that number; None: the best one.

    Raises:
        ConfigError: There is no such trial.
        PromotionRefusedError: The trial is not complete, or no trial is.
    """
    study = record.start.study_name
    trial = record.best() if number is None else record.trials.get(number)
    if trial is None and number is None:
        states = {STATE_WORDS[state]: count for state, count in record.counts().items() if count}
        have = ", ".join(f"{count} {word}" for word, count in states.items()) or "none"
        msg = (
            f"No trial of {study} is complete with a finite value (trials: {have}), so there is "
            f"nothing to promote. `heats status {study}` shows them."
        )
        raise PromotionRefusedError(msg)
    if trial is None:
        msg = (
            f"{study} has no trial {number}; it has {len(record.trials)}, numbered from 0. "
            f"`heats status {study}` shows them."
        )
        raise ConfigError(msg)
    if trial.state is not TrialState.COMPLETE:
        msg = (
            f"Trial {trial.number} of {study} is {STATE_WORDS[trial.state]}, and only a complete "
            "trial can be promoted."
        )
        raise PromotionRefusedError(msg)
    return trial


def candidate_of(record: SweepRecord, trial: TrialRecord, run_id: str) -> Candidate:
    """The best checkpoint that is left of a trial.

    Raises:
        PromotionRefusedError: There is none, or its files are gone.
    """
    study = record.start.study_name
    report, value = _best_checkpoint(record, trial)
    checkpoint = report.checkpoint or ""
    if "://" not in checkpoint and not any(Path(checkpoint).glob("*")):
        msg = (
            f"The checkpoint of trial {trial.number} of {study} is gone: no files in {checkpoint}."
        )
        raise PromotionRefusedError(msg)
    return Candidate(
        study=study,
        trial=trial.number,
        run_id=run_id,
        objective=record.objective,
        value=value,
        checkpoint=checkpoint,
        resource=report.resource,
    )


def _best_checkpoint(record: SweepRecord, trial: TrialRecord) -> tuple[Reported, float]:
    """The checkpoint to promote, and its value: that of its report, or what the trial returned."""
    objective = record.objective
    report = trial.best_checkpoint(objective)
    if report is not None:
        return report, report.metrics[objective.name]
    report = trial.last_checkpoint
    if report is not None and objective.metric is None and trial.value is not None:
        return report, trial.value
    had = any(reported.checkpoint for reported in trial.reports)
    reason = (
        "none of its checkpoints is left (checkpoint.keep_best says how many trials keep one)"
        if had
        else "it reported no checkpoint"
    )
    if report is not None:
        reason = f"no report with a checkpoint has a finite {objective.name}"
    msg = f"Trial {trial.number} of {record.start.study_name} cannot be promoted: {reason}."
    raise PromotionRefusedError(msg)
