"""Lanes follow what trials demand and what the cluster has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from heats.cluster import Node, fits
from heats.lane import pool as lane_pool
from heats.lane.pool import LanePool
from heats.trial import LaneShape

if TYPE_CHECKING:
    import pytest

ONE, TWO, FOUR = (LaneShape(count, False, {"CPU": 1.0}) for count in (1, 2, 4))


class Cluster:
    """Nodes that a test can change."""

    def __init__(self, *cpus: float) -> None:
        self.cpus = list(cpus)

    def nodes(self) -> list[Node]:
        return [Node({"CPU": amount}) for amount in self.cpus]


def pool_of(*cpus: float, max_concurrent: int | None = None) -> LanePool:
    return LanePool(Cluster(*cpus).nodes, max_concurrent)


def ended(pool: LanePool, trial_id: str, shape: LaneShape) -> None:
    """A trial is over and its lane waits."""
    pool.leave(trial_id)
    pool.rest(shape)


def test_as_many_trials_run_as_fit() -> None:
    pool = pool_of(3)
    assert [pool.admit(name, ONE) for name in "abcd"] == [True, True, True, False]
    assert not pool.may_admit()
    pool.leave("b")
    assert pool.may_admit()
    assert pool.admit("d", ONE)


def test_no_more_trials_run_than_allowed() -> None:
    pool = pool_of(9, max_concurrent=1)
    assert pool.admit("a", ONE)
    assert not pool.admit("b", ONE)


def test_idle_lane_of_the_shape_is_used_and_no_other_is_retired() -> None:
    pool = pool_of(4)
    pool.admit("a", TWO)
    pool.admit("b", TWO)
    ended(pool, "a", TWO)
    assert pool.admit("c", TWO)
    assert pool.retire() == []
    pool.take(TWO)


def test_idle_lane_stays_while_there_is_room_beside_it() -> None:
    pool = pool_of(4)
    pool.admit("a", TWO)
    ended(pool, "a", TWO)
    assert pool.admit("b", ONE)
    assert pool.retire() == []


def test_idle_lanes_that_are_in_the_way_go_oldest_first() -> None:
    pool = pool_of(5)
    for name, shape in (("a", TWO), ("b", ONE), ("c", ONE)):
        pool.admit(name, shape)
        ended(pool, name, shape)
    assert pool.admit("d", LaneShape(3, False, {"CPU": 1.0}))
    assert pool.retire() == [TWO]
    assert pool.retire() == []


def test_lane_that_a_trial_was_promised_is_not_retired_for_another() -> None:
    pool = pool_of(4)
    for name in "ab":
        pool.admit(name, TWO)
    for name in "ab":
        ended(pool, name, TWO)
    assert pool.admit("c", TWO)  # In one of the two, which Tune gives it in a moment.
    assert pool.admit("d", ONE)
    assert pool.retire() == [TWO]
    assert not pool.admit("e", FOUR)


def test_trial_that_never_fits_beside_the_running_ones_retires_nothing() -> None:
    pool = pool_of(4)
    pool.admit("a", TWO)
    pool.admit("b", ONE)
    ended(pool, "b", ONE)
    assert not pool.admit("c", FOUR)
    assert pool.retire() == []


def test_lane_that_was_to_go_may_be_given_to_a_trial_first() -> None:
    pool = pool_of(4)
    three = LaneShape(3, False, {"CPU": 1.0})
    for name, shape in (("a", ONE), ("b", three)):
        pool.admit(name, shape)
    for name, shape in (("a", ONE), ("b", three)):
        ended(pool, name, shape)
    assert pool.admit("c", TWO)  # The oldest goes, and then the other one.
    assert pool.admit("d", ONE)
    pool.take(ONE)  # Tune had not ended it yet.
    assert pool.retire() == [three]


def test_growing_and_shrinking_cluster_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_pool, "_LOOK_EVERY_S", 0.0)
    cluster = Cluster(1)
    pool = LanePool(cluster.nodes, None)
    assert [pool.admit(name, ONE) for name in "ab"] == [True, False]
    cluster.cpus.append(1)
    assert pool.may_admit()
    assert pool.admit("b", ONE)
    cluster.cpus.pop()
    pool.leave("a")
    assert not pool.may_admit()
    pool.leave("b")
    assert pool.admit("c", ONE)


def test_idle_lane_goes_when_a_node_leaves_that_a_starting_one_counted_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lane_pool, "_LOOK_EVERY_S", 0.0)
    cluster = Cluster(4, 4)
    pool = LanePool(cluster.nodes, None)
    assert pool.admit("a", FOUR)
    assert pool.admit("b", FOUR)
    cluster.cpus.pop()
    assert not pool.may_admit()
    ended(pool, "a", FOUR)
    assert pool.retire() == [FOUR]


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.sampled_from([ONE, TWO, FOUR]))))
def test_lanes_never_need_more_than_the_cluster_has(steps: list[tuple[str, LaneShape]]) -> None:
    """Each step ends the trial of that name, or begins it."""
    cluster = Cluster(3, 4)
    pool = LanePool(cluster.nodes, None)
    running: dict[str, LaneShape] = {}
    idle: list[LaneShape] = []
    for name, shape in steps:
        if name in running:
            idle.append(running[name])
            ended(pool, name, running.pop(name))
        elif pool.admit(name, shape):
            if shape in idle:  # Tune gives it before it ends those that are to go.
                idle.remove(shape)
                pool.take(shape)
            for retired in pool.retire():
                idle.remove(retired)
            running[name] = shape
        else:
            assert shape not in idle
            assert not fits([*running.values(), shape], cluster.nodes())
        assert fits([*running.values(), *idle], cluster.nodes())
