from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heats.asha import Asha, next_milestone, rung_milestones
from heats.config import AshaConf, AshaMode, Direction
from heats.errors import ConfigError
from heats.trial import Judged, Objective, Verdict

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable

    from heats.trial import Judgement

LOSS = Objective("loss", Direction.minimize)
SCORE = Objective("score", Direction.maximize)
NOT_FINITE = [math.nan, math.inf, -math.inf]


def asha(
    *, least: int = 1, largest: int | None = None, eta: int = 3, objective: Objective = LOSS
) -> Asha:
    conf = AshaConf(min_resource=least, max_resource=largest, reduction_factor=eta)
    return Asha(conf, objective)


def verdicts(scheduler: Asha, resource: int, values: Iterable[float]) -> list[Verdict]:
    """Verdicts at one rung for trials 0, 1, ... with these values."""
    return [
        judgement.verdict
        for trial, value in enumerate(values)
        for judgement in scheduler.judge(trial, resource, value)
    ]


# --- rungs --------------------------------------------------------------------------------------


@given(st.integers(1, 50), st.integers(0, 10**6), st.integers(2, 12))
def test_milestones_are_all_products_up_to_the_end(least: int, more: int, eta: int) -> None:
    largest = least + more
    naive = [least * eta**k for k in range(64) if least * eta**k <= largest]
    found = rung_milestones(min_resource=least, max_resource=largest, reduction_factor=eta)
    assert found == naive


def test_rung_at_243_is_not_lost_to_a_logarithm() -> None:
    rungs = rung_milestones(min_resource=1, max_resource=243, reduction_factor=3)
    assert rungs == [1, 3, 9, 27, 81, 243]


