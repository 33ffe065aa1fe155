"""The `heats` command against a real MLflow store."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from mlflow import MlflowClient
from tests.fakes import fake_events, write_ledger
from typer.testing import CliRunner

from heats.cli import app
from heats.trial import SweepStarted


def test_sync_sends_a_sweep_that_mlflow_never_saw_and_report_is_logged_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "mlruns"
    start, *events = (e for e in fake_events(4) if type(e).__name__ != "RunCreated")
    assert isinstance(start, SweepStarted)
    uri = f"sqlite:///{root / 'mlflow.db'}"
    write_ledger(root, [dataclasses.replace(start, tracking_uri=uri), *events])

    for _ in range(2):  # The second time there is nothing left to send.
        synced = CliRunner().invoke(app, ["sync", "digits", "--json"])
        assert json.loads(synced.stdout) == {"name": "digits", "complete": True, "error": None}

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("digits")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    assert len(runs) == 5
    [parent] = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]

    logged = CliRunner().invoke(app, ["report", "digits", "--log", "--json"])
    assert json.loads(logged.stdout)["logged"] is True
    assert "report.html" in [each.path for each in client.list_artifacts(parent.info.run_id)]
