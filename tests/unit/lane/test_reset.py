from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
import warnings
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import torch.distributed as dist

from heats.lane.reset import RankState, output_to, seed_rank

if TYPE_CHECKING:
    from pathlib import Path


def draw() -> list[float]:
    return [random.random(), np.random.rand(), torch.rand(1).item()]  # noqa: NPY002 - the global one


def test_seeded_ranks_draw_the_same_and_others_do_not() -> None:
    draws = []
    for seed in (5, 5, 6, 2**32 + 5):
        seed_rank(seed)
        draws.append(draw())
    assert draws[0] == draws[1]
    assert draws[0] != draws[2]
    assert draws[0][0] != draws[3][0]


def test_what_a_turn_changes_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEATS_TEST_KEPT", "1")
    monkeypatch.setenv("HEATS_TEST_REMOVED", "1")
    state = RankState()
    root = logging.getLogger()
    handlers, level, cwd = list(root.handlers), root.level, os.getcwd()
    path, argv = list(sys.path), list(sys.argv)
    filters, threads = list(warnings.filters), torch.get_num_threads()

    os.chdir(tmp_path)
    os.environ.update(HEATS_TEST_KEPT="2", HEATS_TEST_NEW="1")
    del os.environ["HEATS_TEST_REMOVED"]
    sys.path.insert(0, "somewhere")
    sys.argv = ["other"]
    handler = logging.FileHandler(tmp_path / "log")
    root.addHandler(handler)
    if handlers:
        root.removeHandler(handlers[0])
    root.setLevel(level + 5)
    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(threads + 1)
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("medium")
    torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark

    state.restore()
    assert os.getcwd() == cwd
    assert os.environ["HEATS_TEST_KEPT"] == os.environ["HEATS_TEST_REMOVED"] == "1"
    assert "HEATS_TEST_NEW" not in os.environ
    assert (sys.path, sys.argv) == (path, argv)
    assert sorted(map(id, root.handlers)) == sorted(map(id, handlers))
    assert handler.stream is None
    assert root.level == level
    assert logging.getLogger("heats").isEnabledFor(logging.ERROR)
    assert list(warnings.filters) == filters
    assert torch.is_grad_enabled()
    assert torch.get_default_dtype() is torch.float32
    assert torch.get_num_threads() == threads
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cudnn.benchmark


def test_folder_that_is_gone_cannot_be_gone_back_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    state = RankState()
    folder.rmdir()
    with pytest.raises(FileNotFoundError):
        state.restore()


def test_output_of_python_and_of_children_goes_to_the_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "job" / "rank-0.log"
    print("before")  # noqa: T201
    for number in range(2):
        with output_to(log):
            print("printed", number)  # noqa: T201
            print("complained", number, file=sys.stderr)  # noqa: T201
            sys.stdout.flush()
            os.write(1, b"written\n")
            subprocess.run(["/bin/echo", "child"], check=True)
    print("after")  # noqa: T201
    lines = log.read_text(encoding="utf-8").splitlines()
    once = [["printed 0", "complained 0"], ["printed 1", "complained 1"]]
    assert lines == [*once[0], "written", "child", *once[1], "written", "child"]
    assert capfd.readouterr().out.splitlines() == ["before", "after"]


def test_output_returns_to_the_terminal_after_an_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    streams = sys.stdout, sys.stderr
    with pytest.raises(ZeroDivisionError), output_to(tmp_path / "log"):
        raise ZeroDivisionError
    assert (sys.stdout, sys.stderr) == streams
    os.write(1, b"here\n")
    assert capfd.readouterr().out == "here\n"


def test_file_that_the_turn_closed_is_no_error(tmp_path: Path) -> None:
    with output_to(tmp_path / "log") as log:
        log.close()


def test_process_group_that_a_trial_destroyed_cannot_be_put_back(tmp_path: Path) -> None:
    store = f"file://{tmp_path / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    state = RankState()
    dist.destroy_process_group()
    with pytest.raises(RuntimeError, match="process group"):
        state.restore()
