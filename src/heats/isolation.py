"""Whether a trial in a used lane is the same as in a fresh process: `heats doctor --isolation`.

The same trial runs first in a lane, after an ordinary neighbour, after a hostile one, and once more
in a lane of its own. What differs between the two fresh runs is random by itself and says nothing.
"""

from __future__ import annotations

import math
import pickle
import tempfile
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import open_dict, read_write
from rich.console import Console

from heats.cluster import lane_shape, live_nodes, ray_cluster, without
from heats.config import Isolation
from heats.errors import ConfigError, ExitCode
from heats.trial import Ending, Outcome, Report, TrialSpec, Verdict
from heats.wording import last_line, number

if TYPE_CHECKING:
    from heats.plan import Plan
    from heats.trial import LaneShape

FRESH, NEIGHBOUR, SECOND, HOSTILE, AFTER, AGAIN = (
    "fresh",
    "neighbour",
    "second in a lane",
    "hostile neighbour",
    "after a hostile neighbour",
    "fresh again",
)
_LANES = ((FRESH, NEIGHBOUR, SECOND, HOSTILE, AFTER), (AGAIN,))
"""Turns by lane: only the neighbours have another seed."""


@dataclass(slots=True)
class Curve:
    """What one turn reported, how it ended, and why its lane was replaced after it, if it was."""

    reports: list[Report] = field(default_factory=list)
    outcome: Outcome | None = None
    retired: str | None = None


class _Turns:
    """A `Coordinator` that has the turns of one lane run one after the other."""

    def __init__(self, specs: dict[str, TrialSpec]) -> None:
        self.curves = {name: Curve() for name in specs}
        self._specs = specs
        self._waiting = deque(specs)
        self._running: str | None = None

    def next_trial(self) -> TrialSpec | None:
        if self._running is not None or not self._waiting:
            return None
        self._running = self._waiting.popleft()
        Console(stderr=True).print(f"{self._running} ...", highlight=False)
        return self._specs[self._running]

    def is_done(self) -> bool:
        return self._running is None and not self._waiting

    def record(self, number: int, reports: list[Report]) -> Verdict:
        del number
        self._curve().reports += [report for report in reports if not report.is_system]
        return Verdict.CONTINUE

    def end(self, number: int, outcome: Outcome) -> None:
        del number
        self._curve().outcome = outcome
        if outcome.ending is not Ending.RETURNED:
            self._waiting.clear()  # The rest would say nothing.
        self._running = None

    def _curve(self) -> Curve:
        assert self._running is not None  # noqa: S101 - only a running trial reports
        return self.curves[self._running]


def check_isolation(plan: Plan) -> int:
    """Run the trial in all four places, and print whether its curves are identical.

    Nothing is tracked, and nothing is left behind.

    Returns:
        The exit code: DONE where all curves are identical, else NOT_DONE.

    Raises:
        ConfigError: The command line spans more than one point.
    """
    if plan.space.dimensions:
        msg = (
            f"The check takes one point, but {', '.join(plan.space.dimensions)} are searched over."
            " Give each one value."
        )
        raise ConfigError(msg)
    with tempfile.TemporaryDirectory(prefix="heats-isolation-") as folder:
        curves = _run(plan, Path(folder))
    return _tell(plan, curves)


