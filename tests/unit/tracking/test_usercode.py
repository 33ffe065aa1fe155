from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.fakes import fake_start

from heats.errors import ConfigError
from heats.tracking.usercode import as_in_sweep, load_function, trial_config


def test_code_of_the_sweep_runs_in_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "users_metrics.py").write_text(
        "import pathlib\ndef cwd():\n    print('hello')\n    return pathlib.Path.cwd()\n"
    )
    before = Path.cwd(), list(sys.path)
    with as_in_sweep(fake_start(cwd=str(tmp_path), script="app/sweep.py")):
        assert load_function("promotion.evaluate", "users_metrics.cwd")() == tmp_path
    assert (Path.cwd(), sys.path) == before
    assert capsys.readouterr() == ("", "hello\n")


def test_sweep_whose_folder_is_gone_runs_here(tmp_path: Path) -> None:
    with as_in_sweep(fake_start(cwd=str(tmp_path / "gone"))):
        assert Path.cwd().is_dir()


@pytest.mark.parametrize("path", ["json.no_such", "no_such.f", "evaluate", "json.__name__", ""])
def test_path_of_no_function_is_bad_input(path: str) -> None:
    with pytest.raises(ConfigError, match=r"promotion\.evaluate="):
        load_function("promotion.evaluate", path)


def test_config_of_a_trial_is_that_of_the_recipe_resolved(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        "lr: 0.1\n"
        "recipe:\n"
        "  config: {lr: '${lr}', number: '${hydra:job.num}', folder: '${hydra:runtime.cwd}'}\n"
    )
    (tmp_path / "hydra.yaml").write_text(
        "hydra:\n  env: {added: by Hydra}\n  job: {num: 3}\n  runtime: {cwd: where/it/started}\n"
    )
    config = trial_config(tmp_path / "config.yaml")
    assert config == {"lr": 0.1, "number": 3, "folder": "where/it/started"}


def test_config_of_an_app_without_a_recipe_is_all_of_it(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("model: {width: 2}\nlr: 0.1\n")
    assert trial_config(path) == {"model": {"width": 2}, "lr": 0.1}


@pytest.mark.parametrize("text", ["a: ${missing}\n", "a: [\n", "- 1\n"])
def test_config_that_cannot_be_used_is_bad_input(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        trial_config(path)
