"""Data that every trial needs, built once for a node: in files that all its processes map.

A file is mapped anew at each call and written to by nobody (a change that a trial makes to a mapped
array is its own), so nothing leaks from one trial into the next.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from heats.locks import FileLock

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

_VERSION = 1
_BUILD_LIMIT_S = 24 * 3600.0
_KEY, _DATASET, _TABLE, _TENSORS, _ARRAYS = "key.txt", "dataset", "table.arrow", "tensors.pt", "npy"


def cached(key: Any, build: Callable[[], T], *, folder: Path | None = None) -> T:
    """What `build()` gives, which is called once for a node, whoever asks first.

    It may be a `datasets.Dataset` or `DatasetDict`, a `pyarrow.Table`, an array or a mapping of
    names to arrays, or what `torch.save` takes and `torch.load(weights_only=True)` gives back:
    tensors, and lists, tuples and mappings of them.

    Args:
        key: Whatever the content depends on: names, versions, lengths. Something that JSON can
            hold, or whose `repr` tells all. The source code of `build` is part of it anyway.
        build: Makes the content; where it raises, nothing is kept.
        folder: Where the files go; by default `heats` in the user's cache folder.

    Raises:
        TypeError: `build` gave something else. Keep it by `functools.cache`, for one process.
    """
    path = (folder or cache_dir()) / _digest(key, build)
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Ranks and lanes ask at the same time: one builds, the others wait for it.
        with FileLock(path.with_name(f"{path.name}.lock"), wait_s=_BUILD_LIMIT_S):
            if not path.exists():
                _store(build(), key, path)
    value: T = _load(path)
    return value


def cache_dir() -> Path:
    """The folder `heats` in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base, "heats")


def _digest(key: Any, build: Callable[[], Any]) -> str:
    try:
        source = inspect.getsource(build)
    except (OSError, TypeError):  # Of a notebook's cell, or a class.
        source = getattr(build, "__qualname__", "")
    told = json.dumps([_VERSION, key, source], sort_keys=True, default=repr)
    return hashlib.sha256(told.encode()).hexdigest()[:32]


def _store(value: Any, key: Any, path: Path) -> None:
    """Write a value beside its place, and move it there once it is whole."""
    draft = path.with_name(f"{path.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)  # Of a process that died while it built.
    draft.mkdir()
    try:
        _write(value, draft)
        (draft / _KEY).write_text(f"{key!r}\n", encoding="utf-8")
        for file in draft.rglob("*"):
            if file.is_file():
                with file.open("rb") as opened:
                    os.fsync(opened.fileno())
        draft.rename(path)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _write(value: Any, folder: Path) -> None:
    import numpy as np

    datasets, pyarrow = sys.modules.get("datasets"), sys.modules.get("pyarrow")
    if datasets and isinstance(value, (datasets.Dataset, datasets.DatasetDict)):
        value.save_to_disk(folder / _DATASET)
    elif pyarrow and isinstance(value, pyarrow.Table):
        with pyarrow.OSFile(str(folder / _TABLE), "wb") as sink:
            with pyarrow.ipc.new_file(sink, value.schema) as writer:
                writer.write_table(value)
    elif isinstance(value, np.ndarray):
        _write({"": value}, folder)
    elif isinstance(value, dict) and all(isinstance(each, np.ndarray) for each in value.values()):
        (folder / _ARRAYS).mkdir()
        names = list(value)
        (folder / _ARRAYS / "names.json").write_text(json.dumps(names), encoding="utf-8")
        for index, name in enumerate(names):
            np.save(folder / _ARRAYS / f"{index}.npy", value[name], allow_pickle=False)
    else:
        _write_tensors(value, folder / _TENSORS)


def _write_tensors(value: Any, file: Path) -> None:
    import torch

    torch.save(value, file)
    try:
        torch.load(file, mmap=True, weights_only=True)
    except Exception as exc:
        msg = (
            f"heats.cached cannot keep a {type(value).__qualname__}: give a Dataset, a Table,"
            " arrays or tensors; keep anything else by functools.cache, for one process."
        )
        raise TypeError(msg) from exc


def _load(path: Path) -> Any:
    if (path / _DATASET).exists():
        import datasets

        return datasets.load_from_disk(str(path / _DATASET))
    if (path / _TABLE).exists():
        import pyarrow as pa

        with pa.memory_map(str(path / _TABLE)) as source:
            return pa.ipc.open_file(source).read_all()
    if (path / _ARRAYS).exists():
        import numpy as np

        names = json.loads((path / _ARRAYS / "names.json").read_text(encoding="utf-8"))
        arrays = {
            name: np.load(path / _ARRAYS / f"{index}.npy", mmap_mode="c")
            for index, name in enumerate(names)
        }
        return arrays[""] if names == [""] else arrays
    import torch

    return torch.load(path / _TENSORS, mmap=True, weights_only=True)
