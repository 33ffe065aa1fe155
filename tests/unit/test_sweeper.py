from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from hydra import initialize_config_dir
from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.types import HydraContext, RunMode
from tests.fakes import fake_start

from heats import sweeper
from heats.cluster import Node
from heats.config import Direction, Scheduler
from heats.errors import ConfigError, LedgerError
from heats.plan import Plan, refuse_changes, resume_command
from heats.tracking.ledger import Ledger, read_sweep
from heats.trial import (
    Objective,
    ParamValue,
    SweepEnded,
    SweepResumed,
    TrialAsked,
    TrialEnded,
    TrialState,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from omegaconf import DictConfig

REPO = Path(__file__).parents[2]
LR = "lr=tag(log,interval(1e-5,0.1))"
App = tuple[HydraContext, "DictConfig"]


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, empty."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    return tmp_path


@pytest.fixture
def app() -> Iterator[Callable[..., App]]:
    """What Hydra hands to a sweeper for a command line of the shipped app."""
    with initialize_config_dir(str(REPO / "conf"), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()

        def compose(*settings: str) -> App:
            context = HydraContext(config_loader=loader, callbacks=Callbacks())
            return context, loader.load_configuration("config", list(settings), RunMode.MULTIRUN)

        yield compose


def train(config: DictConfig) -> float:
    return float(config.lr)


def planned(app: App, *arguments: str) -> Plan:
    context, config = app
    return Plan.make(context, train, config, list(arguments))


def refused(app: App, *arguments: str) -> str:
    """What a user sees of bad input; nothing may be left behind."""
    context, config = app
    with pytest.raises(ConfigError) as error:
        Plan.make(context, train, config, list(arguments))
    assert list(Path.cwd().iterdir()) == []
    return str(error.value)


# --- the plan -----------------------------------------------------------------------------------


def test_sweep_of_an_earlier_heats_can_be_resumed(app: Callable[..., App]) -> None:
    now = planned(app("study_name=s", "objective.metric=loss"), LR).start
    config = yaml.safe_load(now.config_yaml)
    for section in ("pbt", "backend", "validation", "data"):
        del config[section]
    del config["asha"]["mode"]
    before = dataclasses.replace(now, config_yaml=yaml.safe_dump(config))
    refuse_changes(before, now)
    changed = ("study_name=s", "objective.metric=loss", "asha.mode=promote")
    with pytest.raises(ConfigError, match=r"(?s)config is not what .*\+.*mode: promote"):
        refuse_changes(before, planned(app(*changed), LR).start)


def test_plan_holds_all_that_a_sweep_needs_and_creates_nothing(
    app: Callable[..., App], project: Path
) -> None:
    settings = ("study_name=s", "objective.metric=loss", "objective.direction=maximize")
    plan = planned(app(*settings, "n_trials=7"), LR, "epochs=3")
    assert plan.study_name == "s"
    assert plan.num_trials == 7
    assert plan.objective == Objective("loss", Direction.maximize, plan.conf.objective.resource)
    assert list(plan.space.dimensions) == ["lr"]
    assert plan.space.fixed == ("epochs=3",)
    assert plan.sweep_dir == project / "mlruns" / "sweeps" / "s"
    assert plan.start.tracking_uri == f"sqlite:///{project / 'mlruns' / 'mlflow.db'}"
    assert plan.start.cwd == str(project)
    assert plan.start.argv == tuple(sys.argv)
    assert plan.start.settings["scheduler"] == Scheduler.asha.value
    assert "epochs:" in plan.start.config_yaml
    assert "hydra:" not in plan.start.config_yaml
    assert list(project.iterdir()) == []


def test_study_gets_a_name_of_what_it_trains_and_the_time(app: Callable[..., App]) -> None:
    name, _, when = planned(app(), LR).study_name.partition("-")
    assert name == "digits"
    assert len(when) == len("20260101-120000")


@pytest.mark.parametrize(
    ("settings", "arguments", "num_trials"),
    [
        ([], [], 1),
        (["n_trials=9"], ["epochs=3"], 1),
        ([], [LR], 20),
        ([], ["lr=0.1,0.2,0.3", "batch_size=16,32"], 6),
        (["n_trials=4"], ["lr=0.1,0.2,0.3", "batch_size=16,32"], 4),
        (["n_trials=9"], ["lr=0.1,0.2,0.3"], 3),
    ],
)
def test_number_of_trials_is_the_budget_or_the_grid(
    app: Callable[..., App], settings: list[str], arguments: list[str], num_trials: int
) -> None:
    assert planned(app(*settings), *arguments).num_trials == num_trials


def test_run_without_a_space_takes_the_whole_machine_and_a_trial_one_cpu(
    app: Callable[..., App],
) -> None:
    nodes = [Node({"CPU": 8.0})]
    assert planned(app()).shape(nodes).resources_per_worker == {"CPU": 8.0}
    assert planned(app(), LR).shape(nodes).resources_per_worker == {"CPU": 1.0}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["lrr=0.1,0.2"], "Did you mean 'lr'"),
        (["asha.min_resource=1,2"], "asha.min_resource is a setting of the whole sweep"),
        (["lr=interval(0.1"], "lr"),
        (["lr=0.1,abc"], "abc"),
        (["recipe=digits,digit"], "digit"),
    ],
)
def test_space_that_cannot_be_swept_is_refused(
    app: Callable[..., App], arguments: list[str], told: str
) -> None:
    assert told in refused(app(), *arguments)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["asha.reduction_factor=1"], "asha.reduction_factor=1"),
        (["study_name=../s"], "../s"),
        (["tracking.root=/dev/null/runs"], "tracking.root"),
        (["hydra.sweeper.sampler={_target_: no.such.Sampler}"], "sampler"),
    ],
)
def test_setting_that_cannot_be_used_is_refused(
    app: Callable[..., App], settings: list[str], told: str
) -> None:
    assert told in refused(app(*settings), LR)


