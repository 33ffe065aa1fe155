"""Content is built once, whole, and shared without leaking."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch

import heats

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Counted:
    """A function that counts its calls."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self.num_calls = 0

    def build(self) -> Any:
        self.num_calls += 1
        return self._value


def rows(value: Any) -> Any:
    return value.to_dict() if isinstance(value, datasets.Dataset) else value.to_pydict()


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (datasets.Dataset.from_dict({"text": ["a", "b"]}), rows),
        (pa.table({"x": [1, 2, 3]}), rows),
        (np.arange(6).reshape(2, 3), np.ndarray.tolist),
        (torch.arange(4, dtype=torch.bfloat16), torch.Tensor.tolist),
        ({"x": np.ones(3), "y/z": np.zeros(2)}, lambda v: {k: a.tolist() for k, a in v.items()}),
        ((torch.ones(2), [torch.zeros(1)]), lambda v: (v[0].tolist(), [v[1][0].tolist()])),
        ({"x": torch.ones(2), "n": 3}, lambda v: (v["x"].tolist(), v["n"])),
    ],
    ids=["dataset", "table", "array", "tensor", "arrays", "tensors", "mapping"],
)
def test_content_is_built_once_and_reads_back(
    value: Any, plain: Callable[[Any], Any], tmp_path: Path
) -> None:
    counted = Counted(value)
    given = [heats.cached("key", counted.build, folder=tmp_path) for _ in range(3)]
    assert counted.num_calls == 1
    for each in given:
        assert type(each) is type(value) or isinstance(each, type(value))
        assert plain(each) == plain(value)


def test_other_keys_are_other_content(tmp_path: Path) -> None:
    keys: list[Any] = ["a", ("a", 1), ("a", 2), {"a": 1, "b": 2}]
    for index, key in enumerate(keys):
        array = heats.cached(key, Counted(np.array([index])).build, folder=tmp_path)
        assert array.tolist() == [index]
    same = heats.cached({"b": 2, "a": 1}, Counted(np.array([9])).build, folder=tmp_path)
    assert same.tolist() == [3]


def test_other_code_is_other_content(tmp_path: Path) -> None:
    first = heats.cached("key", lambda: np.zeros(1), folder=tmp_path)
    second = heats.cached("key", lambda: np.ones(1), folder=tmp_path)
    assert (first.tolist(), second.tolist()) == ([0.0], [1.0])


def test_what_a_trial_does_to_its_array_is_its_own(tmp_path: Path) -> None:
    counted, tensors = Counted(np.zeros(3)), Counted(torch.zeros(3))
    heats.cached("array", counted.build, folder=tmp_path)[:] = 7
    heats.cached("tensor", tensors.build, folder=tmp_path)[:] = 7
    assert heats.cached("array", counted.build, folder=tmp_path).tolist() == [0, 0, 0]
    assert heats.cached("tensor", tensors.build, folder=tmp_path).tolist() == [0, 0, 0]


def test_build_that_raises_or_dies_leaves_nothing_half_made(tmp_path: Path) -> None:
    counted = Counted(np.ones(2))

    def broken() -> np.ndarray[Any, Any]:
        raise OSError("no data")

    with pytest.raises(OSError, match="no data"):
        heats.cached("key", broken, folder=tmp_path)
    assert heats.cached("key", counted.build, folder=tmp_path).tolist() == [1, 1]
    (whole,) = (path for path in tmp_path.iterdir() if path.is_dir())
    (tmp_path / f"{whole.name}.draft").mkdir()
    (tmp_path / f"{whole.name}.draft" / "npy").mkdir()
    whole.rename(tmp_path / "gone")
    assert heats.cached("key", counted.build, folder=tmp_path).tolist() == [1, 1]
    assert counted.num_calls == 2


def test_what_no_file_can_hold_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="cannot keep a Counted"):
        heats.cached("key", lambda: Counted(1), folder=tmp_path)
    assert [path for path in tmp_path.iterdir() if path.suffix != ".lock"] == []


def test_two_processes_at_once_build_once(tmp_path: Path) -> None:
    script = """
        import sys, time
        from pathlib import Path
        import numpy as np
        import heats

        folder = Path(sys.argv[1])

        def build():
            with (folder / "calls").open("a") as file:
                file.write("x")
            time.sleep(1)
            return np.arange(3)

        print(heats.cached("key", build, folder=folder / "cache").tolist())
    """
    file = tmp_path / "script.py"
    file.write_text(textwrap.dedent(script), encoding="utf-8")
    command = [sys.executable, str(file), str(tmp_path)]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) for _ in range(3)
    ]
    assert [each.communicate()[0].strip() for each in running] == ["[0, 1, 2]"] * 3
    assert (tmp_path / "calls").read_text() == "x"
