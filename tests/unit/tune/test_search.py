from __future__ import annotations

from typing import Any, cast

from ray.tune.search import Searcher
from tests.fakes import FakeCoordinator, fake_spec

from heats.tune.search import TrialSearcher


def searcher(coordinator: FakeCoordinator, max_concurrent: int) -> TrialSearcher:
    return TrialSearcher(coordinator, cast("Any", "settings"), max_concurrent)


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
