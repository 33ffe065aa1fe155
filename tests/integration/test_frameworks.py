"""Every framework as a trial: two ranks in a used lane, stopped early, killed, and compared."""

from __future__ import annotations

import importlib
import json
import math
import os
import runpy
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from omegaconf import OmegaConf
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from heats.lane.worker import log_path, retirement
from heats.tracking.ledger import read_sweep
from heats.trial import TrialState

if TYPE_CHECKING:
    from collections.abc import Callable

    from heats.record import SweepRecord, TrialRecord

APPS = Path(__file__).parents[1] / "apps"
EPOCHS = 3
WHOLE, BAD, AGAIN, DIES = range(4)
CAN_COMPILE = (
    shutil.which(os.environ.get("CXX", "c++")) is not None
    and Path(sysconfig.get_path("include"), "Python.h").is_file()
)

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("ray_cluster")]


@pytest.fixture
def run_recipe(project_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., SweepRecord]:
    """Sweeps over a recipe with tests/apps/frameworks.py, in one lane of two workers."""
    app = project_dir / "frameworks.py"
    shutil.copy(APPS / "frameworks.py", app)

    def run(recipe: str, *overrides: str, name: str = "sweep") -> SweepRecord:
        argv = [
            *(str(app), "-m", f"recipe=frameworks/{recipe}"),
            *(f"epochs={EPOCHS}", "scaling.num_workers=2", "scaling.resources_per_worker={CPU:1}"),
            *("lane.max_concurrent=1", "lane.verdict_wait_s=10", "lane.start_timeout_s=300"),
            *(f"study_name={name}", *overrides),
        ]
        monkeypatch.setattr(sys, "argv", argv)
        runpy.run_path(str(app), run_name="__main__")
        return read_sweep(project_dir / "mlruns" / "sweeps" / name)

    return run


def curve(trial: TrialRecord) -> list[dict[str, float]]:
    """What a trial reported, without how long it took."""
    return [_without_times(report.metrics) for report in trial.reports]


def _without_times(metrics: dict[str, float]) -> dict[str, float]:
    times = ("runtime", "per_second")
    return {key: value for key, value in metrics.items() if not key.endswith(times)}


def plain_curve(recipe: str, config: dict[str, Any], storage: Path) -> list[dict[str, float]]:
    """What the recipe's train function reports in Ray's own trainer."""
    result = trainer_of(recipe)(
        module_of(recipe).train,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="plain", storage_path=str(storage)),
    ).fit()
    assert result.error is None
    return [_without_times(metrics) for _, metrics in result.best_checkpoints]


def trainer_of(recipe: str) -> Any:
    match recipe:
        case "xgboost":
            from ray.train.xgboost import XGBoostTrainer

            return XGBoostTrainer
        case "lightgbm":
            from ray.train.lightgbm import LightGBMTrainer

            return LightGBMTrainer
    return TorchTrainer


def module_of(recipe: str) -> Any:
    return importlib.import_module(f"heats.recipes.frameworks.{recipe}")


def job_dir(number: int) -> Path:
    return Path("mlruns", "sweeps", "sweep", str(number))


def config_of(number: int) -> dict[str, Any]:
    config = OmegaConf.load(job_dir(number) / ".hydra" / "config.yaml")
    resolved = OmegaConf.to_container(config.recipe.config, resolve=True)
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items() if key != "case"}


def found(number: int, rank: int) -> list[dict[str, Any]]:
    """What a rank found when a trial began, for each of its attempts."""
    lines = Path(f"found-{number}-{rank}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    ("recipe", "package", "overrides", "keeps_modules"),
    [
        ("ddp", "torch", ("recipe.config.loader_workers=1",), False),
        ("fsdp1", "torch", (), True),
        ("fsdp2", "torch", (), False),
        ("hf_trainer", "transformers", (), False),
        ("lightning", "lightning", (), False),
        ("accelerate", "accelerate", (), False),
        ("deepspeed", "deepspeed", ("recipe.config.zero_stage=3",), True),
        ("xgboost", "xgboost", (), False),
    ],
)
def test_trials_are_stopped_resumed_and_the_same_as_the_first_in_a_fresh_lane(
    recipe: str,
    package: str,
    overrides: tuple[str, ...],
    keeps_modules: bool,
    run_recipe: Callable[..., SweepRecord],
    tmp_path: Path,
) -> None:
    pytest.importorskip(package, reason="needs an extra of heats")
    if recipe == "deepspeed" and not CAN_COMPILE:
        pytest.skip("DeepSpeed compiles an extension for CPUs: needs a C++ compiler and Python.h")
    record = run_recipe(recipe, "+recipe.config.case=whole,bad,again,dies", *overrides)

    trials = [record.trials[number] for number in range(4)]
    assert [trial.state for trial in trials] == [
        TrialState.COMPLETE,
        TrialState.PRUNED,
        TrialState.COMPLETE,
        TrialState.COMPLETE,
    ]
    assert [len(trial.reports) for trial in trials] == [EPOCHS, 1, EPOCHS, EPOCHS]
    assert [trial.attempts for trial in trials] == [1, 1, 1, 2]
    values = [value for trial in trials for metrics in curve(trial) for value in metrics.values()]
    assert all(math.isfinite(value) for value in values)

    # Same curves: first in a fresh lane, in a used lane, killed in between, and without heats.
    assert curve(trials[AGAIN]) == curve(trials[WHOLE])
    assert curve(trials[DIES]) == curve(trials[WHOLE])
    if recipe in ("ddp", "xgboost"):  # One of each backend: it takes half a minute.
        assert plain_curve(recipe, config_of(WHOLE), tmp_path / "plain") == curve(trials[WHOLE])

    # One lane until a rank was killed; the trial then went on from its checkpoint in another.
    for rank in (0, 1):
        pids = [found(number, rank)[0]["pid"] for number in range(4)]
        assert len(set(pids)) == 1
        first, second = found(DIES, rank)
        assert (first["goes on"], second["goes on"]) == (False, True)
        # What an early stop leaves is what a trial that came to its end leaves.
        after_end, after_stop = (found(number, rank)[0]["left"] for number in (BAD, AGAIN))
        if keeps_modules:  # However a trial ends: docs/frameworks.md tells, and is to be kept true.
            assert after_stop.pop("modules") != after_end.pop("modules")
        assert after_stop == after_end
        assert retirement(log_path(str(job_dir(BAD)), rank)) is None
    for number in (WHOLE, BAD, AGAIN):
        assert [path for path in Path(f"tmp-{number}").rglob("*") if path.is_file()] == []

    best = record.best()
    assert best is not None
    kept = best.best_checkpoint(record.objective)
    assert kept is not None
    assert kept.checkpoint is not None
    again = module_of(recipe).evaluate(config_of(best.number), kept.checkpoint)
    assert again[record.objective.name] == pytest.approx(best.value, abs=1e-6)
    assert again[record.objective.name] > 0.3  # One class in ten.