@pytest.mark.parametrize(
    ("least", "largest", "eta", "key"),
    [
        (0, 9, 3, "asha.min_resource=0"),
        (4, 3, 3, "asha.max_resource=3"),
        (1, 9, 1, "asha.reduction_factor=1"),
    ],
)
def test_bound_that_does_not_hold_is_named(least: int, largest: int, eta: int, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        rung_milestones(min_resource=least, max_resource=largest, reduction_factor=eta)


@given(st.integers(1, 20), st.none() | st.integers(0, 500), st.integers(2, 5), st.integers(0, 600))
def test_next_milestone_is_the_next_rung_or_the_end(
    least: int, more: int | None, eta: int, resource: int
) -> None:
    largest = None if more is None else least + more
    conf = AshaConf(min_resource=least, max_resource=largest, reduction_factor=eta)
    levels = {least * eta**k for k in range(16)}
    if largest is not None:
        levels = {level for level in levels if level < largest} | {largest}
    expected = min((level for level in levels if level > resource), default=None)
    assert next_milestone(resource, conf) == expected


@given(st.none() | st.integers(5, 100), st.lists(st.integers(0, 120), max_size=30))
def test_decisions_fall_exactly_at_the_milestones(
    largest: int | None, resources: list[int]
) -> None:
    """A lane asks `next_milestone` which reports need the driver: they must be those judged."""
    conf = AshaConf(min_resource=2, max_resource=largest, reduction_factor=3)
    scheduler, upcoming = Asha(conf, LOSS), next_milestone(0, conf)
    for resource in sorted(set(resources)):
        is_due = upcoming is not None and resource >= upcoming
        if is_due:
            upcoming = next_milestone(resource, conf)
        if scheduler.judge(0, resource, 1.0):
            assert is_due


# --- the rule -----------------------------------------------------------------------------------


def goes_on_by_the_paper(losses: list[float], eta: int) -> bool:
    """Whether the newest loss is in `top_k(rung, |rung| / eta)`, Algorithm 2, with at least one."""
    top = sorted(losses)[: max(1, math.floor(len(losses) / eta))]
    return losses[-1] in top


@given(st.lists(st.floats(-5, 5), max_size=30), st.integers(2, 5), st.booleans())
def test_rule_agrees_with_the_paper(values: list[float], eta: int, maximize: bool) -> None:
    scheduler = asha(eta=eta, objective=SCORE if maximize else LOSS)
    losses = [-value if maximize else value for value in values]
    expected = [
        Verdict.CONTINUE if goes_on_by_the_paper(losses[: n + 1], eta) else Verdict.STOP
        for n in range(len(losses))
    ]
    assert verdicts(scheduler, 1, values) == expected


def test_order_of_arrival_decides_who_goes_on_but_never_stops_the_best() -> None:
    values = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    num_on = set()
    for order in itertools.permutations(values):
        told = dict(zip(order, verdicts(asha(), 1, order), strict=True))
        assert told[0.1] is Verdict.CONTINUE
        num_on.add(sum(verdict is Verdict.CONTINUE for verdict in told.values()))
    assert num_on == {1, 2, 3, 4, 5, 6}  # From the best first to the best last.


def test_before_a_rung_has_eta_values_only_the_best_so_far_goes_on() -> None:
    told = verdicts(asha(eta=4), 1, [3.0, 4.0, 2.0])
    assert told == [Verdict.CONTINUE, Verdict.STOP, Verdict.CONTINUE]


def test_equal_values_all_go_on() -> None:
    assert set(verdicts(asha(), 1, [1.0] * 9)) == {Verdict.CONTINUE}


@given(st.sampled_from(NOT_FINITE), st.integers(0, 100), st.booleans(), st.integers(0, 5))
def test_value_that_is_not_finite_stops_at_any_report(
    value: float, resource: int, maximize: bool, num_before: int
) -> None:
    scheduler = asha(largest=81, objective=SCORE if maximize else LOSS)
    for trial in range(num_before):
        scheduler.judge(trial, resource, float(trial))
    (judgement,) = scheduler.judge(99, resource, value)
    assert judgement.verdict is Verdict.STOP


def test_value_that_is_not_finite_loses_to_every_other_at_its_rung() -> None:
    for objective in (LOSS, SCORE):
        scheduler = asha(objective=objective)
        verdicts(scheduler, 1, [math.nan, math.inf, -math.inf])
        (judgement,) = scheduler.judge(7, 1, -1e300 if objective is SCORE else 1e300)
        assert judgement.verdict is Verdict.CONTINUE


# --- reports of a trial -------------------------------------------------------------------------


def test_nothing_is_decided_between_rungs_or_twice() -> None:
    scheduler = asha(least=2)
    judged = [scheduler.judge(0, resource, 1.0) for resource in (0, 1, 2, 2, 3, 5, 6, 7)]
    assert [[j.rung for j in each] for each in judged] == [[], [], [2], [], [], [], [6], []]


def test_report_beyond_a_rung_counts_for_the_highest_reached() -> None:
    scheduler = asha()
    (judgement,) = scheduler.judge(0, 11, 1.0)
    assert (judgement.rung, judgement.resource) == (9, 11)
    assert scheduler.judge(1, 1, 5.0)[0].verdict is Verdict.CONTINUE  # Rung 1 is still empty.
    assert scheduler.judge(2, 9, 2.0)[0].verdict is Verdict.STOP


def test_full_trial_is_never_stopped() -> None:
    for largest, rung in ((9, 9), (20, 9)):
        scheduler = asha(largest=largest)
        told = [scheduler.judge(trial, largest, float(trial))[0] for trial in range(5)]
        assert {j.verdict for j in told} == {Verdict.CONTINUE}
        assert {j.rung for j in told} == {rung}
        assert scheduler.judge(0, 27, 1.0) == []


def test_rungs_go_on_without_end_where_there_is_no_max_resource() -> None:
    (judgement,) = asha().judge(0, 3**30 + 1, 1.0)
    assert judgement.rung == 3**30


def test_stopped_trial_is_not_judged_again() -> None:
    scheduler = asha()
    verdicts(scheduler, 1, [1.0, 2.0])
    assert scheduler.judge(1, 3, 0.0) == []
    assert scheduler.judge(1, 4, math.nan) == []


# --- resume -------------------------------------------------------------------------------------


def event(trial: int, judgement: Judgement) -> Judged:
    return Judged(
        time_s=0.0,
        trial=trial,
        rung=judgement.rung,
        resource=judgement.resource,
        value=judgement.value,
        verdict=judgement.verdict,
    )


values_or_not = st.floats(-5, 5) | st.sampled_from(NOT_FINITE)
reports = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5), values_or_not), max_size=60)


@given(reports, st.integers(0, 60), st.none() | st.integers(5, 40))
def test_restored_goes_on_as_if_it_had_not_stopped(
    steps: list[tuple[int, int, float]], cut: int, largest: int | None
) -> None:
    uninterrupted, spent, events, seen = asha(largest=largest), dict.fromkeys(range(6), 0), [], []
    for trial, more, value in steps:
        spent[trial] += more
        judged = uninterrupted.judge(trial, spent[trial], value)
        events.append([event(trial, judgement) for judgement in judged])
        seen.append((trial, spent[trial], value))
    restored = asha(largest=largest)
    restored.restore(itertools.chain.from_iterable(events[:cut]))
    again = [[event(t, j) for j in restored.judge(t, r, v)] for t, r, v in seen[cut:]]
    assert repr(again) == repr(events[cut:])  # As text: NaN is not equal to itself.


