"""Population-based training: Ray Tune's PBT and PB2 decide, and heats carries it out.

Ray's schedulers move checkpoints by Tune's own save and restore, which Ray Train V2 does not have:
under a stock Tuner an exploit is silently left out. Here they only see a member for each trial, and
what they would do is noted. Verified on ray 2.60; tests/integration/test_ray_contract.py covers
the private names.
"""

from __future__ import annotations

import logging
import math
import random
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from ray import tune
from ray.tune.experiment import Trial
from ray.tune.schedulers import PopulationBasedTraining, TrialScheduler
from ray.tune.schedulers.pb2 import PB2

from heats.config import Direction, Scheduler
from heats.errors import ConfigError
from heats.trial import Exploit, Judgement, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from optuna.distributions import BaseDistribution

    from heats.config import SweepConf
    from heats.record import SweepRecord, TrialRecord
    from heats.space import SearchSpace

logging.getLogger("ray.tune.schedulers").setLevel(logging.WARNING)  # The ledger tells it.

_TIME, _SCORE = "resource", "objective"


class Population:
    """Lets the trials of a sweep learn from each other, in intervals of their resource.

    At the end of an interval a trial of the worst quantile goes on from the checkpoint of one of
    the best, with other values. Where more trials are in the population than run at once, each
    waits after its interval for those behind it. A value that is not finite stops its trial.
    """

    def __init__(
        self, conf: SweepConf, space: SearchSpace, record: SweepRecord, num_trials: int
    ) -> None:
        """Start without members.

        Args:
            conf: The sweep's settings.
            space: What can be changed.
            record: The sweep as it is: members have the values, and donors the checkpoints, that
                it knows of.
            num_trials: How many the population is to have.

        Raises:
            ConfigError: PB2 is asked for a dimension that is not a number.
        """
        self._space, self._record, self._seed = space, record, conf.seed
        self._num_trials = num_trials
        self._members: dict[int, _Member] = {}
        self._decides = _scheduler(conf, space, record)
        self._stopped: set[int] = set()

    def judge(self, trial: int, resource: int, value: float) -> list[Judgement]:
        """Take a report of a running trial; empty between the ends of intervals."""
        if trial in self._stopped or self._record.trials[trial].is_paused:
            return []
        if not math.isfinite(value):
            self._stopped.add(trial)
            return [Judgement(resource, resource, value, Verdict.STOP)]
        member = self._member(trial)
        before = self._decides.last_decision(member)
        with _seeded(self._seed, trial, resource):
            is_paused, noted = self._decides.decide(member, list(self._all()), resource, value)
        if noted is None and self._decides.last_decision(member) == before:
            return []
        verdict = Verdict.PAUSE if is_paused or noted is not None else Verdict.CONTINUE
        exploit = None if noted is None else self._exploit(*noted)
        return [Judgement(resource, resource, value, verdict, exploit=exploit)]

    def resume(self, is_ready: Callable[[int], bool], *, is_last: bool = False) -> int | None:
        """The paused trial that has spent least, once the population is complete."""
        del is_last
        if len(self._record.trials) < self._num_trials:
            return None
        ready = [
            (trial.last.resource if trial.last else 0, number)
            for number, trial in self._record.trials.items()
            if trial.is_paused and is_ready(number)
        ]
        return min(ready)[1] if ready else None

    def restore(self) -> None:
        """Take up the members and their last decisions from the record."""
        for number, trial in self._record.trials.items():
            member = self._member(number)
            for judged in trial.judged:
                before = [each for each in trial.exploited if each.time_s < judged.time_s]
                member.past = before[-1].overrides if before else trial.asked_overrides
                if math.isfinite(judged.value):
                    self._decides.recall(member, judged.resource, judged.value)
                else:
                    self._stopped.add(number)
            member.past = None

    def _member(self, number: int) -> _Member:
        if number not in self._members:
            self._members[number] = _Member(number, self._record, self._space)
            self._decides.on_trial_add(_Members([]), self._members[number])
        return self._members[number]

    def _all(self) -> Iterator[_Member]:
        for number in self._record.trials:
            if number not in self._stopped:
                yield self._member(number)
        if len(self._record.trials) < self._num_trials:
            yield _Member(None, self._record, self._space)

    def _exploit(self, donor: _Member, config: dict[str, Any]) -> Exploit:
        assert donor.number is not None  # noqa: S101 - it has reported
        stored = {
            key: _inside(config[key], distribution)
            for key, distribution in self._space.dimensions.items()
        }
        return Exploit(donor.number, self._space.values(stored), self._space.overrides(stored))