def test_zero_1_and_2_of_deepspeed_train_in_one_lane(
    run_recipe: Callable[..., SweepRecord],
) -> None:
    pytest.importorskip("deepspeed", reason="needs an extra of heats")
    if not CAN_COMPILE:
        pytest.skip("DeepSpeed compiles an extension for CPUs: needs a C++ compiler and Python.h")
    record = run_recipe(
        "deepspeed", "+recipe.config.case=whole", "recipe.config.zero_stage=1,2", "scheduler=none"
    )
    curves = [curve(record.trials[number]) for number in range(2)]
    assert [len(each) for each in curves] == [EPOCHS, EPOCHS]
    losses = [[metrics["val_loss"] for metrics in each] for each in curves]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3), "they share out other things"
    pids = {found(number, rank)[0]["pid"] for number in range(2) for rank in (0, 1)}
    assert len(pids) == 2


def test_lightgbm_is_stopped_and_resumed_in_processes_of_each_trial(
    run_recipe: Callable[..., SweepRecord], tmp_path: Path
) -> None:
    pytest.importorskip("lightgbm", reason="needs an extra of heats")
    record = run_recipe("lightgbm", "+recipe.config.case=whole,bad,dies")

    trials = [record.trials[number] for number in range(3)]
    states = [TrialState.COMPLETE, TrialState.PRUNED, TrialState.COMPLETE]
    assert [trial.state for trial in trials] == states
    assert [len(trial.reports) for trial in trials] == [EPOCHS, 1, EPOCHS]
    assert [trial.attempts for trial in trials] == [1, 1, 2]
    plain = plain_curve("lightgbm", config_of(0), tmp_path / "plain")
    assert curve(trials[0]) == plain
    assert curve(trials[2]) == plain
    best = trials[0].best_checkpoint(record.objective)
    assert best is not None
    assert best.checkpoint is not None
    again = module_of("lightgbm").evaluate(config_of(0), best.checkpoint)
    assert again["val_accuracy"] == pytest.approx(trials[0].value, abs=1e-6)


def test_sharded_checkpoint_of_two_ranks_is_continued_by_one(
    run_recipe: Callable[..., SweepRecord],
) -> None:
    saved = run_recipe("fsdp2", "+recipe.config.case=whole").trials[0].reports[-1]
    assert saved.checkpoint is not None
    parts = sorted(path.name for path in Path(saved.checkpoint).iterdir())
    assert parts == [".metadata", "__0_0.distcp", "__1_0.distcp"]

    record = run_recipe(
        "fsdp2",
        "+recipe.config.case=continues",
        f"+recipe.config.start={saved.checkpoint}",
        f"epochs={EPOCHS + 2}",
        "scaling.num_workers=1",
        name="one",
    )

    trial = record.trials[0]
    assert trial.state is TrialState.COMPLETE
    assert [report.resource for report in trial.reports] == [EPOCHS + 1, EPOCHS + 2]
    losses = [report.metrics["val_loss"] for report in (saved, *trial.reports)]
    assert losses == sorted(losses, reverse=True)
    checkpoint = trial.reports[-1].checkpoint
    assert checkpoint is not None
    again = module_of("fsdp2").evaluate(config_of(0), checkpoint)
    assert again["val_loss"] == pytest.approx(losses[-1], rel=1e-6)


def test_loaders_process_is_gone_after_a_stop_in_the_middle_of_its_data(
    run_recipe: Callable[..., SweepRecord],
) -> None:
    record = run_recipe(
        "ddp",
        "+recipe.config.case='reports while it loads'",
        "lr=0.3,0.2,0.1",
        "scaling.num_workers=1",
    )

    trials = [record.trials[number] for number in range(3)]
    assert [trial.state for trial in trials] == [TrialState.COMPLETE, *[TrialState.PRUNED] * 2]
    for trial in trials:
        assert trial.reports[0].metrics["processes"] == 1
    (first,), (second,), (third,) = (found(number, 0) for number in range(3))
    assert first["pid"] == second["pid"] == third["pid"]
    assert second["left"] == third["left"]
    assert third["left"]["children"] == []
    assert retirement(log_path(str(job_dir(1)), 0)) is None
