from __future__ import annotations

import logging
import os
import random
import sys
import warnings
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import torch.distributed as dist

from heats.lane.reset import RankState, seed_rank

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
    state = RankState(max_memory_growth_mib=1024)
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

    assert state.restore() == []
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
    state = RankState(max_memory_growth_mib=1024)
    folder.rmdir()
    assert state.restore() == [f"the directory {folder} is gone: No such file or directory"]


def test_process_group_that_a_trial_destroyed_cannot_be_put_back(tmp_path: Path) -> None:
    store = f"file://{tmp_path / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    state = RankState(max_memory_growth_mib=1024)
    dist.destroy_process_group()
    assert state.restore() == ["the process group that the lane's trials share was destroyed"]
