"""Charts of a sweep; each is a Plotly figure, or a sentence that says why there is none."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from typing import TYPE_CHECKING, Any

from heats.analysis.study import study_from_record
from heats.analysis.tables import ranked, shown_value, why_ended
from heats.config import Direction
from heats.trial import TrialState, Verdict
from heats.wording import STATE_WORDS, duration, number, params_text, short_names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from optuna import Study
    from plotly.graph_objects import Figure

    from heats.record import SweepRecord, TrialRecord

COLORS = {
    TrialState.COMPLETE: "#1f7a4d",
    TrialState.PRUNED: "#d98c1f",
    TrialState.FAIL: "#c8372d",
    TrialState.RUNNING: "#2f6fb2",
}
_ACCENT = "#2f5d9b"
_MAX_CURVES = 300
_MAX_IMPORTANCE_TRIALS = 500


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart of the report: `figure` None where `why_not` says what was missing."""

    key: str
    title: str
    caption: str
    figure: Figure | None = None
    why_not: str = ""


class _NothingToShowError(Exception):
    """A chart has nothing to show; the message says why."""


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
            "One line for each complete trial through its parameters; darker is better.",
            parallel_coordinates,
        ),
        (
            "importance",
            "Parameter importance",
            f"Share of the variation of {metric} over complete trials that a parameter explains. "
            "Trials stopped early do not take part, so read it as a hint.",
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
    except _NothingToShowError as exc:
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
        raise _NothingToShowError(_no_value(record))
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
            line={"shape": "hv", "color": _ACCENT, "width": 2},
            name="best so far",
            hoverinfo="skip",
        )
    for state in STATE_WORDS:
        if trials := points[state]:
            figure.add_scatter(
                x=[trial.number for trial in trials],
                y=[shown_value(trial, objective) for trial in trials],
                mode="markers",
                marker={"color": COLORS[state], "size": 8, "opacity": 0.85},
                name=STATE_WORDS[state],
                text=[_hover(trial, record) for trial in trials],
                hovertemplate="%{text}<extra></extra>",
            )
    values = [shown_value(trial, objective) or 0.0 for group in points.values() for trial in group]
    figure.update_xaxes(title_text="trial", rangemode="tozero")
    figure.update_yaxes(title_text=escape(objective.name), **_value_axis(values, record))
    return _styled(figure)


def learning_curves(record: SweepRecord) -> Figure:
    """Reported objective against the resource, one line a trial; at most 300, the best first."""
    from plotly import graph_objects as go

    name = record.objective.name
    trials = [t for t in ranked(record) if any(name in r.metrics for r in t.reports)]
    if not trials:
        reported = sorted(
            {key for t in record.trials.values() for r in t.reports for key in r.metrics}
        )
        if not reported:
            msg = "No trial has reported anything yet."
            raise _NothingToShowError(msg)
        msg = f"No report holds {name!r}; reported were: {', '.join(reported)}."
        raise _NothingToShowError(msg)
    figure = go.Figure()
    values: list[float] = []
    has_legend: set[TrialState] = set()
    for trial in reversed(trials[:_MAX_CURVES]):
        curve = [(r.resource, r.metrics[name]) for r in trial.reports if name in r.metrics]
        values += [value for _, value in curve if math.isfinite(value)]
        figure.add_scatter(
            x=[resource for resource, _ in curve],
            y=[value if math.isfinite(value) else None for _, value in curve],
            mode="lines+markers" if len(curve) == 1 else "lines",
            line={"color": COLORS[trial.state], "width": 1.4},
            opacity=0.9 if trial.state is TrialState.COMPLETE else 0.6,
            name=STATE_WORDS[trial.state],
            legendgroup=trial.state.value,
            legendrank=list(STATE_WORDS).index(trial.state),
            showlegend=trial.state not in has_legend,
            text=[_hover(trial, record)] * len(curve),
            hovertemplate="%{text}<br>at %{x}: %{y:.4g}<extra></extra>",
        )
        has_legend.add(trial.state)
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
    figure.update_yaxes(title_text=escape(name), **_value_axis(values, record))
    return _styled(figure, height=440)


def parallel_coordinates(record: SweepRecord) -> Figure:
    """Optuna's parallel coordinates of the complete trials, at most the best 300."""
    from optuna.visualization import plot_parallel_coordinate

    trials = _complete(record, at_least=1)[:_MAX_CURVES]
    figure = plot_parallel_coordinate(
        _short_study(record, trials), target_name=escape(record.objective.name)
    )
    return _styled(figure, height=460)


def parameter_importance(record: SweepRecord) -> Figure:
    """Importance by fANOVA, as bars; over the best 500 complete trials where there are more."""
    import optuna
    from plotly import graph_objects as go

    trials = _complete(record, at_least=2)
    if len({trial.value for trial in trials}) < 2:
        msg = "All complete trials have the same value, so no parameter explains a difference."
        raise _NothingToShowError(msg)
    study = _short_study(record, trials[:_MAX_IMPORTANCE_TRIALS])
    importance = optuna.importance.get_param_importances(
        study, evaluator=optuna.importance.FanovaImportanceEvaluator(seed=0)
    )
    if not importance:
        msg = "No parameter took more than one value in all complete trials."
        raise _NothingToShowError(msg)
    bars = sorted(importance.items(), key=lambda bar: bar[1])
    figure = go.Figure()
    figure.add_bar(
        x=[share for _, share in bars],
        y=[escape(key) for key, _ in bars],
        orientation="h",
        marker={"color": _ACCENT},
        text=[f"{share:.0%}" for _, share in bars],
        textposition="outside",
        cliponaxis=False,
        hovertemplate="%{y}: %{x:.3f}<extra></extra>",
    )
    figure.update_xaxes(range=[0, 1.08], tickformat=".0%")
    figure.update_yaxes(automargin=True, type="category")
    return _styled(figure, height=110 + 34 * len(bars))


