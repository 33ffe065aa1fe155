"""Asynchronous successive halving (ASHA) with integer rungs, stopping or promoting.

Pure arithmetic: no clock, no randomness, no Ray. Source: "A System for Massively Parallel
Hyperparameter Tuning", arXiv:1810.05934 (r, R and eta there are `min_resource`, `max_resource` and
`reduction_factor` here).
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from typing import TYPE_CHECKING

from heats.config import AshaConf, AshaMode, Direction, PbtConf
from heats.trial import Judgement, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from heats.trial import Judged, Objective


def rung_milestones(*, min_resource: int, max_resource: int, reduction_factor: int) -> list[int]:
    """Resource levels where ASHA decides whether a trial continues, smallest first.

    Integer products, not logarithms: log(243)/log(3) is 4.999... in float64 and drops a rung.
    Source: ASHA, arXiv:1810.05934 (r, R and eta there are the three arguments here).

    Args:
        min_resource: First milestone, in units of `objective.resource` (epochs, steps); >= 1.
        max_resource: Budget of a full trial, same units; >= min_resource.
        reduction_factor: Keep the best 1/reduction_factor of a rung; >= 2.

    Raises:
        ConfigError: A bound above does not hold; the message names the key under `asha` and the
            value.
    """
    AshaConf(
        min_resource=min_resource, max_resource=max_resource, reduction_factor=reduction_factor
    )
    milestones = []
    milestone = min_resource
    while milestone <= max_resource:
        milestones.append(milestone)
        milestone *= reduction_factor
    return milestones


def next_decision(resource: int, pace: AshaConf | PbtConf | None) -> int | None:
    """The next amount at which a scheduler decides; None where nothing is left."""
    if isinstance(pace, PbtConf):
        interval = pace.perturbation_interval
        return (resource // interval + 1) * interval
    return None if pace is None else next_milestone(resource, pace)


def next_milestone(resource: int, conf: AshaConf) -> int | None:
    """The next amount at which there is something to decide; None where nothing is left.

    That is the lowest rung above `resource`, or `max_resource` if it comes first.
    """
    if conf.max_resource is not None and resource >= conf.max_resource:
        return None
    milestone = conf.min_resource
    while milestone <= resource:
        milestone *= conf.reduction_factor
    return milestone if conf.max_resource is None else min(milestone, conf.max_resource)


class Asha:
    """Stops or pauses a trial at a rung unless it is among the best 1/reduction_factor so far.

    With n values at the rung (this one included), the best n // reduction_factor go on, as in the
    paper. The others wait in mode `promote`, each until it is among them. In mode `stop` nothing
    waits, so the best max(1, n // reduction_factor) go on, ties included: while
    n < reduction_factor the best value so far does, as in Optuna's SuccessiveHalvingPruner; letting
    all of them go on would spend reduction_factor - 1 full budgets whatever they are worth.

    A value that is NaN or infinite always stops its trial, at any report; at a rung it counts as
    the worst. At `max_resource` a trial is done, which is the caller's to see: a finite value there
    is recorded and never stopped.
    """

    def __init__(self, conf: AshaConf, objective: Objective) -> None:
        """Start with empty rungs.

        Args:
            conf: Rungs; `max_resource` None means rungs without end.
            objective: Its direction says what is best.
        """
        self._conf = conf
        self._sign = 1.0 if objective.direction is Direction.minimize else -1.0
        self._milestones = [conf.min_resource]
        self._rungs: dict[int, list[tuple[float, int]]] = {}
        self._reached: dict[int, int] = {}
        self._stopped: set[int] = set()
        self._paused: dict[int, int] = {}

    def judge(self, trial: int, resource: int, value: float) -> list[Judgement]:
        """Take a report of a trial; empty where there is nothing to decide, else one decision.

        A value counts for the highest rung at or below `resource` that the trial has not reached
        yet; rungs that it skipped on the way stay without it, because a value from far beyond a
        rung says nothing about the others there. A rung is judged once for a trial, also where the
        trial repeats it after a restart. Reports after a stop or a pause are ignored.

        Args:
            trial: Trial number.
            resource: Amount spent so far, in units of `objective.resource`; >= 0.
            value: Objective.
        """
        if trial in self._stopped or trial in self._paused:
            return []
        rung = self._rung_at(resource)
        is_new = rung > self._reached.get(trial, 0)
        is_finite = math.isfinite(value)
        if is_finite and not is_new:
            return []
        goes_on, needed = is_finite, None
        if is_new:
            place = self._record(trial, rung, value)
            last = next(reversed(self._best(rung)), None)
            needed = None if last is None else self._sign * last[0]
            is_done = self._conf.max_resource is not None and resource >= self._conf.max_resource
            goes_on = is_finite and (self._is_kept(place, last) or is_done)
        verdict = Verdict.CONTINUE
        if not goes_on and is_finite and self._conf.mode is AshaMode.promote:
            self._paused[trial] = rung
            verdict = Verdict.PAUSE
        elif not goes_on:
            self._stopped.add(trial)
            verdict = Verdict.STOP
        return [Judgement(rung if is_new else resource, resource, value, verdict, needed)]

    def resume(self, is_ready: Callable[[int], bool], *, is_last: bool = False) -> int | None:
        """A paused trial that is to go on now, because it is among the best of its rung.

        The highest rung comes first, and there the best value. Where no other trial will come and
        none is complete, the best one there goes on whatever its rung: the paper goes on asking for
        trials until one is, but a sweep has a number of them.
        """
        for rung in sorted(set(self._paused.values()), reverse=True):
            for _, trial in self._rungs.get(rung, []) if is_last else self._best(rung):
                if self._paused.get(trial) == rung and is_ready(trial):
                    del self._paused[trial]
                    return trial
        return None

    def restore(self, judged: Iterable[Judged], paused: Iterable[int] = ()) -> None:
        """Take up earlier decisions, in the order in which they were made, and who waits.

        Values at amounts that are not rungs any more are left out; verdicts stand as they were.
        """
        for event in judged:
            if self._rung_at(event.rung) == event.rung > self._reached.get(event.trial, 0):
                self._record(event.trial, event.rung, event.value)
            if event.verdict is Verdict.STOP:
                self._stopped.add(event.trial)
        self._paused = {trial: self._reached.get(trial, 0) for trial in paused}

    def _record(self, trial: int, rung: int, value: float) -> tuple[float, int]:
        """Loss and trial, as they now stand at the rung."""
        place = self._sign * value if math.isfinite(value) else math.inf, trial
        insort(self._rungs.setdefault(rung, []), place)
        self._reached[trial] = rung
        return place

    def _best(self, rung: int) -> list[tuple[float, int]]:
        """Losses and trials that go on from the rung, best first."""
        values = self._rungs.get(rung, [])
        num_kept = len(values) // self._conf.reduction_factor
        if self._conf.mode is AshaMode.stop:
            num_kept = max(1, num_kept)
        return [(loss, trial) for loss, trial in values[:num_kept] if math.isfinite(loss)]

    def _is_kept(self, place: tuple[float, int], last: tuple[float, int] | None) -> bool:
        """Whether a place is up to the last that goes on; in mode `stop` ties are."""
        if last is None:
            return False
        return place <= last if self._conf.mode is AshaMode.promote else place[0] <= last[0]

    def _rung_at(self, resource: int) -> int:
        """The highest rung at or below an amount; 0 below the first."""
        if self._conf.max_resource is not None:
            resource = min(resource, self._conf.max_resource)
        self._extend(resource)
        index = bisect_right(self._milestones, resource)
        return self._milestones[index - 1] if index else 0

    def _extend(self, resource: int) -> None:
        """Have milestones up to the first one above an amount."""
        while self._milestones[-1] <= resource:
            self._milestones.append(self._milestones[-1] * self._conf.reduction_factor)