class _Member:
    """A trial as Ray's schedulers see it; `number` None: one that is still to be asked for."""

    def __init__(self, number: int | None, record: SweepRecord, space: SearchSpace) -> None:
        self.number, self.trial_id = number, str(number)
        self._record, self._space = record, space
        self.past: tuple[str, ...] | None = None
        self.experiment_tag = self.trial_id
        self.evaluated_params: dict[str, Any] = {}
        self.run_metadata = _NO_METADATA

    @property
    def config(self) -> dict[str, Any]:
        """Its values, as the distributions store them: those in the `past`, or those it has now."""
        return self._space.params(self._trial.overrides if self.past is None else self.past)

    @property
    def status(self) -> str:
        """Whether it waits for others."""
        if self.number is None:
            return str(Trial.PENDING)
        if self.is_finished():
            return str(Trial.TERMINATED)
        waits = self._trial.is_paused or not self._trial.is_open
        return str(Trial.PAUSED if waits else Trial.RUNNING)

    def is_finished(self) -> bool:
        """Whether it has ended."""
        return self._trial.ended_s is not None

    @property
    def has_checkpoint(self) -> bool:
        """Whether another could go on from it."""
        return self._trial.last_checkpoint is not None

    @property
    def _trial(self) -> TrialRecord:
        assert self.number is not None  # noqa: S101 - nobody asks of one that is to come
        return self._record.trials[self.number]

    def __str__(self) -> str:
        return self.trial_id


class _Metadata:
    """What Ray asks about how many checkpoints are kept: heats keeps those that are needed."""

    checkpoint_manager = property(lambda self: self)
    checkpoint_config = tune.CheckpointConfig()


_NO_METADATA = _Metadata()


class _Members:
    """Tune's controller as Ray's schedulers see it."""

    search_alg = None

    def __init__(self, members: list[_Member]) -> None:
        self._members = members

    def get_trials(self) -> list[_Member]:
        """All members."""
        return self._members

    def _schedule_trial_save(self, trial: _Member, result: dict[str, Any]) -> object:
        """Whether there is a checkpoint; which one, the record knows."""
        del result
        return trial.has_checkpoint or None


class _Noting:
    """Mixed into Ray's schedulers: an exploit is noted, not done."""

    _trial_state: dict[Any, Any]
    _noted: tuple[_Member, dict[str, Any]] | None = None

    def decide(
        self, member: _Member, members: list[_Member], time: int, score: float
    ) -> tuple[bool, tuple[_Member, dict[str, Any]] | None]:
        """Whether the member is to pause, and the donor and values where it is to exploit one."""
        self._noted = None
        scheduler: Any = self
        for each, state in self._trial_state.items():  # Any report of heats may have a checkpoint.
            state.last_checkpoint = each.has_checkpoint or None
        told = scheduler.on_trial_result(_Members(members), member, {_TIME: time, _SCORE: score})
        return told == TrialScheduler.PAUSE, self._noted

    def recall(self, member: _Member, time: int, score: float) -> None:
        """Take up a decision that was made before."""
        scheduler: Any = self
        state = self._trial_state[member]
        scheduler._save_trial_state(state, time, {_TIME: time, _SCORE: score}, member)
        state.last_perturbation_time = time

    def last_decision(self, member: _Member) -> float:
        """When the last interval of a member ended."""
        return float(self._trial_state[member].last_perturbation_time)

    def _exploit(self, tune_controller: object, trial: _Member, trial_to_clone: _Member) -> None:
        del tune_controller
        scheduler: Any = self
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # What PB2's Gaussian process says of its fit.
            config, _ = scheduler._get_new_config(trial, trial_to_clone)
        self._noted = trial_to_clone, config
        own, donor = self._trial_state[trial], self._trial_state[trial_to_clone]
        own.last_perturbation_time = donor.last_perturbation_time


