"""What a terminal shows while a sweep runs, and what it says at the end.

The view only reads: it is given the driver's record and copies what it needs, because the driver
goes on changing it. Nothing that goes wrong in here reaches the sweep.
"""

from __future__ import annotations

import itertools
import logging
import shlex
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from heats.progress import Tally, expected_time_left
from heats.trial import AttemptLost, Exploited, TrialState
from heats.wording import (
    STATE_WORDS,
    duration,
    last_line,
    number,
    param,
    params_text,
    program,
    rough_duration,
    short_names,
    state_words,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from rich.console import RenderableType

    from heats.record import SweepRecord, TrialRecord
    from heats.trial import Event, Objective

logger = logging.getLogger(__name__)

STATE_STYLES = {
    TrialState.COMPLETE: "green",
    TrialState.PRUNED: "yellow",
    TrialState.FAIL: "red",
    TrialState.RUNNING: "cyan",
}

_PARAM_WIDTH = 9


class LiveView:
    """Shows a running sweep: a table that refreshes in a terminal, plain lines elsewhere.

    `num_trials`, `num_lanes` and `rungs` may be set again at any time.

    Args:
        get_record: Gives the driver's record, or None where there is none yet. It may change while
            the view reads it.
        num_trials: Trials that the sweep owes in all; None: not known.
        num_lanes: Trials that run at once; None: not known.
        rungs: Milestones of the scheduler, smallest first.
        console: Where to write; standard output by default.
        quiet_s: Without a terminal, the longest silence in seconds while trials run.
    """

    def __init__(
        self,
        get_record: Callable[[], SweepRecord | None],
        *,
        num_trials: int | None = None,
        num_lanes: int | None = None,
        rungs: Sequence[int] = (),
        console: Console | None = None,
        quiet_s: float = 10.0,
    ) -> None:
        self.num_trials = num_trials
        self.num_lanes = num_lanes
        self.rungs = tuple(rungs)
        self._get_record = get_record
        self._console = console or Console(highlight=False)
        self._quiet_s = quiet_s
        self._tally: Tally | None = None
        self._status = ""
        self._notice = ""
        self._last_frame: RenderableType = Text("")
        self._lock = threading.Lock()
        self._began_at_s = time.time()
        self._began = self._last_line = time.monotonic()
        self._live: Live | None = None
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._has_failed = False

    def __enter__(self) -> LiveView:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Begin to show the sweep, from a thread of the view's own."""
        self._began_at_s = time.time()
        self._began = self._last_line = time.monotonic()
        self._guarded(self._start)

    def stop(self) -> None:
        """Show the last state and leave it standing; calling it twice does no harm."""
        self._guarded(self._stop)

    def status(self, text: str) -> None:
        """Say what goes on before the first trial: `starting Ray`, `waiting for 2 lanes`."""
        self._status = text
        if not self._is_terminal:
            self._guarded(lambda: self._line(text))

    def on_event(self, event: Event) -> None:
        """Show what a table of trials does not: that one starts again, or goes on from another."""
        match event:
            case AttemptLost():
                reason = last_line(event.reason)
                self._notice = f"trial {event.trial} starts again: {reason}"
            case Exploited():
                self._notice = (
                    f"trial {event.trial} goes on from trial {event.donor}'s checkpoint at"
                    f" {event.resource}, with {params_text(event.params)}"
                )
            case _:
                return
        if not self._is_terminal:
            self._guarded(lambda: self._line(self._notice))

    # --- both ways of showing -------------------------------------------------------------------

    @property
    def _is_terminal(self) -> bool:
        return self._console.is_terminal and not self._console.is_dumb_terminal

    def _start(self) -> None:
        if self._is_terminal:
            self._live = Live(
                console=self._console, get_renderable=self._frame, refresh_per_second=3
            )
            self._live.start()
        else:
            self._thread = threading.Thread(target=self._write_lines, name="view", daemon=True)
            self._thread.start()

    def _stop(self) -> None:
        self._stopping.set()
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()
        if self._thread is not None:
            thread, self._thread = self._thread, None
            thread.join(timeout=5)
            self._new_lines()

    def _guarded(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception:  # A closed pipe or a bug in here must not end a sweep
            if not self._has_failed:
                self._has_failed = True
                logger.debug("the live view failed; the sweep goes on", exc_info=True)

    def _updated(self) -> tuple[Tally | None, list[TrialRecord]]:
        record = self._get_record()
        if record is None:
            return None, []
        if self._tally is None or self._tally.record is not record:
            self._tally = Tally(record)
        return self._tally, self._tally.update()

    def _time_left(self, tally: Tally) -> float | None:
        if self.num_trials is None:
            return None
        now = time.time()
        recent = (trial.duration_s() for trial in tally.recent)
        durations = [seconds for seconds in recent if seconds is not None]
        running = (trial.duration_s(now) for trial in tally.running.values() if trial.is_open)
        ages = [seconds for seconds in running if seconds is not None]
        waiting = max(0, self.num_trials - tally.num_ended - len(ages))
        if not waiting and not ages:
            return None
        return expected_time_left(durations, ages, waiting, self.num_lanes or max(1, len(ages)))

    def _progress_text(self, tally: Tally) -> str:
        of = f"/{self.num_trials}" if self.num_trials is not None else ""
        return f"{tally.num_ended}{of} trials"

    def _left_text(self, tally: Tally) -> str:
        left = self._time_left(tally)
        return f"about {rough_duration(left)} left" if left is not None else ""

    # --- a terminal -----------------------------------------------------------------------------

    def _frame(self) -> RenderableType:
        with self._lock:
            self._guarded(self._render)
            return self._last_frame

    def _render(self) -> None:
        tally, _ = self._updated()
        elapsed = duration(time.monotonic() - self._began)
        if tally is None or not tally.num_seen:
            name = f"{tally.record.start.study_name}  " if tally else ""
            line = Text.assemble(
                (name, "bold"), self._status or "starting", (f"  {elapsed}", "dim")
            )
            self._last_frame = line
            return
        parts: list[RenderableType] = [self._header(tally, elapsed)]
        best = best_text(tally.best, tally.record.objective)
        best.no_wrap, best.overflow = True, "ellipsis"
        parts.append(best)
        height = max(4, self._console.height - 9)
        if tally.running:
            parts.append(self._running_table(tally, height))
        parts.extend(self._ended_lines(tally, max(1, min(4, height - len(tally.running)))))
        if self._notice:
            parts.append(Text(self._notice, style="yellow", no_wrap=True, overflow="ellipsis"))
        self._last_frame = Group(*parts)

    def _header(self, tally: Tally, elapsed: str) -> Text:
        header = Text.assemble(
            (tally.record.start.study_name, "bold"),
            "  ",
            self._progress_text(tally),
            f"  {elapsed}",
        )
        if left := self._left_text(tally):
            header.append(f", {left}")
        header.append("\n")
        header.append_text(counts_text(tally.counts))
        return header

    def _running_table(self, tally: Tally, height: int) -> Table:
        objective = tally.record.objective
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column("trial", justify="right", no_wrap=True)
        table.add_column(objective.resource, justify="right", no_wrap=True)
        if self.rungs:
            table.add_column("rung", justify="right", no_wrap=True)
        table.add_column(Text(objective.name), justify="right", no_wrap=True, max_width=12)
        table.add_column("age", justify="right", no_wrap=True)
        now = time.time()
        trials = list(tally.running.values())
        shown = trials if len(trials) <= height else trials[: height - 1]
        names = short_names(key for trial in shown for key in trial.params)
        fixed = 20 + len(objective.resource) + max(8, min(12, len(objective.name)))
        room = self._console.width - fixed - (6 if self.rungs else 0)
        columns = list(itertools.islice(names, max(1, (room + 2) // (_PARAM_WIDTH + 2))))
        for key in columns:
            table.add_column(Text(names[key]), no_wrap=True, max_width=_PARAM_WIDTH)
        for trial in shown:
            last = trial.last
            value = last.metrics.get(objective.name) if last else None
            row = [str(trial.number), str(last.resource) if last else "-"]
            if self.rungs:
                row.append(f"{len(trial.judged)}/{len(self.rungs)}")
            row += [number(value), duration(trial.duration_s(now))]
            cells = [param(trial.params[key]) if key in trial.params else "" for key in columns]
            table.add_row(*row, *map(Text, cells))
        if len(trials) > len(shown):
            table.add_row(f"+{len(trials) - len(shown)}")
        return table

    def _ended_lines(self, tally: Tally, num_lines: int) -> list[Text]:
        lines = []
        for trial in list(tally.recent)[-num_lines:][::-1]:
            line = ended_text(trial, tally.record.objective)
            line.no_wrap, line.overflow = True, "ellipsis"
            line.stylize("dim", 0)
            lines.append(line)
        return lines

    # --- plain lines ----------------------------------------------------------------------------

    def _write_lines(self) -> None:
        while not self._stopping.wait(0.25):
            self._guarded(self._new_lines)

    def _new_lines(self) -> None:
        with self._lock:
            tally, ended = self._updated()
            if tally is None:
                return
            # A resumed sweep brings trials that ended under another driver: they were told then.
            for trial in (each for each in ended if (each.ended_s or 0.0) >= self._began_at_s):
                progress = self._progress_text(tally)
                self._line(f"{ended_text(trial, tally.record.objective).plain}  [{progress}]")
            silence_s = time.monotonic() - self._last_line
            if silence_s >= self._quiet_s and not self._stopping.is_set() and tally.num_seen:
                best = best_text(tally.best, tally.record.objective).plain
                told = [self._progress_text(tally), counts_text(tally.counts).plain, best]
                self._line("; ".join(filter(None, [*told, self._left_text(tally)])))

    def _line(self, text: str) -> None:
        self._last_line = time.monotonic()
        elapsed = duration(self._last_line - self._began)
        self._console.print(f"[{elapsed}] {text}", markup=False, highlight=False, soft_wrap=True)


def counts_text(counts: dict[TrialState, int], *, is_running: bool = True) -> Text:
    """`17 complete, 20 pruned, 1 failed, 2 running`, without the states that no trial is in.

    Where the sweep itself does not run, trials in their midst are `2 unfinished`.
    """
    told = [
        (f"{counts[state]} {word}", STATE_STYLES[state])
        for state, word in state_words(is_running=is_running).items()
        if counts[state]
    ]
    return Text(", ").join(Text(text, style=style) for text, style in told)


def best_text(best: TrialRecord | None, objective: Objective, *, is_running: bool = True) -> Text:
    """The best trial in one line, or that there is none."""
    if best is None:
        return Text("best: no trial is complete" + " yet" * is_running, style="dim")
    return Text.assemble(
        f"best {objective.name} ",
        (number(best.value), "bold green"),
        f" by trial {best.number}  {params_text(best.params)}",
    )


def ended_text(trial: TrialRecord, objective: Objective) -> Text:
    """How one trial ended, in one line."""
    text = Text(f"trial {trial.number} ")
    text.append(STATE_WORDS[trial.state], style=STATE_STYLES[trial.state])
    if trial.state is TrialState.FAIL:
        text.append(f"  {last_line(trial.error) or 'no error text'}")
        return text
    if trial.last is not None and trial.state is TrialState.PRUNED:
        text.append(f" at {objective.resource} {trial.last.resource}")
    text.append(f"  {objective.name}={number(trial.value)}  {params_text(trial.params)}")
    return text


def root_option(sweep_dir: Path) -> str:
    """` --root PATH` for a command to type, or nothing where the sweep is in `./mlruns`."""
    root = sweep_dir.absolute().parent.parent
    return "" if root == Path("mlruns").absolute() else f" --root {shlex.quote(str(root))}"


def final_summary(record: SweepRecord, sweep_dir: Path, *, elapsed_s: float | None = None) -> Text:
    """What is said when a driver leaves a sweep: result, counts, time, and what to type next.

    Print it with `Console().print(text, soft_wrap=True)`: commands must not be cut.

    Args:
        record: The sweep's record after its last event.
        sweep_dir: `<root>/sweeps/<study name>`.
        elapsed_s: Wall seconds of this driver; by default of all drivers.
    """
    name, objective, best = record.start.study_name, record.objective, record.best()
    is_finished = record.ended is not None and record.ended.finished
    elapsed_s = record.wall_s if elapsed_s is None else elapsed_s
    verb = "finished" if is_finished else "stopped early"
    text = Text.assemble("\n", (name, "bold"), f" {verb} after {duration(elapsed_s)}")
    if record.ended is not None and record.ended.reason:
        text.append(f": {record.ended.reason}")
    text.append("\n  trials  ")
    text.append_text(
        counts_text(record.counts(), is_running=False) if record.trials else Text("none")
    )
    if best is None:
        text.append("\n  best    none: no trial is complete")
    else:
        text.append(f"\n  best    trial {best.number}, {objective.name} ")
        text.append(number(best.value), style="bold green")
        short = short_names(best.params)
        width = max((len(key) for key in short.values()), default=0)
        for key, value in best.params.items():
            text.append(f"\n          {short[key]:{width}}  {param(value)}")
    heats, quoted, root = program(), shlex.quote(name), root_option(sweep_dir)
    commands = [
        (f"{heats} report {quoted}{root}", "charts in one HTML file"),
        (f"{heats} ui{root}", "runs and metrics in MLflow"),
    ]
    if not is_finished:
        commands.insert(0, (f"{heats} resume {quoted}{root}", "go on where it stopped"))
    promotion = record.start.settings.get("promotion") or {}
    if best is not None and promotion.get("evaluate") and promotion.get("predictor"):
        commands.append((f"{heats} promote {quoted}{root}", "register the best checkpoint"))
    elif best is None and record.trials:
        commands.append((f"{heats} status {quoted}{root}", "why trials ended"))
    width = max(len(command) for command, _ in commands)
    text.append("\nnext")
    for command, purpose in commands:
        text.append("\n  ")
        text.append(command if len(command) > 60 else command.ljust(width), style="bold")
        text.append(f"  {purpose}", style="dim")
    return text
