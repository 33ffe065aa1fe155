"""Sweeps and trials as tables for a terminal, or for whatever reads a pipe."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from heats.analysis.tables import ranked, shown_value, why_ended
from heats.trial import TrialState
from heats.view import STATE_STYLES, best_text, counts_text
from heats.wording import (
    duration,
    number,
    param,
    params_text,
    printable,
    short_names,
    state_words,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from heats.record import SweepRecord, TrialRecord

SWEEP_STYLES = {"running": "cyan", "finished": "green", "interrupted": "yellow", "damaged": "red"}
_PIPE_WIDTH = 1000
_NUM_FAILURES = 10


def output_console() -> Console:
    """Standard output; where it is no terminal, so wide that nothing is ever cut."""
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    return console


def sweeps_table(sweeps: Sequence[tuple[str, str, SweepRecord | None]]) -> Table:
    """One row for each (name, state, record); no record where the ledger cannot be read."""
    table = _table()
    for title in ("sweep", "state", "trials", "best", "started", "time"):
        table.add_column(title, no_wrap=title != "trials")
    for name, state, record in sweeps:
        shown = [Text(printable(name)), Text(state, style=SWEEP_STYLES[state])]
        if record is None:
            table.add_row(*shown)
            continue
        best = record.best()
        result = f"{record.objective.name} {number(best.value)}" if best else "-"
        table.add_row(
            *shown,
            _counts(record, state, "none"),
            Text(result),
            _local(record.start.time_s),
            duration(record.wall_s),
        )
    return table


def status_view(
    record: SweepRecord, state: str, *, num_trials: int, width: int = _PIPE_WIDTH
) -> RenderableType:
    """One sweep: counts, best, what runs, the best `num_trials` trials, and why trials ended."""
    objective = record.objective
    parts: list[RenderableType] = [
        Text.assemble(
            (record.start.study_name, "bold"),
            "  ",
            (state, SWEEP_STYLES[state]),
            f"  {objective.direction.value} {printable(objective.name)}",
            f"  started {_local(record.start.time_s)}  {duration(record.wall_s)}",
        ),
        _counts(record, state, "no trial"),
        best_text(record.best(), objective, is_running=state == "running"),
    ]
    if record.ended is not None and record.ended.reason:
        parts.append(Text(f"ended: {printable(record.ended.reason)}"))
    trials = ranked(record)
    running = sorted(
        (trial for trial in trials if trial.state is TrialState.RUNNING), key=lambda t: t.number
    )
    if running:
        table = trials_table(running, record, is_running=state == "running", width=width)
        title = state_words(is_running=state == "running")[TrialState.RUNNING]
        parts += [Text(f"\n{title}", style="bold"), table]
    ended = [trial for trial in trials if trial.state is not TrialState.RUNNING][:num_trials]
    if ended:
        parts += [Text("\ntop trials", style="bold"), trials_table(ended, record, width=width)]
    if reasons := _reasons(trials, record):
        parts += [Text("\nwhy trials ended early", style="bold"), *reasons]
    return Group(*parts)


def trials_table(
    trials: Sequence[TrialRecord],
    record: SweepRecord,
    *,
    is_running: bool = True,
    width: int = _PIPE_WIDTH,
) -> Table:
    """One row for each trial, with a column for each parameter where `width` has the room."""
    objective = record.objective
    names = short_names(key for trial in trials for key in trial.params)
    words = state_words(is_running=is_running)
    table = _table()
    table.add_column("trial", justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column(Text(printable(objective.name)), justify="right", no_wrap=True)
    table.add_column(Text(printable(objective.resource)), justify="right", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    room = width - 40 - len(objective.name) - len(objective.resource)
    has_columns = sum(max(9, len(name)) + 2 for name in names.values()) <= room
    for name in names.values() if has_columns else ("params",):
        table.add_column(Text(printable(name)), overflow="fold")
    for trial in trials:
        if has_columns:
            cells = [param(trial.params[key]) if key in trial.params else "" for key in names]
        else:
            cells = [params_text(trial.params, names)]
        table.add_row(
            str(trial.number),
            Text(words[trial.state], style=STATE_STYLES[trial.state]),
            number(shown_value(trial, objective)),
            str(trial.last.resource) if trial.last else "-",
            duration(trial.duration_s()),
            *map(Text, cells),
        )
    return table


def _counts(record: SweepRecord, state: str, nothing: str) -> Text:
    if not record.trials:
        return Text(nothing)
    return counts_text(record.counts(), is_running=state == "running")


def _reasons(trials: Sequence[TrialRecord], record: SweepRecord) -> list[Text]:
    """How many trials each rung stopped, then the last failures with their logs."""
    resource = printable(record.objective.resource)
    stopped: Counter[str] = Counter()
    for trial in trials:
        if trial.state is not TrialState.PRUNED:
            continue
        rung = trial.judged[-1].rung if trial.judged else None
        stopped[f"at rung {rung} ({resource})" if rung is not None else "elsewhere"] += 1
    lines = [Text(f"{count} pruned {where}") for where, count in stopped.most_common()]
    failed = [trial for trial in trials if trial.state is TrialState.FAIL]
    for trial in sorted(failed, key=lambda t: t.number)[-_NUM_FAILURES:]:
        line = Text.assemble(
            f"trial {trial.number} ", ("failed", "red"), f": {why_ended(trial, record.objective)}"
        )
        if trial.log:
            line.append(f"\n  log: {printable(trial.log)}", style="dim")
        lines.append(line)
    if len(failed) > _NUM_FAILURES:
        lines.append(Text(f"and {len(failed) - _NUM_FAILURES} earlier failures"))
    return lines


def _table() -> Table:
    return Table(box=None, padding=(0, 2, 0, 0), header_style="dim")


def _local(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).astimezone().strftime("%Y-%m-%d %H:%M")
