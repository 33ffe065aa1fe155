"""What is removed after a stop, and what is not."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from heats.lane.leftovers import TemporaryFolders


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "weights").touch()
    return folder


def test_folder_of_the_trial_goes_and_those_of_others_stay(temporary: Path, tmp_path: Path) -> None:
    older = made(temporary / "older")
    folders = TemporaryFolders()
    own, beside = made(temporary / "own" / "3"), made(temporary / "own" / "2")
    in_older, elsewhere = made(older / "new"), made(tmp_path / "elsewhere")

    for folder in (own, older, in_older, elsewhere, temporary):
        folders.remove(str(folder))

    assert not own.exists()
    assert all(Path(folder, "weights").exists() for folder in (beside, older, in_older, elsewhere))


def test_folder_that_the_trial_has_removed_itself_is_no_error(temporary: Path) -> None:
    folders = TemporaryFolders()
    folders.remove(str(temporary / "gone"))


def test_folder_of_a_trial_that_made_its_own_place_for_temporary_files_goes(
    temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = TemporaryFolders()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own = made(tmp_path / "own")

    folders.remove(str(own))

    assert not own.exists()
    assert temporary.exists()
