from __future__ import annotations

import logging
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from heats.lane.output import output_to

if TYPE_CHECKING:
    from pathlib import Path


def test_output_of_python_and_of_children_goes_to_the_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "job" / "rank-0.log"
    print("before")  # noqa: T201
    for number in range(2):
        with output_to(log):
            print("printed", number)  # noqa: T201
            print("complained", number, file=sys.stderr)  # noqa: T201
            sys.stdout.flush()
            os.write(1, b"written\n")
            subprocess.run(["/bin/echo", "child"], check=True)
    print("after")  # noqa: T201
    lines = log.read_text(encoding="utf-8").splitlines()
    once = [["printed 0", "complained 0"], ["printed 1", "complained 1"]]
    assert lines == [*once[0], "written", "child", *once[1], "written", "child"]
    assert capfd.readouterr().out.splitlines() == ["before", "after"]


def test_output_returns_to_the_terminal_after_an_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    streams = sys.stdout, sys.stderr
    with pytest.raises(ZeroDivisionError), output_to(tmp_path / "log"):
        raise ZeroDivisionError
    assert (sys.stdout, sys.stderr) == streams
    os.write(1, b"here\n")
    assert capfd.readouterr().out == "here\n"


def test_file_that_the_turn_closed_is_no_error(tmp_path: Path) -> None:
    with output_to(tmp_path / "log"):
        sys.stdout.close()
    with output_to(tmp_path / "log"):
        print("here again")  # noqa: T201
    assert (tmp_path / "log").read_text() == "here again\n"


def test_handler_of_one_turn_goes_on_in_the_log_of_the_next(tmp_path: Path) -> None:
    logger = logging.getLogger("heats.test.handler")
    with output_to(tmp_path / "first"):
        logger.addHandler(logging.StreamHandler())
        logger.warning("one")
    with output_to(tmp_path / "second"):
        logger.warning("two")
    logger.handlers.clear()
    assert (tmp_path / "first").read_text() == "one\n"
    assert (tmp_path / "second").read_text() == "two\n"
