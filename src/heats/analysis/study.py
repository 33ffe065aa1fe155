"""A sweep as an Optuna study, for Optuna's plots and tools."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from heats.trial import TrialState

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

    from heats.record import SweepRecord, TrialRecord
    from heats.trial import ParamValue


def study_from_record(
    record: SweepRecord,
    trials: Iterable[TrialRecord] | None = None,
    *,
    names: Mapping[str, str] | None = None,
    storage: str | None = None,
) -> Study:
    """An Optuna study with the sweep's trials, their curves and their times.

    A trial without a finite value cannot be COMPLETE in Optuna: it becomes FAIL. A PRUNED trial has
    its last finite intermediate value. Where trial numbers have gaps Optuna closes them; the
    sweep's own number is the user attribute `trial_number`.

    Args:
        record: The sweep.
        trials: Only these of its trials; by default all.
        names: Other names for parameters; those not in it keep theirs.
        storage: Optuna storage URL for the study; by default in memory.
    """
    import optuna

    chosen = sorted(record.trials.values() if trials is None else trials, key=lambda t: t.number)
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        study = optuna.create_study(
            study_name=record.start.study_name,
            direction=record.objective.direction.value,
            storage=storage,
        )
    finally:
        optuna.logging.set_verbosity(verbosity)
    distributions = _distributions(record, chosen)
    names = {key: (names or {}).get(key, key) for key in distributions}
    study.add_trials([_frozen_trial(record, trial, distributions, names) for trial in chosen])
    return study


def _frozen_trial(
    record: SweepRecord,
    trial: TrialRecord,
    distributions: Mapping[str, BaseDistribution],
    names: Mapping[str, str],
) -> FrozenTrial:
    import optuna

    name = record.objective.name
    curve = {
        report.resource: report.metrics[name] for report in trial.reports if name in report.metrics
    }
    state, value = optuna.trial.TrialState[trial.state.value], trial.value
    if trial.state is TrialState.PRUNED:
        value = next((seen for seen in reversed(curve.values()) if math.isfinite(seen)), None)
    elif trial.state is not TrialState.COMPLETE:
        value = None
    elif value is None or not math.isfinite(value):
        state, value = optuna.trial.TrialState.FAIL, None
    attributes: dict[str, Any] = {"trial_number": trial.number}
    if trial.run_id:
        attributes["run_id"] = trial.run_id
    if trial.error:
        attributes["error"] = trial.error
    frozen = optuna.trial.create_trial(
        state=state,
        value=value,
        params={names[key]: value for key, value in trial.params.items()},
        distributions={names[key]: distributions[key] for key in trial.params},
        user_attrs=attributes,
        intermediate_values=curve,
    )
    # Optuna's timeline mixes these with `datetime.now()`: naive local time, as Optuna itself keeps.
    frozen.datetime_start = _local_time(trial.started_s or trial.asked_s)
    frozen.datetime_complete = _local_time(trial.ended_s) if trial.ended_s else None
    if state.is_finished() and frozen.datetime_complete is None:
        frozen.datetime_complete = frozen.datetime_start
    return frozen


def _local_time(time_s: float) -> datetime:
    return datetime.fromtimestamp(time_s, UTC).astimezone().replace(tzinfo=None)


def _distributions(
    record: SweepRecord, trials: Iterable[TrialRecord]
) -> dict[str, BaseDistribution]:
    values: dict[str, list[ParamValue]] = {}
    for trial in trials:
        for key, value in trial.params.items():
            values.setdefault(key, []).append(value)
    return {
        key: _declared(record.start.space.get("dimensions", {}).get(key), seen) or _inferred(seen)
        for key, seen in values.items()
    }


def _declared(spec: Any, seen: list[ParamValue]) -> BaseDistribution | None:
    """The declared distribution, if it can be read and holds every value seen."""
    from optuna.distributions import BaseDistribution, json_to_distribution
    from optuna.trial import create_trial

    if spec is None:
        return None
    try:
        distribution = json_to_distribution(spec if isinstance(spec, str) else json.dumps(spec))
        assert isinstance(distribution, BaseDistribution)  # noqa: S101 - Optuna does not annotate it
        for value in dict.fromkeys(seen):
            create_trial(value=0.0, params={"x": value}, distributions={"x": distribution})
    except (ValueError, KeyError, TypeError):
        return None
    return distribution


def _inferred(seen: list[ParamValue]) -> BaseDistribution:
    """The narrowest distribution that holds the values seen."""
    from optuna.distributions import (
        CategoricalDistribution,
        FloatDistribution,
        IntDistribution,
    )

    numbers = [v for v in seen if isinstance(v, int | float) and math.isfinite(v)]
    if len(numbers) < len(seen) or any(isinstance(value, bool) for value in seen):
        return CategoricalDistribution(list(dict.fromkeys(seen)))
    low, high = min(numbers), max(numbers)
    if all(isinstance(value, int) for value in numbers):
        return IntDistribution(int(low), int(high))
    return FloatDistribution(float(low), float(high), log=low > 0 and high / low >= 100)