def _run(plan: Plan, folder: Path) -> dict[str, Curve]:
    from heats.lane.actors import LaneActors
    from heats.lane.worker import log_path, retirement
    from heats.tune.loop import run_trials

    curves: dict[str, Curve] = {}
    with ray_cluster(plan.conf.cluster) as nodes:
        conf = plan.conf
        left = without(nodes, conf.kept_free)
        shape = lane_shape(conf.scaling, conf.backend, left, is_single_run=False)
        for names in _LANES:
            settings = replace(
                plan.lane_settings(
                    storage_path=str(folder / "lanes"),
                    tracking_uri=(folder / "mlruns").as_uri(),
                ),
                task=replace(plan.task, wrapper="heats.lane.hostile.hostile_where_marked"),
                pace=None,
                lane=replace(plan.conf.lane, isolation=Isolation.lane, max_concurrent=1),
                system_interval_s=None,
            )
            turns = _Turns({name: _spec(plan, shape, name, folder) for name in names})
            lanes = LaneActors(settings, shape, num_ahead=1, max_lanes=1, stay=False)
            run_trials(turns, settings, lanes, nodes=live_nodes, max_concurrent=1)
            for name, curve in turns.curves.items():
                if curve.outcome is None:  # One before it failed.
                    continue
                curve.retired = retirement(log_path(str(folder / name), 0))
            curves |= turns.curves
    return curves


def _spec(plan: Plan, shape: LaneShape, name: str, folder: Path) -> TrialSpec:
    from heats.lane.hostile import MARK

    is_neighbour = name in (NEIGHBOUR, HOSTILE)
    config = plan.composer.compose([], number=0)
    if name == HOSTILE:
        with read_write(config), open_dict(config):
            config.hydra.job.env_set[MARK] = "1"
    return TrialSpec(
        number=int(is_neighbour),
        attempt=0,
        config=pickle.dumps(config),
        shape=shape,
        run_id=None,
        artifact_dir=str(folder / name / "artifacts"),
        job_dir=str(folder / name),
        checkpoint=None,
    )


def _tell(plan: Plan, curves: dict[str, Curve]) -> int:
    console = Console(highlight=False, soft_wrap=True)
    for name, curve in curves.items():
        if curve.outcome is not None and curve.outcome.ending is not Ending.RETURNED:
            console.print(f"{name}: failed: {last_line(curve.outcome.error)}", markup=False)
            return ExitCode.NOT_DONE
    fresh, again = curves[FRESH], curves[AGAIN]
    if not any(plan.objective.name in report.metrics for report in fresh.reports):
        console.print(f"The trial reported no {plan.objective.name}: there is nothing to compare.")
        return ExitCode.NOT_DONE
    random = {
        key
        for one, other in zip(fresh.reports, again.reports, strict=False)
        for key in one.metrics
        if not _is_same(one.metrics.get(key), other.metrics.get(key))
    }
    compared = sorted({key for report in fresh.reports for key in report.metrics} - random)
    console.print(f"compared over {len(fresh.reports)} reports: {', '.join(compared) or 'nothing'}")
    if random:
        console.print(f"random by itself, left out: {', '.join(sorted(random))}")
    is_same = plan.objective.name in compared and len(fresh.reports) == len(again.reports)
    if not is_same:
        console.print(f"{plan.objective.name} differs between two fresh processes.")
    for name in (SECOND, AFTER):
        difference = first_difference(fresh, curves[name], compared, plan.objective.resource)
        is_same &= difference is None
        told = "identical" if difference is None else difference
        before = curves[NEIGHBOUR if name == SECOND else HOSTILE].retired
        if before is not None:
            told += f" (in a new lane, because {before})"
        console.print(f"{name}: {told}", markup=False)
    return ExitCode.DONE if is_same else ExitCode.NOT_DONE


def first_difference(one: Curve, other: Curve, keys: list[str], resource: str) -> str | None:
    """Where two curves differ first, in words; None where they are identical bit for bit."""
    for index, (left, right) in enumerate(zip(one.reports, other.reports, strict=False), 1):
        for key in keys:
            if not _is_same(left.metrics.get(key), right.metrics.get(key)):
                where = f"{resource} {number(left.metrics.get(resource, index))}"
                values = f"{right.metrics.get(key)!r} instead of {left.metrics.get(key)!r}"
                return f"DIFFERS: {key} at {where} is {values}"
    if len(one.reports) != len(other.reports):
        return f"DIFFERS: {len(other.reports)} reports instead of {len(one.reports)}"
    return None


def _is_same(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return one == other or (math.isnan(one) and math.isnan(other))
