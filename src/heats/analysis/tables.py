"""A sweep as rows and as JSON: pure functions of its record.

The JSON forms are an interface: keys are only ever added. A float that JSON cannot hold is the
string `"NaN"`, `"Infinity"` or `"-Infinity"` (which `float()` reads back), null means that there is
none. Times are ISO 8601 in UTC, durations (`*_s`) seconds.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from heats.config import Direction
from heats.tracking.provenance import redact_text, redact_url
from heats.trial import TrialState, Verdict
from heats.wording import last_line, number

if TYPE_CHECKING:
    from heats.record import SweepRecord, TrialRecord
    from heats.trial import Objective


def sweep_state(record: SweepRecord, *, is_running: bool) -> str:
    """`running`, `finished`, or `interrupted`: no driver lives and trials are still owed.

    Args:
        record: The sweep.
        is_running: Whether a living driver holds the ledger's lock.
    """
    if is_running:
        return "running"
    return "finished" if record.ended is not None and record.ended.finished else "interrupted"


def sweep_json(record: SweepRecord, *, state: str) -> dict[str, Any]:
    """One sweep without its trials.

    Keys: `name, state, reason, objective {metric, direction, resource}, num_trials, counts
    {complete, pruned, failed, running}, best, started, ended, wall_s, experiment, tracking_uri,
    run_id, argv`. `best` is a trial as `trial_json` gives it, or null.
    """
    counts, best, ended = record.counts(), record.best(), record.ended
    return {
        "name": record.start.study_name,
        "state": state,
        "reason": ended.reason if ended else None,
        "objective": {
            "metric": record.objective.name,
            "direction": record.objective.direction.value,
            "resource": record.objective.resource,
        },
        "num_trials": len(record.trials),
        "counts": {
            "complete": counts[TrialState.COMPLETE],
            "pruned": counts[TrialState.PRUNED],
            "failed": counts[TrialState.FAIL],
            "running": counts[TrialState.RUNNING],
        },
        "best": trial_json(best, record.objective) if best else None,
        "started": iso_time(record.start.time_s),
        "ended": iso_time(ended.time_s) if ended else None,
        "wall_s": round(record.wall_s, 3),
        "experiment": record.start.experiment,
        "tracking_uri": redact_url(record.start.tracking_uri),
        "run_id": record.run_id,
        "argv": argv(record),
    }


def trial_json(trial: TrialRecord, objective: Objective) -> dict[str, Any]:
    """One trial.

    Keys: `number, state, value, params, resource, rung, why, error, log, run_id, attempts,
    started, ended, duration_s, checkpoint`. `value` is the best objective, `resource` the amount
    spent, `rung` the last one reached, `why` what `why_ended` says, `checkpoint` the best one left.
    """
    last, checkpoint = trial.last, trial.best_checkpoint(objective) or trial.last_checkpoint
    return {
        "number": trial.number,
        "state": trial.state.value,
        "value": json_value(trial.value),
        "params": {key: json_value(value) for key, value in trial.params.items()},
        "resource": last.resource if last else None,
        "rung": trial.judged[-1].rung if trial.judged else None,
        "why": why_ended(trial, objective),
        "error": trial.error,
        "log": trial.log,
        "run_id": trial.run_id,
        "attempts": trial.attempts,
        "started": iso_time(trial.started_s),
        "ended": iso_time(trial.ended_s),
        "duration_s": duration_s(trial),
        "checkpoint": checkpoint.checkpoint if checkpoint else None,
    }


def trials_json(record: SweepRecord) -> list[dict[str, Any]]:
    """Every trial as `trial_json` gives it, by number."""
    return [trial_json(record.trials[key], record.objective) for key in sorted(record.trials)]


def ranked(record: SweepRecord) -> list[TrialRecord]:
    """All trials, best first: complete ones, then pruned, then those without a finite value."""
    order = [TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING, TrialState.FAIL]
    objective = record.objective

    def key(trial: TrialRecord) -> tuple[bool, int, float, int]:
        value = shown_value(trial, objective)
        is_finite = value is not None and math.isfinite(value)
        sign = 1.0 if objective.direction is Direction.minimize else -1.0
        loss = sign * value if value is not None and is_finite else 0.0
        return not is_finite, order.index(trial.state), loss, trial.number

    return sorted(record.trials.values(), key=key)


def shown_value(trial: TrialRecord, objective: Objective) -> float | None:
    """A trial's value; while it has none, the best that it has reported."""
    if trial.value is not None:
        return trial.value
    best = trial.best_report(objective)
    return best.metrics[objective.name] if best else None


def why_ended(trial: TrialRecord, objective: Objective) -> str:
    """Why a trial is in its state, in one line; empty for one that runs or is complete."""
    if trial.state is TrialState.FAIL:
        return last_line(trial.error) or "no error text"
    if trial.state is not TrialState.PRUNED:
        return ""
    stops = [judged for judged in trial.judged if judged.verdict is Verdict.STOP]
    if stops:
        stop = stops[-1]
        needed = "" if stop.needed is None else f", {number(stop.needed)} was needed"
        return f"{objective.name} {number(stop.value)} at rung {stop.rung}{needed}"
    spent = f" at {objective.resource} {trial.last.resource}" if trial.last else ""
    return f"stopped{spent}"


def duration_s(trial: TrialRecord) -> float | None:
    """Seconds of a trial's attempts, without pauses; None where it has not ended or never began."""
    seconds = trial.duration_s()
    return None if seconds is None or trial.ended_s is None else round(seconds, 3)


def argv(record: SweepRecord) -> list[str]:
    """The arguments that started the sweep, secrets redacted."""
    return [redact_text(argument) for argument in record.start.argv]


def json_value(value: Any) -> Any:
    """A value as JSON holds it: see the rule for floats at the top."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def iso_time(time_s: float | None) -> str | None:
    """Seconds since the epoch as ISO 8601 in UTC."""
    if time_s is None:
        return None
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="milliseconds")