class _NotingPbt(_Noting, PopulationBasedTraining):
    pass


class _NotingPb2(_Noting, PB2):
    pass


def _scheduler(conf: SweepConf, space: SearchSpace, record: SweepRecord) -> Any:
    minimizes = record.objective.direction is Direction.minimize
    common: dict[str, Any] = {
        "time_attr": _TIME,
        "metric": _SCORE,
        "mode": "min" if minimizes else "max",
        "perturbation_interval": conf.pbt.perturbation_interval,
        "quantile_fraction": conf.pbt.quantile_fraction,
        "log_config": False,
    }
    if conf.scheduler is Scheduler.pb2:
        return _NotingPb2(hyperparam_bounds=_bounds(space), **common)
    return _NotingPbt(
        burn_in_period=conf.pbt.burn_in_period,
        resample_probability=conf.pbt.resample_probability,
        hyperparam_mutations={key: _mutation(each) for key, each in space.dimensions.items()},
        **common,
    )


def _mutation(distribution: BaseDistribution) -> Any:
    match distribution:
        case CategoricalDistribution():
            return list(distribution.choices)
        case FloatDistribution():
            draw = tune.loguniform if distribution.log else tune.uniform
            return draw(distribution.low, distribution.high)
        case IntDistribution():
            draw = tune.lograndint if distribution.log else tune.randint
            return draw(distribution.low, distribution.high + 1)
    msg = f"scheduler=pbt knows no dimension of kind {type(distribution).__name__}."
    raise ConfigError(msg)


def _bounds(space: SearchSpace) -> dict[str, list[float]]:
    others = [
        key for key, each in space.dimensions.items() if not isinstance(each, FloatDistribution)
    ]
    if others or not space.dimensions:
        msg = (
            f"scheduler=pb2 takes dimensions such as interval(1e-4, 1e-1) only, not"
            f" {', '.join(others) or 'a run without any'}. Use scheduler=pbt."
        )
        raise ConfigError(msg)
    return {
        key: [each.low, each.high]
        for key, each in space.dimensions.items()
        if isinstance(each, FloatDistribution)
    }


def _inside(value: Any, distribution: BaseDistribution) -> Any:
    """The nearest value that the distribution has: Ray multiplies without regard to bounds."""
    if isinstance(distribution, CategoricalDistribution):
        return value
    assert isinstance(distribution, FloatDistribution | IntDistribution)  # noqa: S101 - the rest
    low, high, step = distribution.low, distribution.high, distribution.step
    value = min(max(value, low), high)
    if step is not None:
        value = low + round((value - low) / step) * step
        value = value if value <= high else value - step
    return int(value) if isinstance(distribution, IntDistribution) else float(value)


class _seeded:  # noqa: N801 - a context manager, used like a function
    """Draws of Ray's schedulers, which use the global generators, are a function of these."""

    def __init__(self, *seed: int) -> None:
        self._seed = np.random.SeedSequence([abs(each) for each in seed])

    def __enter__(self) -> None:
        self._saved = random.getstate(), np.random.get_state()  # noqa: NPY002 - Ray's own
        own, numpy_own = self._seed.generate_state(2)
        random.seed(int(own))
        np.random.seed(int(numpy_own))  # noqa: NPY002 - Ray's own

    def __exit__(self, *_: object) -> None:
        random.setstate(self._saved[0])
        np.random.set_state(self._saved[1])  # noqa: NPY002 - Ray's own
