"""Hangs are told from slow steps, and uneven reports from hangs."""

from __future__ import annotations

import pytest

from heats.lane.health import Patience, hang
from heats.lane.messages import RankPulse, TurnEnded
from heats.trial import Ending

PATIENCE = Patience(report_s=30, other_s=600)


def pulses(*ranks: tuple[float, bool]) -> dict[int, RankPulse]:
    return {
        rank: RankPulse(rank, 1, idle_s, in_report, f"train.py:{rank + 1} in step")
        for rank, (idle_s, in_report) in enumerate(ranks)
    }


def ended(*ranks: int) -> dict[int, TurnEnded]:
    return {rank: TurnEnded(1, rank, Ending.RETURNED, None, None) for rank in ranks}


@pytest.mark.parametrize(
    ("ranks", "left"),
    [
        ([(0, False)], ()),
        ([(599, False)], ()),
        ([(29, True), (29, False)], ()),
        ([(500, True), (0, False)], ()),  # Rank 1 is in a slow step: rank 0 may wait.
        ([(500, True), (29, True)], ()),
        ([(0, False), (0, False)], (1,)),
    ],
)
def test_turn_in_which_something_moves_goes_on(
    ranks: list[tuple[float, bool]], left: tuple[int, ...]
) -> None:
    assert hang(len(ranks), pulses(*ranks), ended(*left), PATIENCE) is None


def test_rank_that_has_not_spoken_is_not_idle() -> None:
    assert hang(2, pulses((900, True)), {}, PATIENCE) is None
    assert hang(1, pulses((900, True)), ended(0), PATIENCE) is None


def test_rank_that_waits_in_a_report_that_another_never_makes_fails_the_trial() -> None:
    outcome = hang(2, pulses((31, True), (40, False)), {}, PATIENCE)
    assert outcome is not None
    assert outcome.ending is Ending.RAISED
    assert outcome.error is not None
    assert "Rank 0 waits in ray.train.report, while rank 1 is elsewhere" in outcome.error
    assert "rank 1 is at train.py:2 in step" in outcome.error


def test_rank_that_waits_in_a_report_after_another_returned_fails_the_trial() -> None:
    outcome = hang(2, pulses((31, True), (40, False)), ended(1), PATIENCE)
    assert outcome is not None
    assert outcome.ending is Ending.RAISED
    assert outcome.error is not None
    assert "while rank 1 has returned" in outcome.error


@pytest.mark.parametrize(
    ("ranks", "place"),
    [
        ([(601, False)], "in the train function"),
        ([(601, False), (700, False)], "in the train function"),
        ([(31, True), (32, True)], "in ray.train.report"),
    ],
)
def test_turn_in_which_nothing_moves_is_lost(ranks: list[tuple[float, bool]], place: str) -> None:
    outcome = hang(len(ranks), pulses(*ranks), {}, PATIENCE)
    assert outcome is not None
    assert outcome.ending is Ending.LOST
    assert outcome.error is not None
    assert f"hangs {place}" in outcome.error
