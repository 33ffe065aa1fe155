"""Charts of a sweep; each is a Plotly figure, or a sentence that says why there is none."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from html import escape
from typing import TYPE_CHECKING

from heats.analysis.params import parallel_coordinates, slices
from heats.analysis.study import study_from_record
from heats.analysis.style import (
    ACCENT,
    COLORS,
    WORDS,
    NothingToShowError,
    complete_trials,
    hover,
    no_value,
    styled,
    value_axis,
)
from heats.analysis.tables import ranked, shown_value
from heats.config import Direction
from heats.trial import TrialState, Verdict
from heats.wording import short_names

if TYPE_CHECKING:
    from collections.abc import Callable

    from plotly.graph_objects import Figure

    from heats.record import SweepRecord, TrialRecord

_MAX_CURVES = 300
_MAX_IMPORTANCE_TRIALS = 500
_FEW_TRIALS = 3
_MANY_TRIALS = 20
"""Complete trials that are enough to tell by them alone what a parameter does."""


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart of the report: `figure` None where `why_not` says what was missing."""

    key: str
    title: str
    caption: str
    figure: Figure | None = None
    why_not: str = ""


def charts(record: SweepRecord) -> list[Chart]:
    """Every chart of the report, in the order in which it shows them."""
    metric, resource = record.objective.name, record.objective.resource
    better = "lower" if record.objective.direction is Direction.minimize else "higher"
    drawn: list[tuple[str, str, str, Callable[[SweepRecord], Figure]]] = [
        (
            "history",
            "Optimization history",
            f"Best {metric} of each trial in the order they began; {better} is better. "
            "The line is the best complete trial so far.",
            optimization_history,
        ),
        (
            "curves",
            "Learning curves",
            f"{metric} against {resource}, one line for each trial, coloured by how it ended. "
            "Crosses mark the rung where a trial was stopped.",
            learning_curves,
        ),
        (
            "parallel",
            "Parallel coordinates",
            "One line for each complete trial through its parameters; darker is better, "
            "and the orange line is the best trial.",
            parallel_coordinates,
        ),
        (
            "importance",
            "Parameter importance",
            f"Share of the variation of {metric} that a parameter explains (fANOVA). Where few "
            f"trials are complete it is that at the last {resource} which most trials reached.",
            parameter_importance,
        ),
        (
            "slices",
            "Parameters one by one",
            f"{metric} of complete trials against each parameter; darker trials ran later.",
            slices,
        ),
        ("timeline", "Timeline", "When each trial ran, coloured by how it ended.", timeline),
    ]
    return [_drawn(record, *chart) for chart in drawn]


def _drawn(
    record: SweepRecord,
    key: str,
    title: str,
    caption: str,
    draw: Callable[[SweepRecord], Figure],
) -> Chart:
    try:
        return Chart(key, title, caption, figure=draw(record))
    except NothingToShowError as exc:
        return Chart(key, title, caption, why_not=str(exc))
    except Exception as exc:  # noqa: BLE001 - one chart that fails must not cost the whole report
        return Chart(key, title, caption, why_not=f"This chart failed: {exc}")


def optimization_history(record: SweepRecord) -> Figure:
    """Value of every trial by number, and the best complete one so far."""
    from plotly import graph_objects as go

    objective = record.objective
    points: dict[TrialState, list[TrialRecord]] = defaultdict(list)
    for trial in record.trials.values():
        value = shown_value(trial, objective)
        if value is not None and math.isfinite(value):
            points[trial.state].append(trial)
    if not points:
        raise NothingToShowError(no_value(record))
    figure = go.Figure()
    steps: list[tuple[int, float]] = []
    for trial in sorted(points[TrialState.COMPLETE], key=lambda trial: trial.number):
        if objective.is_better(trial.value, steps[-1][1] if steps else None):
            steps.append((trial.number, trial.value or 0.0))
    if steps:
        steps.append((max(record.trials), steps[-1][1]))
        figure.add_scatter(
            x=[step[0] for step in steps],
            y=[step[1] for step in steps],
            mode="lines",
            line={"shape": "hv", "color": ACCENT, "width": 2},
            name="best so far",
            hoverinfo="skip",
        )
    for state in WORDS:
        if trials := points[state]:
            figure.add_scatter(
                x=[trial.number for trial in trials],
                y=[shown_value(trial, objective) for trial in trials],
                mode="markers",
                marker={"color": COLORS[state], "size": 8, "opacity": 0.85},
                name=WORDS[state],
                text=[hover(trial, record) for trial in trials],
                hovertemplate="%{text}<extra></extra>",
            )
    values = [shown_value(trial, objective) or 0.0 for group in points.values() for trial in group]
    figure.update_xaxes(title_text="trial", rangemode="tozero")
    figure.update_yaxes(title_text=escape(objective.name), **value_axis(values, record))
    return styled(figure)


