from __future__ import annotations

import importlib
import json
from typing import TYPE_CHECKING

from heats.lane.loaded import LoadedFiles

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_only_the_users_own_files_are_told_and_each_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "loaded_early.py").touch()
    (tmp_path / "loaded_late.py").touch()
    importlib.import_module("loaded_early")
    files = LoadedFiles()
    first = files.new()
    assert str(tmp_path / "loaded_early.py") in first
    assert json.__file__ not in first
    assert not any("site-packages" in file for file in first)
    assert files.new() == frozenset()
    importlib.import_module("loaded_late")
    assert files.new() == {str(tmp_path / "loaded_late.py")}
