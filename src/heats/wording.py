"""How durations, numbers and parameters read, wherever people see them."""

from __future__ import annotations

import math
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heats.trial import TrialState

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

STATE_WORDS = {
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "running",
}
"""One word for each state, in the order in which people are told counts."""


def state_words(*, is_running: bool) -> dict[TrialState, str]:
    """`STATE_WORDS`; where the sweep does not run, its trials do not either."""
    return STATE_WORDS if is_running else STATE_WORDS | {TrialState.RUNNING: "unfinished"}


def program() -> str:
    """How the `heats` command is typed here: by its path where the shell would not find it."""
    own = Path(sys.executable).with_name("heats")
    if shutil.which("heats") is not None or not own.exists():
        return "heats"
    here = Path.cwd()
    return shlex.quote(str(own.relative_to(here) if own.is_relative_to(here) else own))


def duration(seconds: float | None) -> str:
    """Seconds as `4.2 s`, `1:05` (minutes) or `2:03:04` (hours); `-` for None."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    seconds = max(0.0, seconds)
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def rough_duration(seconds: float) -> str:
    """Seconds as an estimate reads: `20 s`, `4 min`, `2 h 10 min`."""
    if seconds < 55:
        return f"{max(5, round(seconds / 5) * 5)} s"
    minutes = max(1, round(seconds / 60))
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(round(minutes / 5) * 5, 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


def number(value: object) -> str:
    """A value in few characters: floats with four significant digits, `-` for None."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return printable(str(value))


def param(value: object) -> str:
    """A parameter's value in few characters; None is Hydra's `null`."""
    return "null" if value is None else number(value)


def printable(text: str) -> str:
    """The text in one line, without characters that a terminal would obey."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def short_names(names: Iterable[str]) -> dict[str, str]:
    """The shortest unique dotted ending of each name: `+recipe.config.lr` becomes `lr`."""
    plain = {name: name.lstrip("+") for name in names}
    short: dict[str, str] = {}
    for name, path in plain.items():
        parts = path.split(".")
        others = ["." + other for key, other in plain.items() if key != name]
        endings = [".".join(parts[start:]) for start in range(len(parts) - 1, 0, -1)]
        unique = (e for e in endings if not any(other.endswith("." + e) for other in others))
        short[name] = next(unique, path)
    return short


def params_text(params: Mapping[str, Any], names: Mapping[str, str] | None = None) -> str:
    """Parameters in one line: `lr=0.003 batch_size=32`; `names` as `short_names` gives them."""
    names = short_names(params) if names is None else names
    return " ".join(f"{names.get(key, key)}={param(value)}" for key, value in params.items())


def last_line(text: str | None) -> str:
    """The last line of a traceback that says something; empty where there is none."""
    lines = [line.strip() for line in (text or "").splitlines() if line.strip()]
    return printable(lines[-1]) if lines else ""
