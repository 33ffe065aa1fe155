"""Bad command lines: one message that names the key, exit code 2, and nothing created.

They run in this process, because each would take a second in one of its own; the last test shows
that it makes no difference.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

# The command line, and what its message must have.
BAD = {
    "broken grammar": (["lr=interval(1e-5"], "lr=interval(1e-5"),
    "empty choice": (["-m", "lr=choice()"], "lr"),
    "reversed bounds": (["-m", "lr=interval(1,0.1)"], "lr"),
    "bound that is not a number": (["-m", "lr=interval(0.1,nan)"], "lr"),
    "step of zero": (["-m", "batch_size=range(1,9,0)"], "batch_size"),
    "logarithm of zero": (["-m", "lr=tag(log,interval(0,1))"], "lr"),
    "sweep without trials": (["n_trials=0"], "n_trials"),
    "less than no trials": (["n_trials=-1"], "n_trials"),
    "number in words": (["n_trials=ten"], "n_trials"),
    "misspelt key": (["-m", "lrr=1e-3,1e-2"], "'lr'"),
    "misspelt key of a section": (["asha.reduction_facto=3"], "reduction_factor"),
    "unknown recipe": (["recipe=digit"], "digits"),
    "unknown sweep": (["sweeps=digits_ash"], "digits_asha"),
    "maximum below minimum": (["asha.max_resource=1", "asha.min_resource=2"], "max_resource"),
    "reduction by one": (["asha.reduction_factor=1"], "asha.reduction_factor=1"),
    "unknown scheduler": (["scheduler=hyperband"], "scheduler"),
    "unknown direction": (["objective.direction=up"], "objective.direction"),
    "more CPUs than there are": (["scaling.num_workers=4096"], "scaling.num_workers=4096"),
    "more GPUs than there are": (
        ["scaling=gpu", "scaling.resources_per_worker.GPU=4096"],
        "scaling.",
    ),
    "resources that are no number": (
        ["scaling.resources_per_worker={CPU:two}"],
        "scaling.resources_per_worker.CPU='two'",
    ),
    "folder that cannot be written": (["tracking.root=/proc/heats"], "tracking.root"),
    "name with a way up": (["study_name=../up"], "../up"),
    "name with a slash": (["study_name=a/b"], "a/b"),
    "name with a newline": (['study_name="a\\nb"'], "study"),
    "name that turns the text around": (['study_name="a\u202eb"'], "study"),
    "search over a setting of the sweep": (["-m", "asha.reduction_factor=2,3"], "asha"),
    "grid over an interval": (
        ["-m", "hydra/sweeper/sampler=grid", "lr=interval(0,1)"],
        "lr",
    ),
    "resume of nothing": (["hydra.sweeper.resume=true", "study_name=never"], "never"),
    "huge value": (["n_trials=" + "x" * 5000], "n_trials"),
}


def listing(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_message_and_leaves_nothing(
    case: str,
    project_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    arguments, expected = BAD[case]
    before = listing(project_dir)
    monkeypatch.setattr(sys, "argv", ["sweep.py", *arguments])
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    with pytest.raises(SystemExit) as exit_info:
        runpy.run_path("sweep.py", run_name="__main__")
    output, error = capfd.readouterr()
    assert exit_info.value.code == 2, error
    assert "Traceback" not in error
    assert expected in error
    assert output == ""
    assert len(error) < 2000
    assert listing(project_dir) == before


def test_bad_input_of_a_process_is_the_same(project_dir: Path) -> None:
    before = listing(project_dir)
    command = [sys.executable, "sweep.py", "asha.reduction_factor=1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "asha.reduction_factor=1 is not valid: give 2 or more\n"
    assert listing(project_dir) == before


def test_full_error_brings_the_traceback_back(project_dir: Path) -> None:
    command = [sys.executable, "sweep.py", "asha.reduction_factor=1"]
    full = {**os.environ, "HYDRA_FULL_ERROR": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=full)
    assert done.returncode != 0
    assert "Traceback" in done.stderr
    assert "ConfigError" in done.stderr
