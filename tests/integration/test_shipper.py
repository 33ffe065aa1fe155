"""The ledger in a real MLflow: SQLite, and a server that comes late."""

from __future__ import annotations

import math
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pytest

from heats.config import Direction
from heats.tracking.ledger import Ledger
from heats.tracking.provenance import provenance
from heats.tracking.runs import Runs
from heats.tracking.shipper import Shipper
from heats.trial import (
    Event,
    Objective,
    Reported,
    RunCreated,
    SweepEnded,
    SweepResumed,
    SweepStarted,
    SystemSampled,
    TrialAsked,
    TrialEnded,
    TrialState,
    TurnStarted,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

T0 = 1_700_000_000.0


def started(root: Path, uri: str = "") -> SweepStarted:
    return SweepStarted(
        time_s=T0,
        study_name="digits 'a'",
        argv=("sweep.py", "-m", "lr=0.1,0.2"),
        cwd=str(root),
        script="sweep.py",
        module=None,
        objective=Objective("loss", Direction.minimize),
        space={},
        fixed=("epochs=3", "db.password=hunter2"),
        settings={"n_trials": 4, "sampler": "TPESampler"},
        config_yaml="lr: 0.1\nhub:\n  token: hunter2\n",
        experiment="digits",
        tracking_uri=uri,
        tags={"team [a]": "vision"},
    )


def trial(number: int, state: TrialState, losses: list[float], **end: Any) -> list[Event]:
    at = T0 + 10 * number
    finite = [loss for loss in losses if math.isfinite(loss)]
    return [
        TrialAsked(
            time_s=at,
            trial=number,
            params={"lr": 0.1 * number, "+layers[0]": 8, "🔥": True, "text": "x" * 7000},
            overrides=(f"lr={0.1 * number}",),
        ),
        TurnStarted(time_s=at + 1, trial=number, attempt=0),
        *(
            Reported(
                time_s=at + 1 + step,
                trial=number,
                index=step,
                resource=step,
                metrics={"loss": loss, "acc@1": step / 10},
                tags={"data": f"rows after {step}"},
            )
            for step, loss in enumerate(losses, start=1)
        ),
        SystemSampled(time_s=at + 2, trial=number, step=0, metrics={"system/cpu": 50.0}),
        TrialEnded(
            time_s=at + 9, trial=number, state=state, value=min(finite, default=None), **end
        ),
    ]


def events(root: Path) -> list[Event]:
    log = root / "rank-0.log"
    log.write_text("the end is near\n")
    return [
        *trial(0, TrialState.COMPLETE, [0.5, math.nan, 0.3]),
        *trial(1, TrialState.PRUNED, [math.inf]),
        *trial(2, TrialState.FAIL, [], error="Traceback\n  boom", log=str(log)),
        *trial(3, TrialState.COMPLETE, [0.1]),
        *trial(4, TrialState.COMPLETE, [0.2]),
    ]


def children(client: MlflowClient, parent: Run) -> dict[str, Run]:
    condition = f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'"
    runs = client.search_runs([parent.info.experiment_id], condition)
    by_number = {run.data.tags["heats.trial"]: run for run in runs}
    assert len(by_number) == len(runs)
    return by_number


def parents(client: MlflowClient) -> list[Run]:
    experiment = client.get_experiment_by_name("digits")
    assert experiment is not None
    return list(client.search_runs([experiment.experiment_id], "tags.`heats.role` = 'sweep'"))


def rows(root: Path) -> dict[str, list[Any]]:
    with closing(sqlite3.connect(root / "mlflow.db")) as database:
        return {
            table: sorted(map(repr, database.execute(f"select * from {table}")))
            for table in ("runs", "metrics", "latest_metrics", "params", "tags")
        }


def artifact(run: Run, name: str) -> str:
    from mlflow.artifacts import load_text

    return str(load_text(f"{run.info.artifact_uri}/{name}"))


@pytest.fixture
def sweep_dir(tmp_path: Path) -> Path:
    return tmp_path / "sweeps" / "digits"


def test_the_ledger_becomes_one_parent_and_its_children(tmp_path: Path, sweep_dir: Path) -> None:
    start = started(tmp_path)
    runs = Runs(start, root=tmp_path)
    with Ledger.create(sweep_dir, start) as ledger:
        provenance(tmp_path, None).save(sweep_dir / "provenance.json")
        (sweep_dir / "0" / ".hydra").mkdir(parents=True)
        (sweep_dir / "0" / ".hydra" / "config.yaml").write_text("lr: 0.0\napi_key: hunter2\n")
        parent = runs.create_parent()
        assert parent is not None
        ledger.append(parent)
        shipper = Shipper(sweep_dir, runs)
        shipper.start()
        for event in events(tmp_path):
            ledger.append(event)
            if isinstance(event, TrialAsked) and event.trial != 1:  # one that the driver missed
                created = runs.create_trial(event.trial, event.time_s)
                assert created is not None
                ledger.append(created)
        ledger.append(SweepEnded(time_s=T0 + 99, reason="all trials are done", finished=True))
        assert shipper.close(30)
    assert (shipper.pending(), shipper.last_error) == (0, None)

    client = runs.client()
    (top,) = parents(client)
    assert top.info.run_id == parent.run_id
    assert top.info.run_name == "digits 'a'"
    assert (top.info.status, top.info.end_time) == ("FINISHED", int((T0 + 99) * 1000))
    assert parent.artifact_dir.startswith(str(tmp_path / "artifacts"))
    assert top.data.params | {"db.password": "***", "epochs": "3", "n_trials": "4"} == (
        top.data.params
    )
    assert top.data.params["sampler"] == "TPESampler"
    assert top.data.tags["team _x5B_a_x5D_"] == "vision"
    best = {key: value for key, value in top.data.tags.items() if key.startswith("heats.best")}
    runs_of = children(client, top)
    assert best == {
        "heats.best_trial": "3",
        "heats.best_value": "0.1",
        "heats.best_run_id": runs_of["3"].info.run_id,
    }
    assert artifact(top, "config.yaml") == "lr: 0.1\nhub:\n  token: ***\n"
    assert "lr=0.1,0.2" in artifact(top, "overrides.txt")
    assert "mlflow==" in artifact(top, "packages.txt")

    states = {number: run.data.tags["heats.state"] for number, run in runs_of.items()}
    assert states == {"0": "finished", "1": "pruned", "2": "failed", "3": "finished",
                      "4": "finished"}  # fmt: skip
    statuses = [runs_of[number].info.status for number in "012"]
    assert statuses == ["FINISHED", "FINISHED", "FAILED"]
    first, failed = runs_of["0"], runs_of["2"]
    assert (first.info.run_name, runs_of["1"].info.start_time) == (
        "trial-0 digits 'a'",
        int((T0 + 10) * 1000),
    )
    assert first.data.params["_x2B_layers_x5B_0_x5D_"] == "8"
    assert first.data.params["_x1F525_"] == "True"
    assert first.data.params["text"].startswith("sha256:")
    assert artifact(first, "params/text.txt") == "x" * 7000
    assert artifact(first, "config.yaml") == "lr: 0.0\napi_key: ***\n"
    assert artifact(first, "overrides.txt") == "epochs=3\ndb.password=***\nlr=0.0\n"
    assert failed.data.tags["heats.error"].endswith("boom")
    assert artifact(failed, "rank-0.log") == "the end is near\n"
    history = client.get_metric_history(first.info.run_id, "loss")
    assert [(each.step, each.timestamp - int(T0 * 1000)) for each in history] == [
        (1, 2000), (2, 3000), (3, 4000)]  # fmt: skip
    assert history[0].value == 0.5
    assert math.isnan(history[1].value)
    assert client.get_metric_history(first.info.run_id, "acc_x40_1")[2].value == 0.3
    assert first.data.metrics["system/cpu"] == 50.0
    assert (top.data.metrics["best_loss"], runs_of["3"].data.metrics["best_loss"]) == (0.1, 0.1)
    assert "hunter2" not in str(rows(tmp_path))


def test_sending_everything_again_changes_nothing(tmp_path: Path, sweep_dir: Path) -> None:
    start = started(tmp_path)
    with Ledger.create(sweep_dir, start) as ledger:
        for event in events(tmp_path):
            ledger.append(event)
        ledger.append(SweepEnded(time_s=T0 + 99, reason="all trials are done", finished=True))
    assert Shipper(sweep_dir, Runs(start, root=tmp_path)).close(30)
    before = rows(tmp_path)
    assert len(before["runs"]) == 6
    for _ in range(2):
        (sweep_dir / "shipped.json").unlink()
        assert Shipper(sweep_dir, Runs(start, root=tmp_path)).close(30)
        assert rows(tmp_path) == before

    # Runs that the store has lost are made anew, and another store gets the same.
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as database, database:
        for table in before:
            database.execute(f"delete from {table}")
    elsewhere = tmp_path / "elsewhere"
    for runs in (
        Runs(start, root=tmp_path),
        Runs(start, root=elsewhere, uri=f"sqlite:///{elsewhere / 'mlflow.db'}"),
    ):
        assert Shipper(sweep_dir, runs).close(30)
    for root in (tmp_path, elsewhere):
        again = rows(root)
        assert {key: len(each) for key, each in again.items()} == {
            key: len(each) for key, each in before.items()
        }
        assert not set(again["runs"]) & set(before["runs"])


def test_a_killed_driver_leaves_no_second_run_and_none_running(
    tmp_path: Path, sweep_dir: Path
) -> None:
    start = started(tmp_path)
    first = Runs(start, root=tmp_path)
    whole = trial(0, TrialState.COMPLETE, [0.5, 0.4])
    with Ledger.create(sweep_dir, start) as ledger:
        parent = first.create_parent()  # and the ledger does not hear of it any more
        for event in whole[:4]:
            ledger.append(event)
        assert first.create_trial(0, T0) is not None
        shipper = Shipper(sweep_dir, first)
        assert shipper.close(30)
    path = sweep_dir / "ledger.jsonl"
    path.write_bytes(path.read_bytes() + b'{"event":"rep')
    assert Shipper(sweep_dir, Runs(start, root=tmp_path)).close(30)  # a torn line is not waited for

    ledger, record = Ledger.open(sweep_dir)
    with ledger:
        runs = Runs(record.start, root=tmp_path)
        assert runs.create_parent() is not None
        ledger.append(SweepResumed(time_s=T0 + 50, pid=1))
        shipper = Shipper(sweep_dir, runs)
        shipper.start()
        again = runs.create_trial(0, record.trials[0].asked_s)
        assert again is not None
        assert again == runs.find_trial_run(0)
        assert runs.find_trial_run(7) is None
        ledger.append(SweepEnded(time_s=T0 + 51, reason="Ctrl-C", finished=False))
        assert shipper.flush(30)
        client = runs.client()
        assert client.get_run(again.run_id).info.status == "KILLED"
        assert client.get_run(again.run_id).data.tags["heats.state"] == "interrupted"
        ledger.append(SweepResumed(time_s=T0 + 52, pid=2))
        ledger.append(TurnStarted(time_s=T0 + 53, trial=0, attempt=1))
        assert shipper.flush(30)
        assert client.get_run(again.run_id).info.status == "RUNNING"
        for event in whole[4:]:
            ledger.append(event)
        ledger.append(SweepEnded(time_s=T0 + 99, reason="all trials are done", finished=True))
        assert shipper.close(30)
    (top,) = parents(client)
    assert parent is not None
    assert top.info.run_id == parent.run_id
    assert top.info.status == "FINISHED"
    assert {run.info.status for run in children(client, top).values()} == {"FINISHED"}
    assert [run.info.run_id for run in children(client, top).values()] == [again.run_id]


def test_a_run_deleted_by_hand_holds_up_no_other_and_long_trials_fit(
    tmp_path: Path, sweep_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start = started(tmp_path)
    runs = Runs(start, root=tmp_path)
    with Ledger.create(sweep_dir, start) as ledger:
        shipper = Shipper(sweep_dir, runs)
        first, *rest = trial(0, TrialState.COMPLETE, [0.5])
        ledger.append(first)
        assert shipper.flush(30)
        deleted = runs.find_trial_run(0)
        assert deleted is not None
        runs.client().delete_run(deleted.run_id)
        params: dict[str, Any] = {f"p{index}": "v" * 5000 for index in range(250)}
        asked = TrialAsked(time_s=T0 + 10, trial=1, params=params, overrides=())
        _, *long = trial(1, TrialState.COMPLETE, [1 / n for n in range(1, 900)])
        for event in [*rest, asked, *long]:
            ledger.append(event)
        assert shipper.close(60)
    assert caplog.text.count("refused a part of trial 0 for good") == 1
    (top,) = parents(runs.client())
    run = children(runs.client(), top)["1"]
    assert run.data.params == params
    assert len(runs.client().get_metric_history(run.info.run_id, "loss")) == 899
    assert run.info.status == "FINISHED"


def _start_sweep(root: Path, name: str) -> str:
    created = Runs(replace(started(root), study_name=name), root=root).create_parent()
    assert created is not None
    return created.run_id


def test_two_first_starts_at_once_make_one_store_and_one_experiment(tmp_path: Path) -> None:
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        ids = set(pool.map(_start_sweep, [tmp_path, tmp_path], ["first", "second"]))
    client = Runs(started(tmp_path), root=tmp_path).client()
    assert {run.info.run_id for run in parents(client)} == ids
    assert len(ids) == 2


@pytest.mark.timeout(400)
def test_a_server_that_comes_late_gets_everything(
    tmp_path: Path, sweep_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = started(tmp_path, uri=f"http://127.0.0.1:{port}")
    runs = Runs(start, root=tmp_path)
    with Ledger.create(sweep_dir, start) as ledger:
        began = time.monotonic()
        assert runs.create_parent() is None
        shipper = Shipper(sweep_dir, runs)
        shipper.start()
        for event in events(tmp_path):
            ledger.append(event)
            if isinstance(event, TrialAsked):
                assert runs.create_trial(event.trial, event.time_s) is None
        assert time.monotonic() - began < 30  # MLflow's own client would take minutes.
        assert not shipper.flush(1.0)
        assert "does not answer" in (shipper.last_error or "")
        assert caplog.text.count("Nothing is lost") == 1
        assert shipper.pending() == ledger.path.stat().st_size

        server = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", "--port", str(port), "--workers", "1",
             "--backend-store-uri", f"sqlite:///{tmp_path / 'mlflow.db'}",
             "--artifacts-destination", str(tmp_path / "server")],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=tmp_path,
            env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            start_new_session=True,
        )  # fmt: skip
        try:
            assert shipper.flush(240), shipper.last_error
            ledger.append(TrialAsked(time_s=T0 + 70, trial=5, params={}, overrides=()))
            created = None
            for _ in range(100):
                created = created or runs.create_trial(5, T0 + 70)
                time.sleep(0 if created else 0.1)
            assert isinstance(created, RunCreated)
            assert created.artifact_dir == ""  # the server's own artifacts are no folder here
            ledger.append(created)
            ledger.append(SweepEnded(time_s=T0 + 99, reason="all trials are done", finished=True))
            assert shipper.close(30)
            assert shipper.last_error is None
            client = runs.client()
            (top,) = parents(client)
            runs_of = children(client, top)
            assert sorted(runs_of) == ["0", "1", "2", "3", "4", "5"]
            assert runs_of["1"].info.start_time == int((T0 + 10) * 1000)
            history = client.get_metric_history(runs_of["0"].info.run_id, "loss")
            assert [each.step for each in history] == [1, 2, 3]
            assert math.isnan(history[1].value)
            assert top.data.tags["heats.best_run_id"] == runs_of["3"].info.run_id
            assert artifact_of(client, top, "config.yaml") == "lr: 0.1\nhub:\n  token: ***\n"
            assert {run.info.status for run in runs_of.values()} == {"FINISHED", "KILLED", "FAILED"}
        finally:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def artifact_of(client: MlflowClient, run: Run, name: str) -> str:
    with TemporaryDirectory() as folder:
        return Path(client.download_artifacts(run.info.run_id, name, folder)).read_text()
