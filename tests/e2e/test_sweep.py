"""Sweeps as users start them: a process, its exit code, and what it leaves behind."""

from __future__ import annotations

import random
import shutil
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml
from tests.programs import HEATS, Program

from heats.tracking.ledger import LEDGER, read_sweep
from heats.trial import TrialState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mlflow.entities import Run

    from heats.record import SweepRecord

APPS = Path(__file__).parents[1] / "apps"

# Small, but with rungs; two trials at once, so that some run while others are finished.
DIGITS = (
    "sweeps=digits_asha",
    "cluster.num_cpus=2",
    "tracking.system_metrics=false",
)


@pytest.fixture
def program(project_dir: Path) -> Iterator[Program]:
    program = Program(project_dir)
    yield program
    program.kill()


def wait_for(record: Callable[[], bool], program: Program, timeout_s: float = 200) -> None:
    deadline = time.monotonic() + timeout_s
    while not record():
        assert time.monotonic() < deadline, "the sweep did not come so far"
        assert program.processes(), "the sweep ended early"
        time.sleep(0.02)


def sweep_dir(project_dir: Path, name: str = "race") -> Path:
    return project_dir / "mlruns" / "sweeps" / name


def num_ended(project_dir: Path) -> int:
    """How many trials of the sweep are finished, according to its ledger."""
    ledger = sweep_dir(project_dir) / LEDGER
    return ledger.read_text().count('"event":"trial_ended"') if ledger.exists() else 0


def mlflow_runs(project_dir: Path, study: str = "race") -> list[Run]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{project_dir / 'mlruns' / 'mlflow.db'}")
    experiments = [each.experiment_id for each in client.search_experiments()]
    found = client.search_runs(experiments, f"tags.`heats.study` = '{study}'", max_results=1000)
    return list(found)