def slices(record: SweepRecord) -> Figure:
    """Optuna's slice plot of the complete trials."""
    from optuna.visualization import plot_slice

    study = _short_study(record, _complete(record, at_least=1))
    figure = plot_slice(study, target_name=escape(record.objective.name))
    figure.update_layout(width=None)
    figure.update_traces(marker={"size": 8, "line": {"width": 0.5, "color": "white"}})
    return _styled(figure, height=380)


def timeline(record: SweepRecord) -> Figure:
    """A bar for each trial from its start to its end (or the last event), by number."""
    from plotly import graph_objects as go

    trials = [trial for trial in record.trials.values() if trial.started_s is not None]
    if not trials:
        msg = "No trial has started yet."
        raise _NothingToShowError(msg)
    figure = go.Figure()
    for state in STATE_WORDS:
        group = [trial for trial in trials if trial.state is state]
        if not group:
            continue
        spans = [(t.started_s or 0.0, t.ended_s or record.last_time_s) for t in group]
        figure.add_bar(
            base=[_moment(begin) for begin, _ in spans],
            x=[max(1.0, (end - begin) * 1000) for begin, end in spans],
            y=[trial.number for trial in group],
            orientation="h",
            width=0.8,
            marker={"color": COLORS[state], "line": {"width": 0}},
            name=STATE_WORDS[state],
            text=[_hover(trial, record) for trial in group],
            textposition="none",
            hovertemplate="%{text}<extra></extra>",
        )
    figure.update_layout(barmode="overlay")
    figure.update_xaxes(type="date", title_text="time (UTC)")
    figure.update_yaxes(title_text="trial", autorange="reversed")
    return _styled(figure, height=min(900, 200 + 8 * len(trials)))


def _moment(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).isoformat(sep=" ", timespec="milliseconds")[:23]


def _complete(record: SweepRecord, *, at_least: int) -> list[TrialRecord]:
    """Complete trials with a finite value and at least one parameter, best first."""
    trials = [
        trial
        for trial in ranked(record)
        if trial.state is TrialState.COMPLETE
        and trial.value is not None
        and math.isfinite(trial.value)
    ]
    if len(trials) < at_least:
        needed = "one complete trial" if at_least == 1 else f"{at_least} complete trials"
        found = f"{len(trials)} of {len(record.trials)}" if record.trials else "none"
        msg = f"This needs at least {needed} with a finite value; there is {found}."
        raise _NothingToShowError(msg)
    if not any(trial.params for trial in trials):
        msg = "The search space has no parameters."
        raise _NothingToShowError(msg)
    return trials


def _short_study(record: SweepRecord, trials: Iterable[TrialRecord]) -> Study:
    """The study of these trials with short parameter names, so that labels fit."""
    keys = dict.fromkeys(key for trial in record.trials.values() for key in trial.params)
    names = {key: escape(short, quote=False) for key, short in short_names(keys).items()}
    return study_from_record(record, trials, names=names)


def _no_value(record: SweepRecord) -> str:
    if not record.trials:
        return "No trial has started yet."
    return f"None of {len(record.trials)} trials has a finite {record.objective.name} yet."


def _value_axis(values: list[float], record: SweepRecord) -> dict[str, Any]:
    """Axis settings that a few diverged trials cannot spoil."""
    if len(values) < 4:
        return {}
    low, high = min(values), max(values)
    quartiles = statistics.quantiles(values, n=4)
    reach = 4 * (quartiles[2] - quartiles[0])
    if record.objective.direction is Direction.minimize:
        if low > 0 and quartiles[2] / low >= 30:
            return {"type": "log", "dtick": 1}
        if reach > 0 and high > quartiles[2] + 2 * reach:
            top = quartiles[2] + reach
            return {"range": [low - 0.05 * (top - low), top]}
    elif reach > 0 and low < quartiles[0] - 2 * reach:
        bottom = quartiles[0] - reach
        return {"range": [bottom, high + 0.05 * (high - bottom)]}
    return {}


def _hover(trial: TrialRecord, record: SweepRecord) -> str:
    value = number(shown_value(trial, record.objective))
    lines = [
        f"<b>trial {trial.number}</b> {STATE_WORDS[trial.state]}",
        f"{escape(record.objective.name)} {value}",
        *(escape(params_text({key: each})) for key, each in trial.params.items()),
    ]
    if why := why_ended(trial, record.objective):
        lines.append(escape(why[:120]))
    if trial.started_s is not None and trial.ended_s is not None:
        lines.append(duration(trial.ended_s - trial.started_s))
    return "<br>".join(lines)


def _styled(figure: Figure, *, height: int = 380) -> Figure:
    """The report's look; titles go, because the page has its own headings."""
    figure.update_layout(
        template="plotly_white",
        title=None,
        height=height,
        margin={"l": 64, "r": 24, "t": 24, "b": 56},
        font={"family": "system-ui, sans-serif", "size": 13, "color": "#2b3138"},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        hoverlabel={"align": "left"},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
    )
    return figure
