"""heats as a package: what a wheel and an editable install give to somebody else's Hydra app.

Each environment is a new virtual environment that sees the libraries of the running one, so that
nothing large is installed again. A `.pth` file adds their folder to the path, and Python does not
read the `.pth` files that lie in a folder added so: the editable install of heats in the running
environment stays invisible.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).parents[2]

APP = """
import json
import sys

import hydra


@hydra.main(version_base=None, config_path=None)
def main(cfg):
    import heats.config
    from hydra_plugins.heats_sweeper import heats_sweeper

    print(json.dumps({
        "heats": heats.config.__file__,
        "plugin": heats_sweeper.__file__,
        "loaded": sorted({"ray", "torch", "optuna", "mlflow"} & set(sys.modules)),
    }))


if __name__ == "__main__":
    main()
"""


@dataclass(frozen=True)
class Environment:
    """A virtual environment, and beside it a Hydra app that knows nothing of heats."""

    root: Path
    source: Path

    def run(self, *command: str) -> str:
        """What a program of the environment's `bin` prints, run in the app's folder."""
        clean = {
            name: value
            for name, value in os.environ.items()
            if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PIP_TARGET", "PIP_PREFIX")
        }
        done = subprocess.run(
            [self.root / "bin" / command[0], *command[1:]],
            cwd=self.root.parent,
            env=clean,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def run_app(self, *arguments: str) -> str:
        """What the foreign Hydra app prints."""
        return self.run("python", "app.py", *arguments)


def pip(*arguments: str | Path) -> None:
    """Run the running environment's pip without the network."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", *arguments],
        env={**os.environ, "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from the working tree."""
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, REPO)
    (built,) = folder.glob("heats-*.whl")
    return built


@pytest.fixture(scope="module", params=["wheel", "editable"])
def environment(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Environment:
    """A new environment with heats installed from a wheel, or editable from a copy of the sources.

    A copy, so that what is imported cannot be mistaken for the running environment's own install.
    """
    folder = tmp_path_factory.mktemp(request.param)
    root = folder / "env"
    venv.create(root, symlinks=True)
    (site,) = root.glob("lib/python*/site-packages")
    base = sysconfig.get_paths()
    (site / "base.pth").write_text(f"{base['purelib']}\n{base['platlib']}\n")
    (folder / "app.py").write_text(APP)
    if request.param == "wheel":
        source, what = site, [request.getfixturevalue("wheel")]
    else:
        copy = folder / "copy"
        copy.mkdir()
        shutil.copytree(REPO / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(REPO / name, copy)
        source, what = copy / "src", ["--editable", copy]
    # --ignore-installed: pip also sees the running environment's heats, and must leave it alone.
    options = ["--no-deps", "--no-build-isolation", "--ignore-installed"]
    pip("--python", root / "bin" / "python", "install", *options, *what)
    return Environment(root, source)


def test_wheel_holds_package_plugin_and_licence_only(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names} == {
        "heats",
        "hydra_plugins",
        f"{wheel.name.split('-py')[0]}.dist-info",
    }
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    templates = REPO / "src/heats/templates"
    files = {path.relative_to(templates.parent) for path in templates.rglob("*") if path.is_file()}
    assert {f"heats/{path.as_posix()}" for path in files} <= set(names)
    # An __init__.py there would hide every other Hydra plugin on the machine.
    assert "hydra_plugins/__init__.py" not in names


def test_hydra_lists_the_plugin(environment: Environment) -> None:
    printed = environment.run_app("--info", "plugins")
    assert re.search(r"Sweeper:\s.*\bHeatsSweeper\b", printed, re.DOTALL), printed


def test_foreign_app_composes_the_sweeper(environment: Environment) -> None:
    printed = environment.run_app(
        "hydra/sweeper=heats", "--cfg", "hydra", "--package", "hydra.sweeper"
    )
    assert "_target_: hydra_plugins.heats_sweeper.heats_sweeper.HeatsSweeper" in printed
    assert "min_resource: 1" in printed


def test_foreign_app_loads_the_installed_copy_and_nothing_heavy(environment: Environment) -> None:
    seen: dict[str, Any] = json.loads(environment.run_app())
    assert Path(seen["heats"]).is_relative_to(environment.source)
    assert Path(seen["plugin"]).is_relative_to(environment.source)
    assert seen["loaded"] == []


def test_heats_command_is_installed(environment: Environment) -> None:
    assert "status" in environment.run("heats", "--help")