# --- running it ---------------------------------------------------------------------------------


def run(app: App, *arguments: str) -> None:
    context, config = app
    sweeper.run(
        hydra_context=context, task_function=train, config=config, arguments=list(arguments)
    )


def test_bad_input_is_one_message_and_exit_code_2_with_nothing_created(
    app: Callable[..., App], project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        run(app(), "lrr=0.1,0.2")
    assert left.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert list(project.iterdir()) == []


def test_trial_that_does_not_fit_is_refused_before_anything_starts(
    app: Callable[..., App], project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        run(app("scaling.num_workers=9", "cluster.num_cpus=2", "cluster.num_gpus=0"), LR)
    assert left.value.code == 2
    assert "scaling.num_workers=9" in capsys.readouterr().err
    assert list(project.iterdir()) == []


def test_full_error_of_hydra_raises_bad_input(
    app: Callable[..., App], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(ConfigError):
        run(app(), "lrr=0.1,0.2")


@pytest.mark.parametrize(
    ("settings", "arguments", "what"),
    [
        ([], ["lr=interval(0.1,0.9)"], "search space"),
        (["objective.metric=other"], [LR], "objective"),
        (["epochs=9"], [LR], "config"),
    ],
)
def test_sweep_that_changed_is_not_resumed(
    app: Callable[..., App],
    capsys: pytest.CaptureFixture[str],
    settings: list[str],
    arguments: list[str],
    what: str,
) -> None:
    own = ("study_name=s", "lane.isolation=inline")
    plan = planned(app(*own), LR)
    Ledger.create(plan.sweep_dir, plan.start).close()
    with pytest.raises(SystemExit) as left:
        run(app(*own, "hydra.sweeper.resume=true", *settings), *arguments)
    assert left.value.code == 2
    told = capsys.readouterr().err
    assert f"The {what} is not what the sweep 's' was started with" in told
    assert "\n-" in told
    assert "\n+" in told
    assert read_sweep(plan.sweep_dir).ended is None
    Ledger.open(plan.sweep_dir)[0].close()  # The lock is free again.


def test_resume_of_a_finished_sweep_says_that_nothing_is_to_do(
    app: Callable[..., App], project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = ("study_name=s", "lane.isolation=inline", "n_trials=2")
    plan = planned(app(*own), LR)
    ledger = Ledger.create(plan.sweep_dir, plan.start)
    for number in range(2):
        params: dict[str, ParamValue] = {"lr": 0.01 * (number + 1)}
        overrides = (f"lr={params['lr']}",)
        ledger.append(TrialAsked(time_s=1, trial=number, params=params, overrides=overrides))
        ledger.append(TrialEnded(time_s=2, trial=number, state=TrialState.COMPLETE, value=0.5))
    ledger.append(SweepEnded(time_s=3, reason="all trials are done", finished=True))
    ledger.close()
    before = (plan.sweep_dir / "ledger.jsonl").read_bytes()
    run(app(*own, "hydra.sweeper.resume=true"), LR)
    told = capsys.readouterr().out
    assert "s has all of its 2 trials" in told
    assert "heats resume s n_trials=4" in told
    assert (plan.sweep_dir / "ledger.jsonl").read_bytes() == before
    Ledger.open(plan.sweep_dir)[0].close()  # The lock is free again.


# --- going on with it ---------------------------------------------------------------------------


OWN_KEYS = "lr: 0.1\nn_trials: null\n"


@pytest.mark.parametrize(
    ("start", "program", "override"),
    [
        ({"script": "/project/sweep.py", "config_yaml": OWN_KEYS}, ["/project/sweep.py"], ""),
        ({"script": None, "module": "pkg.app"}, ["-m", "pkg.app"], "hydra.sweeper."),
    ],
)
def test_resume_is_the_command_that_started_the_sweep(
    project: Path, start: dict[str, Any], program: list[str], override: str
) -> None:
    argv = ("sweep.py", "-m", LR)
    Ledger.create(project / "s", fake_start("s", argv=argv, cwd="/project", **start)).close()
    command, cwd = resume_command(project / "s", ["n_trials=80"])
    told = ["hydra.sweeper.resume=true", "hydra.sweeper.study_name=s", f"{override}n_trials=80"]
    assert command == [sys.executable, *program, "-m", LR, *told]
    assert cwd == "/project"


def test_sweep_of_a_notebook_says_how_to_go_on(project: Path) -> None:
    Ledger.create(project / "s", fake_start("s", script=None)).close()
    with pytest.raises(ConfigError, match=r"hydra\.sweeper\.resume=true"):
        resume_command(project / "s", [])


def test_sweep_that_does_not_exist_is_an_error(project: Path) -> None:
    with pytest.raises(LedgerError, match="no ledger"):
        resume_command(project / "s", [])


def test_resume_repeats_the_settings_of_the_last_driver(project: Path) -> None:
    argv = ("sweep.py", "-m", LR)
    ledger = Ledger.create(project / "s", fake_start("s", argv=argv, config_yaml=OWN_KEYS))
    resumed = [*argv, "hydra.sweeper.resume=true", "hydra.sweeper.study_name=s", "n_trials=40"]
    ledger.append(SweepResumed(time_s=9.0, pid=1, argv=tuple(resumed)))
    ledger.close()
    told = ["hydra.sweeper.resume=true", "hydra.sweeper.study_name=s"]
    command, _ = resume_command(project / "s", [])
    assert command[2:] == ["-m", LR, "n_trials=40", *told]
    command, _ = resume_command(project / "s", ["n_trials=60"])
    assert command[2:] == ["-m", LR, "n_trials=40", *told, "n_trials=60"]