def learning_curves(record: SweepRecord) -> Figure:
    """Reported objective against the resource, one line a trial; at most 300, the best first."""
    from plotly import graph_objects as go

    name = record.objective.name
    trials = [t for t in ranked(record) if any(name in r.metrics for r in t.reports)]
    if not trials:
        names = {key for t in record.trials.values() for r in t.reports for key in r.metrics}
        if not names:
            msg = "No trial has reported anything yet."
            raise NothingToShowError(msg)
        msg = f"No report holds {name!r}; reported were: {', '.join(sorted(names))}."
        raise NothingToShowError(msg)
    reported = [r.metrics[name] for t in trials for r in t.reports if name in r.metrics]
    values = [value for value in reported if math.isfinite(value)]
    if not values:
        msg = f"Every reported {name} is NaN or infinite."
        raise NothingToShowError(msg)
    figure = go.Figure()
    has_legend: set[TrialState] = set()
    for trial in reversed(trials[:_MAX_CURVES]):
        curve = [(r.resource, r.metrics[name]) for r in trial.reports if name in r.metrics]
        if trial.state not in has_legend:
            figure.add_scatter(
                x=[None],
                y=[None],
                mode="lines",
                line={"color": COLORS[trial.state], "width": 2},
                name=WORDS[trial.state],
                legendgroup=trial.state.value,
                legendrank=list(WORDS).index(trial.state),
            )
            has_legend.add(trial.state)
        figure.add_scatter(
            x=[resource for resource, _ in curve],
            y=[value if math.isfinite(value) else None for _, value in curve],
            mode="lines+markers" if len(curve) == 1 else "lines",
            line={"color": COLORS[trial.state], "width": 1.4},
            opacity=0.9 if trial.state is TrialState.COMPLETE else 0.6,
            name=WORDS[trial.state],
            legendgroup=trial.state.value,
            showlegend=False,
            text=[hover(trial, record)] * len(curve),
            hovertemplate="%{text}<br>at %{x}: %{y:.4g}<extra></extra>",
        )
    stops = [
        judged
        for trial in trials[:_MAX_CURVES]
        for judged in trial.judged
        if judged.verdict is Verdict.STOP and math.isfinite(judged.value)
    ]
    if stops:
        figure.add_scatter(
            x=[judged.resource for judged in stops],
            y=[judged.value for judged in stops],
            mode="markers",
            marker={"symbol": "x-thin", "size": 7, "line": {"width": 1.5, "color": "#8a5a12"}},
            name="stopped at a rung",
            legendrank=9,
            text=[f"trial {judged.trial} stopped at rung {judged.rung}" for judged in stops],
            hovertemplate="%{text}<extra></extra>",
        )
    for rung in sorted({judged.rung for trial in trials for judged in trial.judged}):
        figure.add_vline(x=rung, line={"color": "#c9ced6", "width": 1, "dash": "dot"})
    figure.update_xaxes(title_text=escape(record.objective.resource), rangemode="tozero")
    figure.update_yaxes(title_text=escape(name), **value_axis(values, record))
    return styled(figure, height=440)


