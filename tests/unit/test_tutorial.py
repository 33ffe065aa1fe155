"""The tutorial's files are valid, and its scripts do by themselves what it says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tests.tutorial import TUTORIAL, Step, steps, write
from typer.main import get_command

from heats.cli import app

# Runs each train.py in one process, so that torch is imported once. What the last one reports is
# what promotion.py and predictor.py of the same folder have to make of its checkpoint.
RUN = """
import json, os, runpy, shutil, sys
import heats

reports = []

def report(metrics, checkpoint=None):
    reports.append(metrics)
    if checkpoint is not None:
        shutil.copytree(checkpoint.path, "checkpoint", dirs_exist_ok=True)

heats.report = report
for folder in sys.argv[1:]:
    os.chdir(folder)
    sys.path[0] = folder
    sys.argv = ["train.py", *["epochs=1"] * (not folder.endswith("1"))]
    runpy.run_path("train.py", run_name="__main__")

import mlflow
models = []
mlflow.models.set_model = models.append
runpy.run_path("predictor.py")
from types import SimpleNamespace
import promotion
from digits import load_data
context = SimpleNamespace(artifacts={"checkpoint": "checkpoint"})
models[0].load_context(context)
_, (images, labels) = load_data()
right = models[0].predict(context, images.numpy()) == labels.numpy()
print(json.dumps({
    "reports": reports,
    "evaluated": promotion.evaluate({"hidden": 64}, "checkpoint"),
    "predicted": right.mean(),
    "example": list(promotion.example({}).shape),
}))
"""


@pytest.mark.parametrize("step", steps(), ids=lambda step: step.heading)
def test_every_file_can_be_read(step: Step) -> None:
    for path, text in step.files.items():
        if path.endswith(".py"):
            compile(text, path, "exec")
        else:
            assert isinstance(yaml.safe_load(text), dict)


def test_every_block_has_its_file_and_every_command_is_one_of_heats() -> None:
    blocks = re.findall(r"^```(?:python|yaml)$", TUTORIAL.read_text(), flags=re.M)
    assert sum(len(step.files) for step in steps()) == len(blocks)
    verbs = set(get_command(app).commands)  # type: ignore[attr-defined]
    for command in (command for step in steps() for command in step.commands):
        program, first = command.split()[:2]
        assert (first in verbs) if program == "heats" else any(first in s.files for s in steps())


@pytest.mark.timeout(240)  # A process of its own imports torch, Ray Train and MLflow.
def test_scripts_of_all_steps_run_by_themselves(tmp_path: Path) -> None:
    files: dict[str, str] = {}
    folders = []
    for number, step in enumerate(steps()[:8], start=1):
        files |= step.files
        if "train.py" in step.files or number == 8:
            folders.append(tmp_path / str(number))
            folders[-1].mkdir()
            write(files, folders[-1])
    done = subprocess.run(
        [sys.executable, "-c", RUN, *map(str, folders)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert [report["epoch"] for report in told["reports"]] == [1, 1, 1, 1]  # Of steps 4, 5, 6, 8.
    last = told["reports"][-1]["val_accuracy"]
    assert last > 0.5
    assert told["evaluated"] == {"val_accuracy": last}
    assert told["predicted"] == last
    assert told["example"] == [5, 64]
