"""The process that talks to MLflow: what it gives the driver, and when it ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sqlite3
import time
from contextlib import closing, suppress
from typing import TYPE_CHECKING

import psutil
import pytest

from heats.config import Direction
from heats.tracking.ledger import Ledger
from heats.tracking.tracker import Tracker
from heats.trial import (
    Event,
    Objective,
    Reported,
    RunCreated,
    SweepEnded,
    SweepStarted,
    TrialAsked,
    TrialEnded,
    TrialState,
)

if TYPE_CHECKING:
    from pathlib import Path

T0 = 1_700_000_000.0


def started(root: Path, uri: str = "") -> SweepStarted:
    return SweepStarted(
        time_s=T0,
        study_name="s",
        argv=("sweep.py",),
        cwd=str(root),
        script="sweep.py",
        module=None,
        objective=Objective("loss", Direction.minimize),
        space={},
        fixed=(),
        settings={},
        config_yaml="lr: 0.1\n",
        experiment="e",
        tracking_uri=uri or f"sqlite:///{root / 'mlflow.db'}",
    )


def rows(root: Path, query: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(root / "mlflow.db")) as database:
        return sorted(database.execute(query))


def helpers() -> list[psutil.Process]:
    """Trackers' processes that this one started and that still live."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # Ended meanwhile, or ended and not yet collected.
            if "heats.tracking" in child.cmdline():
                found.append(child)
    return found


def test_runs_are_made_and_everything_is_sent_before_it_ends(tmp_path: Path) -> None:
    start = started(tmp_path)
    with Ledger.create(tmp_path / "sweeps" / "s", start) as ledger:
        tracker = Tracker(start, tmp_path / "sweeps" / "s", tmp_path)
        (helper,) = helpers()
        assert os.getsid(helper.pid) == helper.pid  # A Ctrl-C at the terminal is not for it.
        parent = tracker.create_parent()
        assert isinstance(parent, RunCreated)
        ledger.append(parent)
        tracker.start()
        made: list[RunCreated] = []
        waits = []
        for number in range(3):
            ledger.append(TrialAsked(time_s=T0 + number, trial=number, params={}, overrides=()))
            waits.append(tracker.create_trial(number, T0 + number))
        for number, wait in enumerate(waits):
            created = wait()
            assert created is not None
            made.append(created)
            events: list[Event] = [
                created,
                Reported(time_s=T0, trial=number, index=1, resource=1, metrics={"loss": 0.5}),
                TrialEnded(time_s=T0 + 9, trial=number, state=TrialState.COMPLETE, value=0.5),
            ]
            for event in events:
                ledger.append(event)
        ledger.append(SweepEnded(time_s=T0 + 99, reason="done", finished=True))
        assert tracker.close(60)
    assert not helpers()
    assert [created.trial for created in made] == [0, 1, 2]
    ids = {parent.run_id, *(created.run_id for created in made)}
    assert {run_id for (run_id,) in rows(tmp_path, "select run_uuid from runs")} == ids
    assert rows(tmp_path, "select distinct status from runs") == [("FINISHED",)]
    sent = rows(tmp_path, "select run_uuid, value from metrics where key = 'loss'")
    assert sent == sorted((created.run_id, 0.5) for created in made)


def test_sweep_goes_on_where_the_process_dies(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start = started(tmp_path)
    with Ledger.create(tmp_path / "sweeps" / "s", start):
        tracker = Tracker(start, tmp_path / "sweeps" / "s", tmp_path)
        helpers()[0].kill()
        assert tracker.create_parent() is None
        assert tracker.create_trial(0, T0)() is None
        tracker.start()
        assert not tracker.close(5)
    assert caplog.text.count("`heats sync` sends it") == 1
    assert not helpers()


def test_warnings_reach_the_driver_without_the_servers_password(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start = started(tmp_path, uri="http://user:hunter2@127.0.0.1:1")
    with Ledger.create(tmp_path / "sweeps" / "s", start):
        tracker = Tracker(start, tmp_path / "sweeps" / "s", tmp_path)
        assert "hunter2" not in " ".join(helpers()[0].cmdline())
        tracker.start()
        assert not tracker.close(5)
    assert caplog.text.count("Nothing is lost") == 1
    assert "hunter2" not in caplog.text


def _drive(root: Path, made: multiprocessing.Queue[int]) -> None:
    tracker = Tracker(started(root), root / "sweeps" / "s", root)
    assert tracker.create_parent() is not None
    made.put(helpers()[0].pid)
    time.sleep(600)


def test_process_ends_with_a_killed_driver(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    made: multiprocessing.Queue[int] = context.Queue()
    driver = context.Process(target=_drive, args=(tmp_path, made))
    driver.start()
    helper = psutil.Process(made.get(timeout=100))
    assert driver.pid is not None
    os.kill(driver.pid, signal.SIGKILL)
    driver.join()
    helper.wait(20)
