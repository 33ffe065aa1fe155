"""`heats up`: the next sweep starts in what the last one left, and cannot tell."""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from typing import TYPE_CHECKING, Any

import pytest
from tests.programs import HEATS, Program

from heats.tracking.ledger import read_sweep
from heats.trial import TrialState

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

APP = """
import os, sys, time
import hydra, ray.train
import model

@hydra.main(version_base="1.3", config_path=None, config_name=None)
def main(cfg):
    for epoch in range(cfg.get("epochs", 2)):
        time.sleep(cfg.get("epoch_s", 0.01))
        ray.train.report({"loss": cfg.x * model.FACTOR, "pid": os.getpid(), "argc": len(sys.argv)})
    return cfg.x * model.FACTOR

if __name__ == "__main__":
    main()
"""

SWEEP = ("app.py", "-m", "hydra/sweeper=heats", "hydra.sweeper.objective.metric=loss", "+x=1,2,3,4")


@pytest.fixture
def up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Program]:
    """What `heats up` started, in a folder for temporary files that is the test's own."""
    folder = tempfile.mkdtemp(prefix="up-")  # Sockets are in it: their paths must be short.
    monkeypatch.setenv("TMPDIR", folder)
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "model.py").write_text("FACTOR = 10\n")
    up = Program(tmp_path)
    assert up.run(HEATS, "up", "--cpus", "2") == 0, up.output
    assert "Up: a Ray cluster of 2 CPUs" in up.output
    yield up
    up.kill()
    shutil.rmtree(folder)


def sweep(up: Program, name: str, *more: str) -> Program:
    program = Program(up.folder, up.mark)
    program.start(*SWEEP, f"hydra.sweeper.study_name={name}", *more)
    return program


def facts(up: Program, name: str) -> tuple[list[float | None], set[float], set[float]]:
    """Values of the sweep's trials, the processes that ran them, and their numbers of arguments."""
    trials = read_sweep(up.folder / "mlruns" / "sweeps" / name).trials.values()
    reports: list[dict[str, Any]] = [dict(each.last.metrics) for each in trials if each.last]
    pids, argcs = {each["pid"] for each in reports}, {each["argc"] for each in reports}
    return [trial.value for trial in trials], pids, argcs


def test_next_sweep_goes_on_in_the_lanes_of_the_last_one(up: Program) -> None:
    first = sweep(up, "first")
    assert first.wait() == 0, first.output
    values, pids, argcs = facts(up, "first")
    assert values == [10, 20, 30, 40]
    assert "Not run by" not in first.output

    second = sweep(up, "second", "+more=1")
    assert second.wait() == 0, second.output
    assert "second finished" in second.output
    again, same_pids, more_argcs = facts(up, "second")
    assert again == values
    assert same_pids <= pids
    assert more_argcs == {next(iter(argcs)) + 1}  # A trial sees its own sweep's command line.

    (up.folder / "model.py").write_text("FACTOR = 100\n")
    third = sweep(up, "third")
    assert third.wait() == 0, third.output
    values, new_pids, _ = facts(up, "third")
    assert values == [100, 200, 300, 400]
    assert not new_pids & pids

    inline = sweep(up, "inline", "hydra.sweeper.lane.isolation=inline")
    assert inline.wait() == 0, inline.output
    assert "lane.isolation=inline needs no lanes" in inline.output
    assert facts(up, "inline")[0] == values

    fourth = sweep(up, "fourth", "+epochs=500", "+epoch_s=0.1")
    folder = up.folder / "mlruns" / "sweeps" / "fourth"
    until = time.monotonic() + 60
    while not (folder / "ledger.jsonl").exists() or "pid" not in (
        (folder / "ledger.jsonl").read_text()
    ):
        assert time.monotonic() < until
        time.sleep(0.1)
    refused = Program(up.folder, up.mark)
    assert refused.run(HEATS, "down") == 2
    assert "A sweep runs there" in refused.output
    fourth.signal(signal.SIGINT)
    assert fourth.wait() == 130, fourth.output
    assert read_sweep(folder).counts()[TrialState.COMPLETE] == 0

    down = Program(up.folder, up.mark)
    assert down.run(HEATS, "down") == 0, down.output
    assert up.remaining(within_s=5) == []
    assert down.run(HEATS, "down") == 0
    assert "Nothing is up" in down.output
