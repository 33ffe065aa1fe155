"""How numbers, durations and names read."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING

import pytest

from heats.wording import (
    duration,
    last_line,
    number,
    params_text,
    printable,
    program,
    rough_duration,
    short_names,
)

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (math.nan, "-"),
        (-1.0, "0.0 s"),
        (4.23, "4.2 s"),
        (59.4, "59 s"),
        (59.9, "1:00"),
        (3723, "1:02:03"),
    ],
)
def test_duration_reads_as_people_say_it(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1, "5 s"), (52, "50 s"), (58, "1 min"), (3570, "1 h"), (7810, "2 h 10 min")],
)
def test_estimate_is_rounded(seconds: float, text: str) -> None:
    assert rough_duration(seconds) == text


def test_number_keeps_four_digits_and_spares_integers() -> None:
    assert [number(x) for x in (0.0123456, 123456, math.nan, None, "adam")] == [
        "0.01235",
        "123456",
        "nan",
        "-",
        "adam",
    ]


def test_short_names_are_the_shortest_unique_endings() -> None:
    names = ["lr", "+recipe.config.hidden", "a.dropout", "b.dropout", "x.lr"]
    assert short_names(names) == {
        "lr": "lr",
        "+recipe.config.hidden": "hidden",
        "a.dropout": "a.dropout",
        "b.dropout": "b.dropout",
        "x.lr": "x.lr",
    }


def test_params_are_one_line_with_null_for_none() -> None:
    assert params_text({"model.lr": 0.123456, "clip": None}) == "lr=0.1235 clip=null"


def test_last_line_skips_empty_lines_and_control_characters() -> None:
    assert last_line("Traceback\nValueError: \x1b[31mno\n\n") == "ValueError: \ufffd[31mno"
    assert last_line(None) == ""
    assert printable("a\tb") == "a\ufffdb"


def test_command_is_typed_by_its_path_where_the_shell_does_not_find_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert program() == "heats"
    bin_dir = tmp_path / ".venv" / "bin"
    bin_dir.mkdir(parents=True)
    (bin_dir / "heats").touch()
    monkeypatch.setattr(sys, "executable", str(bin_dir / "python"))
    monkeypatch.setenv("PATH", "/nowhere")
    assert program() == str(bin_dir / "heats")
    monkeypatch.chdir(tmp_path)
    assert program() == ".venv/bin/heats"
