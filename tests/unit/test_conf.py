"""The shipped configuration: every file composes, and all that it names exists."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from heats.config import AppConf, SweepConf
from heats.settings import sweep_conf
from heats.space import parse_space
from hydra_plugins.heats_sweeper import heats_sweeper

REPO = Path(__file__).parents[2]
CONF, SWEEPS = REPO / "conf", REPO / "sweeps"
GROUP_FILES = sorted(path for path in CONF.glob("*/**/*.yaml"))
SWEEP_NAMES = sorted(path.stem for path in SWEEPS.glob("*.yaml"))
RECIPES = sorted(
    path.relative_to(CONF / "recipe").with_suffix("").as_posix()
    for path in (CONF / "recipe").rglob("*.yaml")
)
PACKAGES = {
    "causal_lm": "tiktoken",
    "causal_lm_hub": "tiktoken",
    "frameworks/accelerate": "accelerate",
    "frameworks/deepspeed": "deepspeed",
    "frameworks/hf_trainer": "transformers",
    "frameworks/lightning": "lightning",
    "glue": "transformers",
    "glue_hub": "transformers",
    "gpt2_pretraining": "tiktoken",
    "gpt2_pretraining_124m": "tiktoken",
    "gpt2_pretraining_hub": "tiktoken",
    "image_classification": "transformers",
    "image_classification_dinov2": "transformers",
    "image_classification_hub": "transformers",
    "text_classification": "transformers",
    "text_classification_hub": "transformers",
}
"""What a recipe needs of the extras."""


@pytest.fixture
def app() -> Iterator[None]:
    """Hydra, set up as `sweep.py` sets it up."""
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        yield


def composed(*overrides: str) -> DictConfig:
    """The config with its `hydra` node."""
    return compose("config", overrides=list(overrides), return_hydra_config=True)


def app_node(config: DictConfig) -> dict[str, Any]:
    """All of the config but the `hydra` node, resolved."""
    app = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    resolved = OmegaConf.to_container(app, resolve=True)
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items()}


def named(dotted_path: str) -> Any:
    """What stands under a dotted path."""
    module, _, name = dotted_path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def targets(node: Any) -> Iterator[str]:
    """Every `_target_` at any depth."""
    if isinstance(node, dict):
        if "_target_" in node:
            yield node["_target_"]
        for value in node.values():
            yield from targets(value)


@pytest.mark.usefixtures("app")
@pytest.mark.parametrize("file", GROUP_FILES, ids=lambda path: str(path.relative_to(CONF)))
def test_every_group_file_composes_into_valid_settings(file: Path) -> None:
    group, _, option = file.relative_to(CONF).with_suffix("").as_posix().partition("/")

    config = composed(f"{group}={option}")

    assert set(app_node(config)) == set(AppConf.__dataclass_fields__)
    assert isinstance(sweep_conf(config.hydra.sweeper), SweepConf)


@pytest.mark.timeout(60)  # The first one imports ray, torch and transformers.
@pytest.mark.usefixtures("app")
@pytest.mark.parametrize("recipe", RECIPES)
def test_everything_a_recipe_names_exists(recipe: str) -> None:
    if recipe in PACKAGES:
        pytest.importorskip(PACKAGES[recipe], reason="needs an extra of heats")
    node = app_node(composed(f"recipe={recipe}"))

    train = node["recipe"]["_target_"]
    assert list(inspect.signature(named(train)).parameters) == ["config"]
    assert all(callable(named(target)) for target in targets(node))
    promotion = node["promotion"]
    assert list(inspect.signature(named(promotion["evaluate"])).parameters) == [
        "config",
        "checkpoint_dir",
    ]
    if recipe.startswith("frameworks/"):
        return  # Their models are for nobody to serve.
    assert list(inspect.signature(named(promotion["example"])).parameters) == ["config"]
    # Not imported: it tells MLflow that it is the model that is being stored.
    assert importlib.util.find_spec(promotion["predictor"]) is not None
    assert promotion["model"]


@pytest.mark.usefixtures("app")
@pytest.mark.parametrize("name", SWEEP_NAMES)
def test_named_sweep_spans_keys_that_exist(name: str) -> None:
    config = composed(f"sweeps={name}")

    settings = sweep_conf(config.hydra.sweeper)

    space = parse_space(settings.params, [])
    assert space.dimensions
    for key in space.dimensions:
        assert OmegaConf.select(config, key) is not None, key
    assert settings.objective.metric


@pytest.mark.parametrize(
    "file",
    [CONF / "config.yaml", *GROUP_FILES, *SWEEPS.glob("*.yaml")],
    ids=lambda path: str(path.relative_to(REPO)),
)
def test_every_file_opens_with_the_command_that_uses_it(file: Path) -> None:
    lines = [line for line in file.read_text().splitlines() if not line.startswith("# @package")]

    folder = SWEEPS.parent if file.parent == SWEEPS else CONF
    group, _, option = file.relative_to(folder).with_suffix("").as_posix().partition("/")
    choice = f" {group}={option}" if option else ""
    assert lines[0].startswith(f"# python sweep.py{choice}")


@pytest.mark.usefixtures("app")
def test_common_hyperparameters_reach_every_recipe() -> None:
    common = {"lr": 0.5, "batch_size": 3, "epochs": 7, "weight_decay": 0.25, "seed": 11}

    for recipe in RECIPES:
        config = composed(f"recipe={recipe}", *(f"{key}={common[key]}" for key in common))
        node = app_node(config)
        expected = dict(common)
        if config.hydra.sweeper.backend.framework != "torch":
            del expected["batch_size"]  # Boosted trees see all rows at once.
        assert {key: node["recipe"]["config"][key] for key in expected} == expected
        assert sweep_conf(config.hydra.sweeper).asha.max_resource == 7


@pytest.mark.usefixtures("app")
def test_settings_of_the_app_reach_the_sweeper() -> None:
    config = composed("study_name=one", "n_trials=3", "scheduler=none", "tracking.root=out")

    settings = sweep_conf(config.hydra.sweeper)

    assert (settings.study_name, settings.n_trials, settings.scheduler.value) == ("one", 3, "none")
    assert config.hydra.sweep.dir == "out/sweeps/one"


@pytest.mark.usefixtures("app")
def test_every_section_of_the_schema_is_passed_on_to_the_sweeper() -> None:
    node = OmegaConf.to_container(composed().hydra.sweeper, resolve=False)
    assert isinstance(node, dict)

    shared = set(AppConf.__dataclass_fields__) & set(SweepConf.__dataclass_fields__) - {"seed"}
    for section in shared:
        assert node[section] == f"${{{section}}}"


@pytest.mark.usefixtures("app")
def test_misspelt_sweep_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(HydraException) as caught:
        composed("sweeps=digits_ahsa")

    assert all(name in str(caught.value) for name in SWEEP_NAMES)


@pytest.mark.usefixtures("app")
@pytest.mark.parametrize("name", sorted(heats_sweeper.SAMPLERS))
def test_sampler_is_chosen_without_a_plus(name: str) -> None:
    sampler = sweep_conf(composed(f"hydra/sweeper/sampler={name}").hydra.sweeper).sampler

    assert sampler == heats_sweeper.SAMPLERS[name]
    assert callable(named(sampler["_target_"]))


def test_samplers_of_another_plugin_are_left_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    store = ConfigStore.instance()
    monkeypatch.setattr(store, "repo", {})
    theirs = {"_target_": "optuna.samplers.TPESampler", "multivariate": False}
    store.store(group=heats_sweeper.SAMPLER_GROUP, name="tpe", node=theirs, provider="theirs")

    heats_sweeper.register()

    assert store.load("hydra/sweeper/sampler/tpe.yaml").provider == "theirs"
    assert store.load("hydra/sweeper/sampler/grid.yaml").provider == "heats"


def test_project_dir_is_the_current_one_where_the_app_has_no_config_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    assert heats_sweeper.project_dir() == str(tmp_path)


@pytest.mark.usefixtures("app")
def test_project_dir_is_where_the_config_folder_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    assert heats_sweeper.project_dir() == str(REPO)


def run_python(*arguments: str, cwd: Path) -> str:
    """What `python ARGUMENTS` prints."""
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_config_is_shown_from_any_folder_and_nothing_is_written(tmp_path: Path) -> None:
    shown = run_python(str(REPO / "sweep.py"), "--cfg", "job", "sweeps=digits_asha", cwd=tmp_path)

    config = OmegaConf.create(shown)
    assert (config.n_trials, config.recipe._target_) == (48, "heats.recipes.digits.train")
    assert set(map(str, config)) == set(AppConf.__dataclass_fields__)
    assert list(tmp_path.iterdir()) == []


def test_help_names_the_commands_and_every_choice(tmp_path: Path) -> None:
    shown = run_python(str(REPO / "sweep.py"), "--help", cwd=tmp_path)

    assert "python sweep.py -m lr=" in shown
    for name in [file.stem for file in GROUP_FILES] + sorted(heats_sweeper.SAMPLERS):
        assert name in shown
    assert "$" not in shown
    assert list(tmp_path.iterdir()) == []


def test_plugin_loads_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys, hydra_plugins.heats_sweeper.heats_sweeper as _;"
        "print({'ray', 'torch', 'optuna', 'mlflow', 'numpy', 'pandas'} & set(sys.modules))"
    )

    assert run_python("-c", code, cwd=tmp_path).strip() == "set()"
