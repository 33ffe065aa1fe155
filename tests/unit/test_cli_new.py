"""`heats new`: what it writes, and what it refuses."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from heats.cli import app
from heats.cli_new import frameworks

FILES = {
    ".gitignore",
    "README.md",
    "conf/config.yaml",
    "conf/sweeps/asha.yaml",
    "predictor.py",
    "pyproject.toml",
    "requirements.txt",
    "tests/test_train.py",
    "train.py",
}

pytestmark = pytest.mark.usefixtures("empty_dir")


@pytest.fixture
def empty_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def new(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["new", *arguments])


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def ruff(*arguments: str, folder: Path) -> str:
    """What ruff complains about, with the settings of the project and of nobody else."""
    command = [sys.executable, "-m", "ruff", *arguments, "--no-cache", "."]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_project_is_written_and_what_comes_next_is_told() -> None:
    result = new("my-digits")
    assert result.exit_code == 0, result.stderr
    assert files_in(Path("my-digits")) == FILES
    assert [path.name for path in Path().iterdir()] == ["my-digits"]
    for word in ("my-digits has", "cd my-digits", "pytest", "python train.py -m", "promote"):
        assert word in result.stdout


def test_name_is_that_of_experiment_and_model() -> None:
    new("faces")
    config = yaml.safe_load(Path("faces/conf/config.yaml").read_text())
    assert config["hydra"]["job"]["name"] == "faces"
    assert config["hydra"]["sweeper"]["promotion"]["model"] == "faces"
    assert Path("faces/README.md").read_text().startswith("# faces\n")


def test_nothing_of_the_templates_is_left() -> None:
    new("digits")
    for path in FILES:
        text = Path("digits", path).read_text()
        assert "{{" not in text
        assert "}}" not in text
        assert text.endswith("\n")


def test_place_can_be_chosen(tmp_path: Path) -> None:
    (tmp_path / "some where").mkdir()
    result = new("digits", "--into", "some where")
    assert files_in(tmp_path / "some where/digits") == FILES
    assert "cd 'some where/digits'" in result.stdout


def test_empty_folder_is_filled() -> None:
    Path("digits").mkdir()
    assert new("digits").exit_code == 0
    assert files_in(Path("digits")) == FILES


def test_folder_is_as_open_as_others_are() -> None:
    Path("other").mkdir()
    new("digits")
    assert Path("digits").stat().st_mode == Path("other").stat().st_mode


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["a/b"], "NAME='a/b' is not valid"),
        ([".."], "NAME='..' is not valid"),
        (["2fast"], "beginning with a letter"),
        (["with space"], "Use letters"),
        (["name\n"], "is not valid"),
        (["ümlaut"], "is not valid"),
        (["class"], "word of Python's"),
        (["x" * 65], "longer than 64"),
        (["digits", "--framework", "pytorhc"], "Did you mean 'pytorch'"),
        (["digits", "--into", "nowhere"], "There is no folder nowhere"),
    ],
)
def test_bad_input_is_one_message_and_nothing_is_made(
    arguments: list[str], said: str, empty_dir: Path
) -> None:
    result = new(*arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""
    assert list(empty_dir.iterdir()) == []


def test_full_folder_is_left_alone(empty_dir: Path) -> None:
    Path("digits").mkdir()
    Path("digits/mine.txt").write_text("mine")
    result = new("digits")
    assert result.exit_code == 2
    assert "digits exists already, and nothing is overwritten" in result.stderr
    assert files_in(empty_dir) == {"digits/mine.txt"}


@pytest.mark.parametrize("what", ["file", "link"])
def test_file_or_link_of_that_name_is_left_alone(what: str, empty_dir: Path) -> None:
    Path("elsewhere").mkdir()
    if what == "file":
        Path("digits").write_text("mine")
    else:
        Path("digits").symlink_to("elsewhere")
    assert new("digits").exit_code == 2
    assert {path.name for path in empty_dir.iterdir()} == {"digits", "elsewhere"}
    assert not any(Path("elsewhere").iterdir())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_folder_that_cannot_be_written_is_named() -> None:
    Path("locked").mkdir(mode=0o500)
    result = new("digits", "--into", "locked")
    assert result.exit_code == 2
    assert "locked/digits cannot be written: Permission denied" in result.stderr


def test_disk_that_fails_half_way_leaves_nothing(
    empty_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_text, written = Path.write_text, []

    def fails_at_the_third(path: Path, *arguments: str, **options: str) -> int:
        written.append(path)
        if len(written) == 3:
            raise OSError(28, "No space left on device")
        return write_text(path, *arguments, **options)

    monkeypatch.setattr(Path, "write_text", fails_at_the_third)
    result = new("digits")
    assert result.exit_code == 2
    assert result.stderr == (
        "heats: digits cannot be written: No space left on device. "
        "Give a folder that can: --into.\n"
    )
    assert list(empty_dir.iterdir()) == []


@pytest.mark.parametrize("framework", frameworks())
def test_project_is_clean_and_imports_only_what_it_requires(
    framework: str, empty_dir: Path
) -> None:
    new("digits", "--framework", framework)
    project = empty_dir / "digits"
    assert ruff("check", folder=project) == ""
    assert ruff("format", "--diff", folder=project) == ""
    imported: set[str] = set()
    for path in project.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {each.name.partition(".")[0] for each in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(str(node.module).partition(".")[0])
    lines = (project / "requirements.txt").read_text().splitlines()
    required = {line.partition(">=")[0].partition("[")[0] for line in lines if line[0] != "#"}
    names = {"hydra": "hydra-core", "sklearn": "scikit-learn", "yaml": "pyyaml"}
    foreign = imported - sys.stdlib_module_names - {"train", "heats"}
    assert {names.get(name, name) for name in foreign} == required


@pytest.mark.timeout(240)  # A process of its own imports torch, Ray Train and MLflow.
@pytest.mark.parametrize("framework", frameworks())
def test_its_own_tests_pass_without_ray(framework: str, empty_dir: Path) -> None:
    new("digits", "--framework", framework)
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not sweep", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=empty_dir / "digits", capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed, 1 deselected" in done.stdout
