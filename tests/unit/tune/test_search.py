from __future__ import annotations

from typing import Any, cast

from ray.tune.search import Searcher
from tests.fakes import FakeCoordinator, fake_spec

from heats.cluster import Node
from heats.lane.pool import LanePool
from heats.trial import Ending, Outcome
from heats.tune.search import TrialSearcher


def searcher(coordinator: FakeCoordinator, max_concurrent: int) -> TrialSearcher:
    pool = LanePool(lambda: [Node({"CPU": 4.0})], max_concurrent)
    return TrialSearcher(coordinator, cast("Any", "settings"), pool)


def test_suggestion_is_the_next_trial_with_its_settings() -> None:
    search = searcher(FakeCoordinator([fake_spec(0)]), 1)
    assert search.suggest("a") == {"spec": fake_spec(0), "settings": "settings"}


def test_no_more_trials_run_than_allowed() -> None:
    search = searcher(FakeCoordinator([fake_spec(number) for number in range(3)]), 2)
    assert search.suggest("a") is not None
    assert search.suggest("b") is not None
    assert search.suggest("c") is None
    search.on_trial_complete("a")
    third = search.suggest("c")
    assert isinstance(third, dict)
    assert third["spec"].number == 2


def test_place_of_a_trial_that_ended_with_an_error_is_free_again() -> None:
    search = searcher(FakeCoordinator([fake_spec(0), fake_spec(1)]), 1)
    search.suggest("a")
    search.on_trial_complete("a", error=True)
    assert search.suggest("b") is not None


def test_search_waits_while_a_running_trial_may_come_back() -> None:
    coordinator = FakeCoordinator([fake_spec(0)])
    search = searcher(coordinator, 2)
    search.suggest("a")
    assert search.suggest("b") is None
    coordinator.is_over = True
    assert search.suggest("b") == Searcher.FINISHED


def test_tune_has_nothing_to_save() -> None:
    assert searcher(FakeCoordinator([]), 1).__getstate__() == {}


def test_trial_whose_shape_has_no_room_is_the_next_to_run() -> None:
    specs = [fake_spec(0, num_workers=1), fake_spec(1, num_workers=4), fake_spec(2, num_workers=1)]
    coordinator = FakeCoordinator(list(specs))
    search = searcher(coordinator, 9)
    assert search.suggest("a") == {"spec": specs[0], "settings": "settings"}
    assert search.suggest("b") is None
    assert search.suggest("b") is None
    search.on_trial_complete("a")
    assert search.suggest("b") == {"spec": specs[1], "settings": "settings"}
    assert search.suggest("c") is None
    assert coordinator.ended == []


def test_trial_that_still_waits_when_the_sweep_is_over_has_ended() -> None:
    coordinator = FakeCoordinator([fake_spec(0, num_workers=4), fake_spec(1, num_workers=1)])
    search = searcher(coordinator, 9)
    search.suggest("a")
    search.on_trial_complete("a")
    search.suggest("b")
    coordinator.specs = [fake_spec(2, num_workers=4)]
    assert search.suggest("c") is None
    coordinator.is_over = True
    assert search.suggest("c") == Searcher.FINISHED
    assert coordinator.ended == [(2, Outcome(Ending.STOPPED))]
