"""The look of every chart, and the words on it."""

from __future__ import annotations

import math
import statistics
from html import escape
from typing import TYPE_CHECKING, Any

from heats.analysis.tables import ranked, shown_value, why_ended
from heats.config import Direction
from heats.trial import TrialState
from heats.wording import duration, number, params_text, state_words

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from heats.record import SweepRecord, TrialRecord

COLORS = {
    TrialState.COMPLETE: "#1f7a4d",
    TrialState.PRUNED: "#d98c1f",
    TrialState.FAIL: "#c8372d",
    TrialState.RUNNING: "#2f6fb2",
}
WORDS = state_words(is_running=False)
"""A report is read later: what runs while it is written is unfinished in it."""

ACCENT = "#2f5d9b"
SHADES = ["#ccd9e8", "#7fa3cc", "#2f5d9b", "#0d2a52"]
"""From worst to best, or from first to last."""


class NothingToShowError(Exception):
    """A chart has nothing to show; the message says why."""


def complete_trials(record: SweepRecord, *, at_least: int) -> list[TrialRecord]:
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
        msg = f"This needs {needed} with a finite value; so far there are {len(trials)}."
        raise NothingToShowError(msg)
    if not any(trial.params for trial in trials):
        msg = "The search space has no parameters."
        raise NothingToShowError(msg)
    return trials


def no_value(record: SweepRecord) -> str:
    """Why no trial has a value to show."""
    if not record.trials:
        return "No trial has started yet."
    return f"None of {len(record.trials)} trials has a finite {record.objective.name} yet."


def value_axis(values: list[float], record: SweepRecord) -> dict[str, Any]:
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


def hover(trial: TrialRecord, record: SweepRecord) -> str:
    """What a chart says of a trial under the pointer, escaped."""
    value = number(shown_value(trial, record.objective))
    lines = [
        f"<b>trial {trial.number}</b> {WORDS[trial.state]}",
        f"{escape(record.objective.name)} {value}",
        *(escape(params_text({key: each})) for key, each in trial.params.items()),
    ]
    if why := why_ended(trial, record.objective):
        lines.append(escape(why[:120]))
    if trial.ended_s is not None and trial.spans:
        lines.append(duration(trial.duration_s()))
    return "<br>".join(lines)


def styled(figure: Figure, *, height: int = 380) -> Figure:
    """The report's look; titles go, because the page has its own headings."""
    figure.update_layout(
        template="plotly_white",
        title=None,
        height=height,
        margin={"l": 64, "r": 24, "t": 24, "b": 56},
        font={"family": "system-ui, sans-serif", "size": 13, "color": "#2b3138"},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        hoverlabel={"align": "left"},
        modebar={"bgcolor": "rgba(0,0,0,0)", "color": "#aab2bc", "activecolor": ACCENT},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
    )
    return figure
