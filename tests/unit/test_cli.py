"""The `heats` command."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.fakes import fake_events, fake_start, write_ledger
from typer.testing import CliRunner, Result

from heats.cli import app
from heats.errors import ConfigError
from heats.tracking.ledger import Ledger
from heats.tracking.root import find_root

Executed = list[tuple[list[str], dict[str, str]]]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with a finished sweep and an interrupted, newer one."""
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "mlruns"
    write_ledger(root, fake_events(12))
    events = fake_events(12, study_name="night", is_ended=False)
    write_ledger(root, [fake_start("night", time_s=events[0].time_s + 9), *events[1:]])
    return tmp_path


def heats(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_help_imports_nothing_heavy() -> None:
    heavy = "ray torch mlflow optuna plotly hydra omegaconf numpy rich.table".split()
    program = (
        "import sys\nfrom heats.cli import main\nsys.argv = ['heats', '--help']\n"
        f"try:\n    main()\nfinally:\n    print([m for m in {heavy} if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "Commands:" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_ls_lists_the_newest_first_with_their_states(project: Path) -> None:
    lines = heats("ls").stdout.splitlines()
    assert lines[1].split()[:2] == ["night", "interrupted"]
    assert lines[2].split()[:2] == ["digits", "finished"]


def test_ls_json_is_nothing_but_json(project: Path) -> None:
    forms = json.loads(heats("ls", "--json").stdout)
    assert [form["name"] for form in forms] == ["night", "digits"]


def test_ls_goes_on_after_a_damaged_ledger(project: Path) -> None:
    (project / "mlruns/sweeps/night/ledger.jsonl").write_text("not a ledger\nat all\n")
    result = heats("ls", "--json")
    assert {form["name"]: form["state"] for form in json.loads(result.stdout)} == {
        "night": "damaged",
        "digits": "finished",
    }
    assert "ledger.jsonl" in result.stderr


def test_sweep_whose_lock_is_held_is_running(project: Path) -> None:
    ledger, _ = Ledger.open(project / "mlruns/sweeps/night")
    with ledger:
        assert json.loads(heats("status", "night", "--json").stdout)["state"] == "running"
        refused = heats("sync", "night")
    assert refused.exit_code == 2
    assert "night is running" in refused.stderr


def test_status_shows_best_trial_and_why_others_ended(project: Path) -> None:
    shown = heats("status", "digits").stdout
    assert "best val_loss 0.135 by trial 3" in shown
    assert "pruned at rung" in shown
    assert "trial 7 failed: RuntimeError: <shape> [4, 3]" in shown
    assert "log: logs/trial_7.log" in shown
    assert "\x1b" not in shown


def test_status_of_latest_shows_trials_that_never_ended(project: Path) -> None:
    shown = heats("status").stdout
    assert shown.startswith("night  interrupted")
    assert "4 unfinished" in shown
    assert "running" not in shown


def test_status_json_has_every_trial(project: Path) -> None:
    form = json.loads(heats("status", "digits", "--json").stdout)
    assert [trial["number"] for trial in form["trials"]] == list(range(12))


def test_names_are_not_read_as_markup(project: Path) -> None:
    write_ledger(project / "mlruns", fake_events(2, study_name="[red]x"))
    assert "[red]x" in heats("ls").stdout
    assert "[red]x" in heats("status", "[red]").stdout


def test_unknown_sweep_is_a_message_and_exit_code_2(project: Path) -> None:
    result = heats("status", "digitz")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Did you mean 'digits'" in result.stderr
    assert "Traceback" not in result.stderr


def test_root_is_found_in_a_parent_folder(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    below = project / "src" / "deep"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    assert find_root(None) == project / "mlruns"
    assert heats("ls").exit_code == 0


def test_missing_root_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such folder"):
        find_root(tmp_path / "nowhere")
    assert heats("ls", "--root", str(tmp_path / "nowhere")).exit_code == 2


def test_root_without_sweeps_says_so(tmp_path: Path) -> None:
    assert "There is no sweep" in heats("ls", "--root", str(tmp_path)).stdout
    assert json.loads(heats("ls", "--root", str(tmp_path), "--json").stdout) == []


def test_report_is_written_beside_the_ledger(project: Path) -> None:
    path = project / "mlruns/sweeps/digits/report.html"
    form = json.loads(heats("report", "digits", "--json").stdout)
    assert form == {"path": str(path), "logged": False}
    assert "<h1>digits</h1>" in path.read_text(encoding="utf-8")


def test_report_that_cannot_be_written_is_a_message(project: Path) -> None:
    result = heats("report", "digits", "--output", str(project / "mlruns/sweeps"))
    assert result.exit_code == 2
    assert "Give another --output" in result.stderr


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> Executed:
    """The commands (and environments) that would have replaced the process."""
    calls: Executed = []
    monkeypatch.setattr(os, "execv", lambda _, command: calls.append((command, {})))
    monkeypatch.setattr(os, "execve", lambda _, command, env: calls.append((command, env)))
    return calls


def test_ui_serves_the_store_that_moved_with_its_root(project: Path, executed: Executed) -> None:
    store = project / "mlruns/mlflow.db"
    store.touch()
    moved = fake_start(
        "moved", time_s=fake_start().time_s + 99, tracking_uri=f"sqlite:///{project}/old/mlflow.db"
    )
    write_ledger(project / "mlruns", [moved])
    result = heats("ui")
    [(command, env)] = executed
    port = command[command.index("--port") + 1]
    assert f"http://127.0.0.1:{port} " in result.stdout
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert env["MLFLOW_BACKEND_STORE_URI"] == f"sqlite:///{store}"


def test_ui_refuses_a_port_that_is_taken(project: Path, executed: Executed) -> None:
    (project / "mlruns/mlflow.db").touch()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        result = heats("ui", "--port", str(port))
    assert result.exit_code == 2
    assert f"Port {port} is taken" in result.stderr
    assert executed == []


def test_ui_of_a_sweep_on_a_server_gives_its_address(project: Path, executed: Executed) -> None:
    start = fake_start(
        "remote", time_s=fake_start().time_s + 99, tracking_uri="https://me:secret@host"
    )
    write_ledger(project / "mlruns", [start])
    assert heats("ui").stdout == "MLflow runs at https://me:***@host\n"
    assert executed == []


def test_ui_without_a_store_says_what_to_do(project: Path, executed: Executed) -> None:
    result = heats("ui")
    assert result.exit_code == 2
    assert "run a sweep first" in result.stderr


def test_resume_runs_the_first_command_again_where_it_was(
    project: Path, executed: Executed
) -> None:
    start = fake_start(
        "again", cwd=str(project), script=str(project / "sweep.py"), config_yaml="n_trials: null\n"
    )
    write_ledger(project / "mlruns", [start])
    heats("resume", "again", "n_trials=80", "--root", str(project / "mlruns"))
    [(command, _)] = executed
    assert command[0] == sys.executable
    assert command[1] == str(project / "sweep.py")
    assert "hydra.sweeper.resume=true" in command
    assert command[-1] == "n_trials=80"


def test_resume_where_the_folder_is_gone_is_a_message(project: Path, executed: Executed) -> None:
    write_ledger(project / "mlruns", [fake_start("gone", cwd=str(project / "gone"))])
    result = heats("resume", "gone")
    assert result.exit_code == 2
    assert "is not there any more" in result.stderr
    assert executed == []
