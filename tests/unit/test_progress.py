"""Counts of a growing record, and the estimate of the time left."""

from __future__ import annotations

import pytest
from tests.fakes import fake_events, replay

from heats.progress import Tally, expected_time_left
from heats.record import SweepRecord
from heats.trial import SweepStarted, TrialState


def test_no_estimate_before_every_lane_has_ended_a_trial() -> None:
    assert expected_time_left([], [1.0], 10, 2) is None
    assert expected_time_left([3.0], [1.0], 10, 2) is None


def test_equal_trials_are_estimated_exactly() -> None:
    # Two lanes, each half-way through a trial of 10 s; six more are waiting: 3 rounds and a half.
    assert expected_time_left([10.0, 10.0], [5.0, 5.0], 6, 2) == pytest.approx(35.0)


def test_one_lane_that_goes_on_longer_than_the_others_counts() -> None:
    assert expected_time_left([2.0, 40.0], [10.0], 0, 2) == pytest.approx(30.0)


def test_overdue_trial_raises_the_estimate_for_those_that_wait() -> None:
    on_time = expected_time_left([10.0] * 4, [1.0], 8, 4)
    overdue = expected_time_left([10.0] * 4, [90.0], 8, 4)
    assert on_time is not None
    assert overdue is not None
    assert overdue > on_time


def test_tally_follows_the_record_event_by_event() -> None:
    events = fake_events()
    start = events[0]
    assert isinstance(start, SweepStarted)
    record = SweepRecord(start=start)
    tally = Tally(record)
    ended = []
    for event in events:
        record.apply(event)
        ended += tally.update()
        assert tally.counts == record.counts()
        best = record.best()
        assert (tally.best and tally.best.value) == (best and best.value)
    assert len(ended) == tally.num_ended == 40


def test_tally_of_a_resumed_sweep_starts_with_what_was_there() -> None:
    record = replay(fake_events(is_ended=False))
    tally = Tally(record)
    assert len(tally.update()) == 36
    assert tally.update() == []
    assert tally.counts[TrialState.RUNNING] == 4
