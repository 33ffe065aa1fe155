from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from tests.fakes import fake_spec
from tests.unit.lane.test_trainable import ScriptedLane

from heats.config import DataConf, Direction, Isolation, LaneConf
from heats.lane.actors import Standing, StandingLane, key_of
from heats.lane.lane import LaneSettings
from heats.lane.task import TaskRef
from heats.trial import LaneShape, Objective

if TYPE_CHECKING:
    from pathlib import Path

SHAPE = LaneShape(1, use_gpu=False, resources_per_worker={"CPU": 1.0})
SETTINGS = LaneSettings(
    sweep_id="heats-1",
    task=TaskRef("train.py", None, argv=("train.py", "lr=1"), cwd="/project"),
    objective=Objective("loss", Direction.minimize),
    pace=None,
    lane=LaneConf(),
    storage_path="lanes",
    tracking_uri="sqlite:///mlflow.db",
    seed=0,
    system_interval_s=None,
)


def standing(loaded_s: float, *files: Path) -> Standing:
    return Standing("key", SHAPE, loaded_s, loaded_s, frozenset(map(str, files)))


def test_lane_is_current_until_a_file_that_it_loaded_is_touched(tmp_path: Path) -> None:
    source = tmp_path / "model.py"
    source.touch()
    assert standing(time.time() + 1, source).is_current
    assert not standing(source.stat().st_ctime - 1, source).is_current
    os.utime(source, (0, 0))  # An old copy put in its place has an old time of change.
    assert not standing(time.time() - 1, source).is_current
    source.unlink()
    assert not standing(time.time() + 1, source).is_current


@pytest.mark.parametrize(
    "other",
    [
        replace(SETTINGS, sweep_id="heats-2", seed=1, tracking_uri="http://localhost:5000"),
        replace(SETTINGS, task=replace(SETTINGS.task, argv=("train.py", "lr=2"))),
    ],
)
def test_sweeps_of_one_program_share_lanes(other: LaneSettings) -> None:
    assert key_of(other) == key_of(SETTINGS) is not None


@pytest.mark.parametrize(
    "other",
    [
        replace(SETTINGS, task=replace(SETTINGS.task, cwd="/elsewhere")),
        replace(SETTINGS, task=replace(SETTINGS.task, script="other.py")),
        replace(SETTINGS, lane=LaneConf(max_memory_growth_mib=1.0)),
        replace(SETTINGS, data=DataConf(datasets={"train": {"_target_": "pkg.dataset"}})),
        replace(SETTINGS, task=replace(SETTINGS.task, pickled=b"notebook")),
    ],
)
def test_sweeps_that_load_other_things_do_not(other: LaneSettings) -> None:
    assert key_of(other) != key_of(SETTINGS)


class Sound(ScriptedLane):
    loaded_s = 1.0
    files = frozenset({"model.py"})


class Leaving(StandingLane):
    def _leave(self) -> None:
        lane = self._lane
        assert isinstance(lane, ScriptedLane)
        lane.notes.append("left")


def trainable(lane: ScriptedLane, settings: LaneSettings = SETTINGS) -> StandingLane:
    made: StandingLane = Leaving.__new__(Leaving)  # Tune's own set-up needs Ray.
    made._lane, made._settings = lane, settings
    return made


def test_lane_stands_after_its_sweep_and_not_once_it_has_a_trial_again() -> None:
    lane = Sound([], SHAPE)
    actor = trainable(lane)
    actor.stay()
    actor.cleanup()
    found = actor.standing()
    assert found is not None
    assert (found.key, found.shape, found.files) == (key_of(SETTINGS), SHAPE, Sound.files)
    assert lane.notes == ["stop"]
    actor.reset_config({"spec": fake_spec(1), "settings": SETTINGS})
    assert actor.standing() is None
    actor.cleanup()  # In the middle of the sweep, to make room.
    assert actor.standing() is None
    assert lane.notes[-2:] == ["close", "left"]


def test_lane_that_does_not_listen_or_serves_one_sweep_only_ends() -> None:
    deaf = Sound([], SHAPE)
    deaf.stops = False
    actor = trainable(deaf)
    actor.stay()
    actor.cleanup()
    assert (actor.standing(), deaf.notes) == (None, ["stop", "kill", "left"])

    lane = Sound([], SHAPE)
    settings = replace(SETTINGS, data=DataConf(datasets={"train": {"_target_": "pkg.dataset"}}))
    actor = trainable(lane, settings)
    actor.stay()
    actor.cleanup()
    assert lane.notes == ["stop", "close", "left"]


def test_lane_of_one_trial_does_not_stand() -> None:
    lane = Sound([], SHAPE)
    settings = replace(SETTINGS, lane=LaneConf(isolation=Isolation.process))
    lane.close()
    actor = trainable(lane, settings)
    actor.stay()
    actor.cleanup()
    assert actor.standing() is None
