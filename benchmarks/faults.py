"""Faults at random moments: how soon each is seen, what it costs its trial, and what the others.

Each row is a sweep of trials of which every second is hit once. All numbers come from the ledger
and from what the trials themselves wrote down.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from datetime import UTC, datetime
from statistics import mean, median
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from benchmarks import fault_driver
from benchmarks.fault_rows import ROWS, run_row
from benchmarks.machine import PROJECT, facts, load_average, others_cpu_share

if TYPE_CHECKING:
    from benchmarks.fault_rows import Result

DRIVER = "driver"
RESULTS = PROJECT / "benchmarks" / "results"
BUSY_CPU_SHARE = 0.1


def table(results: dict[str, Result]) -> Table:
    """One row for each fault."""
    shown = Table(title="Faults at random moments; seconds since each", title_justify="left")
    shown.add_column("")
    for column in (
        "faults",
        "seen\nmedian / max",
        "at work again\nmedian / max",
        "epochs\nrepeated",
        "others\ndelayed, max",
        "as\nexpected",
        "others as\nexpected",
        "processes\nleft",
    ):
        shown.add_column(column, justify="right")
    for name, result in results.items():
        found, others = result.injections, result.others
        shown.add_row(
            label(name),
            str(len(found)),
            _median_and_max([each.detected_s for each in found]),
            _median_and_max([each.back_s for each in found]),
            str(max((each.repeated for each in found), default=0)),
            f"{max(each.delay_s for each in others):.2f}" if others else "-",
            f"{sum(not each.problems for each in found)}/{len(found)}",
            f"{sum(not each.problems for each in others)}/{len(others)}" if others else "-",
            str(result.left),
        )
    return shown


def label(name: str) -> str:
    """What a row is called in the table."""
    return fault_driver.LABEL if name == DRIVER else ROWS[name].label


def problems(results: dict[str, Result]) -> list[str]:
    """Everything that was not as expected, with its row."""
    found = []
    for name, result in results.items():
        told = [result.problems, *(each.problems for each in result.injections)]
        told += [each.problems for each in result.others]
        found += [f"{label(name)}: {problem}" for each in told for problem in each]
    return found


def _median_and_max(seconds: list[float | None]) -> str:
    known = [each for each in seconds if each is not None]
    return f"{median(known):.1f} / {max(known):.1f}" if known else "-"


# --- the command ------------------------------------------------------------------------------


def main(arguments: list[str]) -> None:
    """Run the rows one after the other, print the table, and write all of it to a file."""
    names, repeats, seed = _options(arguments)
    console = Console(width=None if sys.stdout.isatty() else 140)
    results: dict[str, Result] = {}
    loads, busy = [], []
    for name in names:
        loads.append(load_average())
        busy.append(others_cpu_share())
        if name == DRIVER:
            results[name] = fault_driver.run_driver_row(repeats, seed)
        else:
            results[name] = run_row(ROWS[name], repeats, seed)
        missing = repeats - len(results[name].injections)
        if missing:
            results[name].problems.append(f"{missing} of {repeats} faults did not happen")
        console.print(
            f"{label(name)}: {results[name].wall_s:.0f} s (before: load {loads[-1]:.1f}, others "
            f"used {busy[-1]:.0%} of the CPUs)",
            highlight=False,
        )
    console.print(table(results))
    for problem in problems(results):
        console.print(problem, highlight=False, markup=False)
    is_busy = mean(busy) > BUSY_CPU_SHARE
    if is_busy:
        console.print("The machine was busy: do not quote this, run it again on an idle one.")
    if len(names) <= len(ROWS) or repeats < 10:
        console.print("Not the whole table, so no file was written.")
        return
    now = datetime.now(UTC)
    path = RESULTS / f"faults-{now.date()}.json"
    path.parent.mkdir(exist_ok=True)
    result = {
        "benchmark": "faults",
        "time": now.isoformat(timespec="seconds"),
        "command": " ".join(["python -m benchmarks faults", *arguments]),
        "machine": facts(),
        "is_busy": is_busy,
        "rows": {
            name: {"label": label(name), **dataclasses.asdict(each)}
            for name, each in results.items()
        },
    }
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    console.print(f"Written to {path.relative_to(PROJECT)}", highlight=False)


def _options(arguments: list[str]) -> tuple[list[str], int, int]:
    parser = argparse.ArgumentParser("python -m benchmarks faults", description=__doc__)
    known = [*ROWS, DRIVER]
    parser.add_argument(
        "--rows", nargs="+", choices=known, default=known, metavar="ROW", help=", ".join(known)
    )
    parser.add_argument("--repeats", type=int, default=10, help="faults of each row (10)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (0)")
    told = parser.parse_args(arguments)
    return told.rows, max(1, told.repeats), told.seed
