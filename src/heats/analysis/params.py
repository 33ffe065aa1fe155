"""Charts over the parameters: all at once, and one by one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from heats.analysis.style import COLORS, SHADES, complete_trials, hover, styled, value_axis
from heats.trial import TrialState
from heats.wording import number, param, short_names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plotly.graph_objects import Figure

    from heats.record import SweepRecord, TrialRecord

MAX_LINES = 300
_MAX_PARAMS = 24
_MAX_TICKS = 8
_AXIS_CHARS = 30
"""Characters of tick labels that fit side by side on one of four axes in a row."""


@dataclass(frozen=True, slots=True)
class _Axis:
    """A parameter as positions on an axis: logarithms, indices of choices, or the values."""

    label: str
    positions: list[float | None]
    ticks: list[tuple[float, str]]
    is_choice: bool = False

    @property
    def ends(self) -> tuple[float, float]:
        """The smallest and the largest position; never the same."""
        held = [position for position in self.positions if position is not None]
        low, high = min(held), max(held)
        return (low, high) if high > low else (low - 0.5, high + 0.5)


def parallel_coordinates(record: SweepRecord) -> Figure:
    """A line for each complete trial through its parameters to its value; the best 300 at most."""
    from plotly import graph_objects as go
    from plotly.colors import sample_colorscale

    trials = complete_trials(record, at_least=1)[:MAX_LINES]
    losses = [_value_axis_of(record, trials)]
    axes = [*_param_axes(record, trials), *losses]
    ends = [axis.ends for axis in axes]
    goodness = [1 - rank / max(1, len(trials) - 1) for rank in range(len(trials))]
    colors = sample_colorscale(SHADES, goodness)
    figure = go.Figure()
    for index in range(len(trials) - 1, -1, -1):
        is_best = index == 0
        heights = [
            None if (position := axis.positions[index]) is None else (position - low) / (high - low)
            for axis, (low, high) in zip(axes, ends, strict=True)
        ]
        figure.add_scatter(
            x=list(range(len(axes))),
            y=heights,
            mode="lines",
            line={
                "color": COLORS[TrialState.PRUNED] if is_best else colors[index],
                "width": 3 if is_best else 1.4,
            },
            opacity=1 if is_best else 0.8,
            showlegend=False,
            text=[hover(trials[index], record)] * len(axes),
            hovertemplate="%{text}<extra></extra>",
        )
    for place, (axis, (low, high)) in enumerate(zip(axes, ends, strict=True)):
        figure.add_shape(
            type="line", x0=place, x1=place, y0=0, y1=1, line={"color": "#9aa3ad"}, layer="below"
        )
        for position, text in axis.ticks:
            figure.add_annotation(
                x=place,
                y=(position - low) / (high - low),
                text=text,
                showarrow=False,
                xanchor="right",
                xshift=-4,
                font={"size": 11},
                bgcolor="rgba(255,255,255,0.8)",
                borderpad=1,
            )
    figure.update_xaxes(
        tickvals=list(range(len(axes))),
        ticktext=[axis.label for axis in axes],
        range=[-0.35, len(axes) - 0.85],
        showgrid=False,
        zeroline=False,
    )
    figure.update_yaxes(range=[-0.05, 1.05], visible=False, fixedrange=True)
    return styled(figure, height=440)


def slices(record: SweepRecord) -> Figure:
    """Value of the complete trials against each parameter, four charts in a row."""
    from plotly.subplots import make_subplots

    trials = complete_trials(record, at_least=1)
    axes = _param_axes(record, trials)
    num_columns = min(4, len(axes))
    num_rows = math.ceil(len(axes) / num_columns)
    figure = make_subplots(
        rows=num_rows,
        cols=num_columns,
        shared_yaxes=True,
        horizontal_spacing=0.03,
        vertical_spacing=0.24 / num_rows,
    )
    values = [trial.value or 0.0 for trial in trials]
    for index, axis in enumerate(axes):
        row, column = index // num_columns + 1, index % num_columns + 1
        figure.add_scatter(
            x=axis.positions,
            y=values,
            mode="markers",
            marker={
                "color": [trial.number for trial in trials],
                "colorscale": SHADES,
                "size": 8,
                "line": {"width": 0.5, "color": "white"},
                "showscale": index == 0 and len(trials) > 1,
                "colorbar": {"title": {"text": "trial"}, "thickness": 12, "outlinewidth": 0},
            },
            showlegend=False,
            text=[hover(trial, record) for trial in trials],
            hovertemplate="%{text}<extra></extra>",
            row=row,
            col=column,
        )
        apart = _apart(axis)
        ticks = axis.ticks if axis.is_choice else apart
        low, high = axis.ends
        margin = 0.08 * (high - low)
        figure.update_xaxes(
            title_text=axis.label,
            title_standoff=8,
            tickvals=[position for position, _ in ticks],
            ticktext=[text for _, text in ticks],
            tickangle=-45 if len(apart) < len(ticks) else 0,
            range=[low - margin, high + margin],
            zeroline=False,
            row=row,
            col=column,
        )
    figure.update_yaxes(**value_axis(values, record))
    figure.update_yaxes(title_text=escape(record.objective.name), col=1)
    return styled(figure, height=100 + 270 * num_rows)


def _apart(axis: _Axis) -> list[tuple[float, str]]:
    """The ticks whose texts do not touch the one before, where four axes stand in a row."""
    low, high = axis.ends
    kept: list[tuple[float, str]] = []
    for position, text in sorted(axis.ticks):
        if kept:
            room = (position - kept[-1][0]) / (high - low) * _AXIS_CHARS
            if room < (len(kept[-1][1]) + len(text)) / 2 + 1:
                continue
        kept.append((position, text))
    return kept


def _param_axes(record: SweepRecord, trials: Sequence[TrialRecord]) -> list[_Axis]:
    """An axis for each parameter of these trials, in the order of the search space."""
    keys = list(dict.fromkeys(key for trial in trials for key in trial.params))[:_MAX_PARAMS]
    names = short_names(keys)
    specs = record.start.space.get("dimensions", {})
    axes = []
    for key in keys:
        values = [trial.params.get(key) for trial in trials]
        is_held = [key in trial.params for trial in trials]
        axes.append(_axis(escape(names[key]), values, is_held, specs.get(key) or {}))
    return axes


def _axis(
    label: str, values: Sequence[object], is_held: Sequence[bool], spec: dict[str, Any]
) -> _Axis:
    held = [value for value, holds in zip(values, is_held, strict=True) if holds]
    numbers = [
        float(value)
        for value in held
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    ]
    if len(numbers) < len(held) or "choices" in spec.get("attributes", {}):
        if len(numbers) == len(held):
            held = sorted(set(held), key=float)  # type: ignore[arg-type]
        choices = list(dict.fromkeys(map(_choice_text, held)))
        places = {choice: float(place) for place, choice in enumerate(choices)}
        step = math.ceil(len(choices) / 12)
        return _Axis(
            label,
            [
                places[_choice_text(value)] if holds else None
                for value, holds in zip(values, is_held, strict=True)
            ],
            [(places[choice], escape(choice[:24])) for choice in choices[::step]],
            is_choice=True,
        )
    is_log = bool(spec.get("attributes", {}).get("log")) and min(numbers) > 0
    scaled = iter([math.log10(value) if is_log else value for value in numbers])
    positions = [next(scaled) if holds else None for holds in is_held]
    ticks = _log_ticks(numbers) if is_log else _linear_ticks(min(numbers), max(numbers))
    return _Axis(label, positions, ticks)


def _choice_text(value: object) -> str:
    return param(value)


def _value_axis_of(record: SweepRecord, trials: Sequence[TrialRecord]) -> _Axis:
    values = [trial.value or 0.0 for trial in trials]
    is_log = value_axis(values, record).get("type") == "log"
    spec = {"attributes": {"log": is_log}}
    return _axis(escape(record.objective.name), values, [True] * len(values), spec)


def _log_ticks(values: Sequence[float]) -> list[tuple[float, str]]:
    low, high = min(values), max(values)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for digits in ((1,), (1, 3), (1, 2, 5), tuple(range(1, 10))):
        marks = [digit * 10.0**power for power in range(first, last + 1) for digit in digits]
        marks = [mark for mark in marks if low <= mark * (1 + 1e-9) and mark <= high * (1 + 1e-9)]
        if len(marks) >= 3:
            break
    else:
        marks = sorted({low, high})
    step = math.ceil(len(marks) / _MAX_TICKS)
    return [(math.log10(mark), number(mark)) for mark in marks[::step]]


def _linear_ticks(low: float, high: float) -> list[tuple[float, str]]:
    if high <= low:
        return [(low, number(low))]
    raw = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    first = math.ceil(low / step)
    count = math.floor(high / step) - first + 1
    return [(place * step, number(place * step)) for place in range(first, first + count)]
