from __future__ import annotations

import importlib
import json
import logging
import os
import pickle
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf, open_dict

from heats.errors import ConfigError
from heats.lane.reset import RankState
from heats.lane.task import TaskRef, run_task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from hydra.core.config_loader import ConfigLoader
    from omegaconf import DictConfig

APP = """
import os, pickle, sys
from enum import Enum

import hydra

class Color(Enum):
    red = 1

@hydra.main(version_base="1.3", config_path=None)
def main(config):
    return float(Color.red in (Color.red,)) + config.lr

IS_AFTER = False
if __name__ == "__main__":
    SEEN = list(sys.argv)
    if os.environ.get("LAUNCH"):
        from heats.lane.task import TaskRef
        with open("ref.pickle", "wb") as file:
            pickle.dump(TaskRef.of_running_program(main), file)
    else:
        main()
        IS_AFTER = True
        raise SystemExit("ran on")
"""
WORKER = """
import json, os, pickle, sys

with open(sys.argv[1], "rb") as file:
    ref = pickle.load(file)
loaded = {name for name in ("ray", "torch") if name in sys.modules}
function = ref.load()
main = sys.modules["__main__"]
print(json.dumps({
    "value": function(type("Config", (), {"lr": 0.5})),
    "is_same_class": function.__globals__["Color"] is main.Color,
    "travels": pickle.loads(pickle.dumps(main.Color.red)) is main.Color.red,
    "seen": main.SEEN,
    "is_after": main.IS_AFTER,
    "cwd": os.getcwd(),
    "package": main.__package__,
    "heavy": sorted({"ray", "torch"} & set(sys.modules)),
}))
"""


def python(*args: str, cwd: Path, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, *args],
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("file", "program", "package"),
    [
        ("app.py", ["app.py"], None),
        ("sub/app.py", ["sub/app.py"], None),
        ("pkg/app.py", ["-m", "pkg.app"], "pkg"),
        ("pkg/__main__.py", ["-m", "pkg"], "pkg"),
        ("folder/__main__.py", ["folder"], None),
    ],
)
def test_worker_runs_the_program_up_to_hydra(
    tmp_path: Path, file: str, program: list[str], package: str | None
) -> None:
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(APP, encoding="utf-8")
    if program[0] == "-m":
        (path.parent / "__init__.py").touch()
    python(*program, "lr=1,2", cwd=tmp_path, LAUNCH="1")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    told = json.loads(python("-c", WORKER, str(tmp_path / "ref.pickle"), cwd=elsewhere))
    argv0 = program[0] if program[0] != "-m" else str(path)
    assert told == {
        "value": 1.5,
        "is_same_class": True,
        "travels": True,
        "seen": [argv0, "lr=1,2"],
        "is_after": False,
        "cwd": str(tmp_path),
        "package": package,
        "heavy": [],
    }


@pytest.fixture
def process_state() -> Iterator[None]:
    """What `load` changes, put back."""
    state, main = RankState(max_memory_growth_mib=1024), sys.modules["__main__"]
    yield
    sys.modules["__main__"] = main
    state.restore()


def ref_to(script: Path) -> TaskRef:
    return TaskRef(str(script), None, argv=(str(script),), cwd=str(script.parent))


@pytest.mark.usefixtures("process_state")
def test_program_that_never_starts_hydra_is_an_error(tmp_path: Path) -> None:
    script = tmp_path / "app.py"
    script.write_text("x = 1\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"app\.py ended without starting Hydra"):
        ref_to(script).load()


@pytest.mark.usefixtures("process_state")
def test_what_the_program_raises_is_raised(tmp_path: Path) -> None:
    script = tmp_path / "app.py"
    script.write_text("import no_such_module\n", encoding="utf-8")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        ref_to(script).load()


@pytest.mark.usefixtures("process_state")
def test_module_that_cannot_be_found_again_is_an_error(tmp_path: Path) -> None:
    ref = TaskRef(None, "no_such_module", cwd=str(tmp_path))
    with pytest.raises(ConfigError, match="no_such_module"):
        ref.load()


def double(config: DictConfig) -> float:
    return 2.0 * float(config.lr)


@pytest.mark.usefixtures("process_state")
def test_function_of_a_notebook_travels_by_value(tmp_path: Path) -> None:
    ref = TaskRef(None, None, pickle.dumps(double), cwd=str(tmp_path))
    assert ref.load() is double


# --- one job ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConfigLoader]:
    folder = tmp_path_factory.mktemp("conf")
    text = """
        lr: 0.5
        twice: ${lr}${lr}
        number: ${hydra:job.num}
        model: {lr: "${lr}", size: 1}
        hydra: {job: {env_set: {HEATS_TEST_LR: "${lr}"}}}
    """
    (folder / "config.yaml").write_text(textwrap.dedent(text), encoding="utf-8")
    with initialize_config_dir(str(folder), version_base="1.3"):
        yield GlobalHydra.instance().config_loader()


@pytest.fixture
def job(
    loader: ConfigLoader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., float | None]]:
    """Runs a task function as trial 3 in `<current directory>/job`."""
    monkeypatch.chdir(tmp_path)
    state = RankState(max_memory_growth_mib=1024)

    def run(
        function: Callable[[DictConfig], Any], *overrides: str, is_chief: bool = True
    ) -> float | None:
        config = loader.load_configuration("config", list(overrides), RunMode.MULTIRUN)
        with open_dict(config):
            config.hydra.job.num, config.hydra.job.id = 3, "3"
        job_dir = str(tmp_path / "job")
        try:
            return run_task(function, pickle.dumps(config), job_dir=job_dir, is_chief=is_chief)
        finally:
            state.restore()

    yield run
    state.restore()