def test_judgement_says_what_it_took_to_go_on() -> None:
    asha = Asha(AshaConf(max_resource=9, reduction_factor=2), LOSS)
    needed = [asha.judge(trial, 1, loss)[0].needed for trial, loss in enumerate([0.3, 0.5, 0.2])]
    assert needed == [0.3, 0.3, 0.2]
    accuracy = Asha(AshaConf(max_resource=9), Objective("accuracy", Direction.maximize))
    assert accuracy.judge(0, 1, 0.9)[0].needed == 0.9
    assert accuracy.judge(1, 1, 0.8)[0].needed == 0.9
    assert Asha(AshaConf(), LOSS).judge(0, 1, math.nan)[0].needed is None


# --- promote ------------------------------------------------------------------------------------


def promoting(**conf: Any) -> Asha:
    settings = {"max_resource": 9, "reduction_factor": 3, "mode": AshaMode.promote, **conf}
    return Asha(AshaConf(**settings), LOSS)


def verdict(asha: Asha, trial: int, resource: int, value: float) -> Verdict | None:
    judgements = asha.judge(trial, resource, value)
    return judgements[0].verdict if judgements else None


def test_trial_waits_until_it_is_among_the_best_of_its_rung() -> None:
    asha = promoting()
    assert [verdict(asha, trial, 1, 0.5 - 0.1 * trial) for trial in (0, 1)] == [Verdict.PAUSE] * 2
    assert asha.resume(lambda _: True) is None, "with two of three there is no best third yet"
    assert verdict(asha, 2, 1, 0.9) is Verdict.PAUSE
    assert asha.resume(lambda _: True) == 1
    assert asha.resume(lambda _: True) is None
    assert verdict(asha, 1, 3, 0.2) is Verdict.PAUSE


def test_trial_that_is_the_best_third_at_once_goes_on_without_a_pause() -> None:
    asha = promoting()
    for trial in (0, 1):
        verdict(asha, trial, 1, 0.5)
    assert verdict(asha, 2, 1, 0.1) is Verdict.CONTINUE
    assert asha.resume(lambda _: True) is None


def test_highest_rung_and_its_best_value_come_first() -> None:
    asha = promoting()
    for trial in range(9):
        verdict(asha, trial, 1, 0.1 * trial)
    promoted = [asha.resume(lambda _: True) for _ in range(3)]
    assert promoted == [0, 1, 2]
    for trial in (0, 1, 2):
        verdict(asha, trial, 3, 0.1 * trial)
    assert asha.resume(lambda _: True) == 0
    assert asha.resume(lambda trial: trial != 0) is None


def test_paused_trial_that_is_not_ready_is_passed_over() -> None:
    asha = promoting()
    for trial, value in enumerate([0.3, 0.2, 0.9, 0.8, 0.7, 0.6]):
        verdict(asha, trial, 1, value)
    assert asha.resume(lambda trial: trial > 1) is None
    assert asha.resume(lambda trial: trial != 1) == 0
    assert asha.resume(lambda _: True) == 1


def test_value_that_is_not_finite_stops_its_trial_in_both_modes() -> None:
    asha = promoting()
    assert verdict(asha, 0, 1, math.nan) is Verdict.STOP
    assert verdict(asha, 1, 2, math.inf) is Verdict.STOP
    assert asha.resume(lambda _: True) is None


def test_pauses_are_taken_up_again() -> None:
    asha, again = promoting(), promoting()
    judged = [event(trial, asha.judge(trial, 1, 0.5 - 0.1 * trial)[0]) for trial in range(2)]
    again.restore(judged, paused=[0, 1])
    assert verdict(again, 2, 1, 0.9) is Verdict.PAUSE
    assert again.resume(lambda _: True) == 1


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=40, unique=True),
    st.sampled_from([2, 3, 4]),
    st.randoms(use_true_random=False),
)
def test_promotions_are_those_of_the_paper(
    values: list[float], eta: int, random: random.Random
) -> None:
    """Whatever the order: a trial is beyond a rung only if it was among its best 1/eta then."""
    asha = promoting(max_resource=eta**3, reduction_factor=eta)
    waiting = list(range(len(values)))
    random.shuffle(waiting)
    at: dict[int, list[int]] = {}
    level = dict.fromkeys(waiting, 0)
    while True:
        trial = asha.resume(lambda _: True)
        if trial is None:
            if not waiting:
                break
            trial = waiting.pop()
        told: Verdict | None = Verdict.CONTINUE
        while told is Verdict.CONTINUE and level[trial] < 4:
            rung = eta ** level[trial]
            told = verdict(asha, trial, rung, values[trial])
            at.setdefault(rung, []).append(trial)
            level[trial] += 1
            best = sorted(at[rung], key=lambda each: values[each])[: len(at[rung]) // eta]
            if rung < eta**3:
                assert (told is Verdict.CONTINUE) == (trial in best)
    for lower, upper in itertools.pairwise(sorted(at)):
        best = sorted(at[lower], key=lambda each: values[each])[: len(at[lower]) // eta]
        assert set(best) <= set(at[upper])