def check_tracking(project_dir: Path, record: SweepRecord) -> None:
    """MLflow has the sweep's parent run, one child for each trial, and every report once."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{project_dir / 'mlruns' / 'mlflow.db'}")
    runs = mlflow_runs(project_dir, record.start.study_name)
    parents = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    assert [run.info.run_id for run in parents] == [record.run_id]
    children = {run.info.run_id: run for run in runs if run is not parents[0]}
    assert len(children) == len(record.trials)
    statuses = {
        TrialState.COMPLETE: ("FINISHED", "finished"),
        TrialState.PRUNED: ("FINISHED", "pruned"),
        TrialState.FAIL: ("FAILED", "failed"),
        TrialState.RUNNING: ("KILLED", "interrupted"),
    }
    for trial in record.trials.values():
        assert trial.run_id is not None
        run = children[trial.run_id]
        assert run.data.tags["mlflow.parentRunId"] == record.run_id
        assert run.data.tags["heats.trial"] == str(trial.number)
        state = (run.info.status, run.data.tags["heats.state"])
        assert state == statuses[trial.state], trial.number
        assert run.data.params["lr"] == str(trial.params["lr"])
        history = client.get_metric_history(trial.run_id, "val_accuracy")
        assert sorted((each.step, each.value) for each in history) == [
            (report.resource, report.metrics["val_accuracy"]) for report in trial.reports
        ]


def checkpoints_on_disk(project_dir: Path) -> list[str]:
    return sorted(str(path) for path in project_dir.glob("mlruns/artifacts/*/*/checkpoints/*"))


def test_asha_sweep_leaves_runs_results_and_the_best_checkpoints(
    project_dir: Path, program: Program
) -> None:
    code = program.run(
        "sweep.py", *DIGITS, "n_trials=12", "study_name=race", "checkpoint.keep_best=2"
    )
    assert code == 0, program.output
    assert program.remaining(within_s=5) == []
    record = read_sweep(sweep_dir(project_dir))
    assert len(record.trials) == 12
    counts = record.counts()
    assert counts[TrialState.COMPLETE] + counts[TrialState.PRUNED] == 12
    assert counts[TrialState.PRUNED] >= 4
    check_tracking(project_dir, record)
    best = record.best()
    assert best is not None
    parent = next(run for run in mlflow_runs(project_dir) if run.info.run_id == record.run_id)
    assert parent.info.status == "FINISHED"
    assert parent.data.tags["heats.best_trial"] == str(best.number)
    results = yaml.safe_load((sweep_dir(project_dir) / "optimization_results.yaml").read_text())
    assert (results["best_value"], results["best_trial"]) == (best.value, best.number)
    assert results["best_params"] == best.params
    kept = [uri for trial in record.trials.values() for uri in trial.checkpoints]
    assert checkpoints_on_disk(project_dir) == sorted(kept)
    assert len(kept) == min(2, counts[TrialState.COMPLETE])
    assert best.best_checkpoint(record.objective) is not None
    assert {path.name for path in project_dir.iterdir()} == {
        "sweep.py",
        "conf",
        "sweeps",
        "mlruns",
        Path(program._log.name).name,
    }


def test_killed_sweep_is_finished_by_resume_without_repeating_a_trial(
    project_dir: Path, program: Program
) -> None:
    arguments = ("sweep.py", *DIGITS, "n_trials=16", "study_name=race")
    program.start(*arguments)
    wait_for(lambda: num_ended(project_dir) >= 2, program)
    time.sleep(random.uniform(0.0, 1.0))
    program.signal(signal.SIGKILL)
    assert program.wait() == -signal.SIGKILL
    assert program.remaining(within_s=20) == [], "Ray outlived its driver"
    before = read_sweep(sweep_dir(project_dir))
    assert before.ended is None

    resumed = Program(project_dir)
    try:
        assert resumed.run(HEATS, "resume", "race") == 0, resumed.output
        assert resumed.remaining(within_s=5) == []
    finally:
        resumed.kill()
    after = read_sweep(sweep_dir(project_dir))
    assert len(after.trials) == 16
    assert after.counts()[TrialState.RUNNING] == 0
    assert after.counts()[TrialState.FAIL] == 0
    for number, trial in before.trials.items():
        if trial.state is not TrialState.RUNNING:
            assert after.trials[number].attempts == trial.attempts
            assert after.trials[number].reports == trial.reports
        assert after.trials[number].run_id == (trial.run_id or after.trials[number].run_id)
    check_tracking(project_dir, after)
    kept = [uri for trial in after.trials.values() for uri in trial.checkpoints]
    assert checkpoints_on_disk(project_dir) == sorted(kept)


def test_interrupted_sweep_leaves_in_ten_seconds_and_is_resumed(
    project_dir: Path, program: Program
) -> None:
    program.start("sweep.py", *DIGITS, "n_trials=10", "study_name=race")
    check_leaves(program, signal.SIGINT, after=2, of=10)

    resumed = Program(project_dir)
    try:  # For more trials than it was started with.
        resumed.start(HEATS, "resume", "race", "n_trials=14")
        check_leaves(resumed, signal.SIGTERM, after=6, of=14)
        assert resumed.run(HEATS, "resume", "race", "n_trials=14") == 0, resumed.output
    finally:
        resumed.kill()
    after = read_sweep(sweep_dir(project_dir))
    assert len(after.trials) == 14
    assert after.counts()[TrialState.RUNNING] == 0
    check_tracking(project_dir, after)


def check_leaves(program: Program, number: int, *, after: int, of: int) -> None:
    """Signal a sweep once so many trials have ended, and see that it leaves, to be resumed."""
    folder = program.folder
    wait_for(lambda: num_ended(folder) >= after, program)
    began = time.monotonic()
    program.signal(number)
    code = program.wait()
    took_s = time.monotonic() - began
    assert code == 130, program.output
    assert "Traceback" not in program.output
    assert took_s < 30  # 10 on an idle machine; a test must not depend on that
    assert program.remaining(within_s=2) == []
    record = read_sweep(sweep_dir(folder))
    assert record.ended is not None
    assert not record.ended.finished
    assert len(record.trials) < of
    check_tracking(folder, record)


FOREIGN = ("-m", "hydra/sweeper=heats", "hydra.sweeper.study_name=race")


def test_foreign_app_is_swept_by_its_return_value_without_a_code_change(
    project_dir: Path, program: Program
) -> None:
    shutil.copy(APPS / "probe.py", project_dir)
    code = program.run("probe.py", *FOREIGN, "x=3,1,2", "doubled='${doubled:${x}}'")
    assert code == 0, program.output
    record = read_sweep(sweep_dir(project_dir))
    values = {trial.params["x"]: trial.value for trial in record.trials.values()}
    assert values == {1: 3.0, 2: 6.0, 3: 9.0}
    assert record.start.experiment == "probe"


def test_foreign_module_that_reports_is_stopped_early(project_dir: Path, program: Program) -> None:
    (project_dir / "pkg").mkdir()
    (project_dir / "pkg" / "__init__.py").touch()
    shutil.copy(APPS / "probe.py", project_dir / "pkg" / "app.py")
    code = program.run(
        "-m",
        "pkg.app",
        *FOREIGN,
        "x=0,1,2,3",
        "case=reports",
        "hydra.sweeper.objective.metric=loss",
        "hydra.sweeper.asha.max_resource=6",
        "hydra.sweeper.lane.max_concurrent=1",
        "hydra.sweeper.lane.verdict_wait_s=5",
    )
    assert code == 0, program.output
    record = read_sweep(sweep_dir(project_dir))
    num_reports = {trial.params["x"]: len(trial.reports) for trial in record.trials.values()}
    assert num_reports[0] == 6
    assert sum(num_reports.values()) < 24
    assert record.start.module == "pkg.app"


def test_inline_sweep_needs_no_ray(project_dir: Path, program: Program) -> None:
    code = program.run(
        "sweep.py", *DIGITS, "n_trials=5", "lane.isolation=inline", "study_name=race"
    )
    assert code == 0, program.output
    record = read_sweep(sweep_dir(project_dir))
    assert len(record.trials) == 5
    check_tracking(project_dir, record)
    assert "Ray" not in program.output