@pytest.mark.parametrize(
    ("returned", "number"),
    [(0.5, 0.5), (2, 2.0), ("1e-3", 1e-3), (None, None), ("good", None), ({"loss": 1.0}, None)],
)
def test_returned_number_is_the_jobs(
    job: Callable[..., float | None], returned: Any, number: float | None
) -> None:
    assert job(lambda config: returned) == number


def test_task_sees_its_own_config_without_hydras_node(job: Callable[..., float | None]) -> None:
    seen: dict[str, Any] = {}

    def task(config: DictConfig) -> None:
        seen.update(OmegaConf.to_container(config, resolve=True))  # type: ignore[arg-type]

    job(task, "lr=0.25")
    model = {"lr": 0.25, "size": 1}
    assert seen == {"lr": 0.25, "twice": "0.250.25", "number": 3, "model": model}


def test_hydra_knows_the_running_job(job: Callable[..., float | None], tmp_path: Path) -> None:
    seen: list[Any] = []

    def task(config: DictConfig) -> None:
        hydra = HydraConfig.get()
        seen.extend([hydra.job.num, hydra.runtime.output_dir, os.environ["HEATS_TEST_LR"]])

    job(task)
    assert seen == [3, str(tmp_path / "job"), "0.5"]
    assert "HEATS_TEST_LR" not in os.environ


@pytest.mark.parametrize(("override", "where"), [("true", "job"), ("false", ".")])
def test_job_runs_in_its_folder_only_where_hydra_is_told_so(
    job: Callable[..., float | None], tmp_path: Path, override: str, where: str
) -> None:
    seen: list[str] = []
    job(lambda config: seen.append(os.getcwd()), f"hydra.job.chdir={override}")
    assert seen == [str(tmp_path / where) if where != "." else str(tmp_path)]


@pytest.mark.parametrize("is_chief", [True, False])
def test_only_the_chief_writes_hydras_files(
    job: Callable[..., float | None], tmp_path: Path, is_chief: bool
) -> None:
    job(lambda config: logging.getLogger("train").info("told"), "lr=0.25", is_chief=is_chief)
    files = sorted(p.name for p in (tmp_path / "job").rglob("*") if p.is_file())
    if not is_chief:
        assert files == []
        return
    assert [name for name in files if name.endswith(".yaml")] == [
        "config.yaml",
        "hydra.yaml",
        "overrides.yaml",
    ]
    folder = tmp_path / "job" / ".hydra"
    assert "lr: 0.25" in (folder / "config.yaml").read_text(encoding="utf-8").splitlines()
    for name in ("config.yaml", "hydra.yaml"):
        text = (folder / name).read_text(encoding="utf-8")
        assert text == OmegaConf.to_yaml(OmegaConf.load(folder / name))  # As Hydra writes it.
    assert OmegaConf.load(folder / "overrides.yaml") == ["lr=0.25"]
    (log,) = (tmp_path / "job").glob("*.log")
    assert "[train][INFO] - told" in log.read_text(encoding="utf-8")


def test_what_the_task_raises_is_raised_and_hydra_is_left_as_it_was(
    job: Callable[..., float | None],
) -> None:
    def task(config: DictConfig) -> None:
        raise KeyError("tokens")

    before = HydraConfig.initialized()
    with pytest.raises(KeyError, match="tokens"):
        job(task)
    assert HydraConfig.initialized() == before
    assert "HEATS_TEST_LR" not in os.environ


def test_resolvers_of_modules_stay_and_those_of_the_program_go(
    job: Callable[..., float | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [
        "from omegaconf import OmegaConf",
        "OmegaConf.register_new_resolver('of_module', lambda: 7)",
    ]
    (tmp_path / "late_library.py").write_text("\n".join(lines), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)

    def of_program() -> int:
        return 8

    of_program.__module__ = "__main__"

    def task(_: DictConfig) -> float:
        importlib.import_module("late_library")

        OmegaConf.register_new_resolver("of_program", of_program)  # Twice would be an error.
        return float(OmegaConf.create({"a": "${of_module:}"}).a)

    assert [job(task), job(task)] == [7.0, 7.0]
    assert not OmegaConf.has_resolver("of_program")
    OmegaConf.clear_resolver("of_module")