def parameter_importance(record: SweepRecord) -> Figure:
    """Importance by fANOVA, as bars, over trials that can be compared; at most 500 of them."""
    import optuna
    from plotly import graph_objects as go

    trials, where = _comparable_trials(record)
    trials = trials[:_MAX_IMPORTANCE_TRIALS]
    if len(trials) < _FEW_TRIALS:
        msg = f"Only {len(trials)} trials can be compared ({record.objective.name} {where})."
        raise NothingToShowError(msg)
    if len({trial.value for trial in trials}) < 2:
        msg = "All trials have the same value, so no parameter explains a difference."
        raise NothingToShowError(msg)
    importance = optuna.importance.get_param_importances(
        study_from_record(record, trials),
        evaluator=optuna.importance.FanovaImportanceEvaluator(seed=0),
    )
    if not importance:
        msg = "No parameter took more than one value in all trials."
        raise NothingToShowError(msg)
    names = short_names(importance)
    bars = sorted((share, names[key]) for key, share in importance.items())
    figure = go.Figure()
    figure.add_bar(
        x=[share for share, _ in bars],
        y=[escape(name) for _, name in bars],
        orientation="h",
        marker={"color": ACCENT},
        text=[f"{share:.0%}" for share, _ in bars],
        textposition="outside",
        cliponaxis=False,
        hovertemplate="%{y}: %{x:.3f}<extra></extra>",
    )
    figure.update_xaxes(
        range=[0, 1.12 * bars[-1][0]],
        tickformat=".0%",
        title_text=escape(f"{record.objective.name} {where}, {len(trials)} trials"),
    )
    figure.update_yaxes(automargin=True, type="category", ticksuffix="  ")
    return styled(figure, height=110 + 34 * len(bars))


def _comparable_trials(record: SweepRecord) -> tuple[list[TrialRecord], str]:
    """Trials as if all were complete, with values of one kind, and of which kind they are.

    Final values where many trials are complete, else values after an equal amount of training: the
    last one that two thirds of the trials reached. The best come first.
    """
    name, resource = record.objective.name, record.objective.resource
    values_at: dict[int, dict[int, float]] = defaultdict(dict)
    for trial in record.trials.values():
        for report in trial.reports:
            if math.isfinite(value := report.metrics.get(name, math.nan)) and trial.params:
                values_at[report.resource][trial.number] = value
    num_complete = record.counts()[TrialState.COMPLETE]
    most = max(map(len, values_at.values()), default=0)
    if num_complete >= min(_MANY_TRIALS, most):
        return complete_trials(record, at_least=2), "of complete trials"
    spent = max(spent for spent, values in values_at.items() if 3 * len(values) >= 2 * most)
    sign = 1 if record.objective.direction is Direction.minimize else -1
    best_first = sorted(values_at[spent].items(), key=lambda item: sign * item[1])
    trials = [
        replace(record.trials[number], state=TrialState.COMPLETE, value=value)
        for number, value in best_first
    ]
    return trials, f"at {resource} {spent}"


def timeline(record: SweepRecord) -> Figure:
    """A bar for each attempt at a trial from its start to its end (or the last event of it)."""
    from plotly import graph_objects as go

    trials = [trial for trial in record.trials.values() if trial.started_s is not None]
    if not trials:
        msg = "No trial has started yet."
        raise NothingToShowError(msg)
    figure = go.Figure()
    for state in WORDS:
        group = [(trial, span) for trial in trials if trial.state is state for span in trial.spans]
        if not group:
            continue
        figure.add_bar(
            base=[_moment(begin) for _, (begin, _) in group],
            x=[max(1.0, (end - begin) * 1000) for _, (begin, end) in group],
            y=[trial.number for trial, _ in group],
            orientation="h",
            width=0.8,
            marker={"color": COLORS[state], "line": {"width": 0}},
            name=WORDS[state],
            text=[hover(trial, record) for trial, _ in group],
            textposition="none",
            hovertemplate="%{text}<extra></extra>",
        )
    figure.update_layout(barmode="overlay")
    figure.update_xaxes(type="date", title_text="time (UTC)")
    figure.update_yaxes(title_text="trial", autorange="reversed")
    return styled(figure, height=min(900, 200 + 8 * len(trials)))


def _moment(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).isoformat(sep=" ", timespec="milliseconds")[:23]
