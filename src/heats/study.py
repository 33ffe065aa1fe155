"""The study: Optuna proposes points and learns what became of them; it lives in memory.

The ledger is what lasts. `Study.restore` rebuilds a study from it that goes on as if it had never
stopped: what the sampler draws for a trial depends on the seed, the trial's number and what the
study knew when it was asked, and on nothing else.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import math
import warnings
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import optuna
from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate
from optuna.samplers import BaseSampler
from optuna.trial import create_trial

from heats.errors import ConfigError, LedgerError
from heats.trial import Proposal, TrialState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

    from heats.record import SweepRecord, TrialRecord
    from heats.space import SearchSpace
    from heats.trial import Objective

logger = logging.getLogger(__name__)

# Their proposals depend on their seed and the study's trials only, so they are made anew for each.
STATELESS_SAMPLERS = (
    optuna.samplers.TPESampler,
    optuna.samplers.RandomSampler,
    optuna.samplers.GPSampler,
)


class Study:
    """An Optuna study in memory, with numbers for trials and Hydra overrides for points."""

    def __init__(
        self, objective: Objective, space: SearchSpace, sampler: Any | None, seed: int
    ) -> None:
        """Start without trials.

        Args:
            objective: What is optimized, and in which direction.
            space: The search space.
            sampler: A config node with a `_target_` that builds an Optuna sampler (or
                `heats.study.grid`), or a sampler. None: a grid where every dimension lists its
                values, otherwise TPE (multivariate, with a constant liar, as trials overlap).
            seed: Makes the sampler repeatable, unless its node has a `seed` of its own.

        Raises:
            ConfigError: There is no such sampler, or it does not fit the search space.
        """
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._objective = objective
        self._space = space
        self._sampler = _NumberedSampler(_sampler_for(sampler, space, seed), space)
        self._storage = optuna.storages.InMemoryStorage()
        self._study = optuna.create_study(
            storage=self._storage,
            sampler=self._sampler,
            pruner=optuna.pruners.NopPruner(),
            direction=objective.direction.value,
        )
        self._study_id = self._storage.get_study_id_from_name(self._study.study_name)
        self._curves: dict[int, dict[int, float]] = {}
        self._num_trials = 0

    @property
    def sampler_name(self) -> str:
        """What people know the sampler by."""
        if not self._space.dimensions:
            return "none"
        return "grid" if self._sampler.is_grid else self._sampler.name

    @property
    def num_points(self) -> int | None:
        """Points of the grid; None where the sampler is another one."""
        return self._space.num_points() if self._sampler.is_grid else None

    @property
    def trials(self) -> list[FrozenTrial]:
        """The trials as Optuna knows them, for its own analyses."""
        return self._study.trials

    @property
    def is_exhausted(self) -> bool:
        """Whether a grid has no point left."""
        return self.num_points is not None and self._num_trials >= self.num_points

    def ask(self) -> Proposal:
        """The next point.

        Raises:
            IndexError: The study is exhausted.
        """
        if self.is_exhausted:
            msg = f"the grid has no point after its {self._num_trials}"
            raise IndexError(msg)
        trial = self._study.ask(self._space.dimensions)
        self._num_trials += 1
        self._curves[trial.number] = {}
        params = trial.params
        return Proposal(trial.number, self._space.values(params), self._space.overrides(params))

    def report(self, number: int, resource: int, value: float) -> None:
        """Take an objective value of a running trial at an amount of resource."""
        self._curves[number][resource] = value

    def tell(self, number: int, state: TrialState, value: float | None) -> None:
        """Take the end of a trial; whether it really teaches anything is told by its values.

        A COMPLETE trial without a finite value, and a PRUNED one whose last report was not finite,
        count as FAIL: Optuna never sees NaN or infinity.

        Raises:
            KeyError: The trial is not running.
        """
        state, value, curve = _settled(state, value, self._curves.pop(number))
        trial_id = self._storage.get_trial_id_from_study_id_trial_number(self._study_id, number)
        # The stored trial itself. Setting values one by one copies the whole curve for each.
        self._storage.get_trial(trial_id).intermediate_values.update(curve)
        self._study.tell(number, value, state=optuna.trial.TrialState[state.name])

    def restore(self, record: SweepRecord) -> None:
        """Take up the trials of a ledger, in the order of their numbers.

        Trials that were running are so again: they can be reported on and told.

        Raises:
            LedgerError: Trial numbers have gaps, or do not follow the trials that are known.
            ConfigError: A trial's point is not in the search space.
        """
        for number, trial in sorted(record.trials.items()):
            if number != self._num_trials:
                msg = (
                    f"The ledger has no trial {self._num_trials} before trial {number}. "
                    "Restore the file from a copy, or start a new study."
                )
                raise LedgerError(msg)
            self._study.add_trial(self._frozen(trial))
            self._num_trials += 1
        if record.trials and not self._sampler.is_stateless:
            logger.warning(
                "The sampler's own state is not in the ledger: it starts anew, with what the %d "
                "trials of the ledger teach it.",
                len(record.trials),
            )

    def _frozen(self, trial: TrialRecord) -> FrozenTrial:
        curve = {
            report.resource: report.metrics[self._objective.name]
            for report in trial.reports
            if self._objective.name in report.metrics
        }
        state, value = trial.state, trial.value
        if state is TrialState.RUNNING:
            self._curves[trial.number] = curve
            value, curve = None, {}
        else:
            state, value, curve = _settled(state, value, curve)
        if state is TrialState.PRUNED and curve:
            value = curve[max(curve)]  # As Optuna's own `tell` does.
        return create_trial(
            state=optuna.trial.TrialState[state.name],
            value=value,
            params=self._space.params(trial.overrides),
            distributions=self._space.dimensions,
            intermediate_values=curve,
        )


class _Grid(BaseSampler):
    """Every point once, in the order of Hydra's own sweeper: point i belongs to trial i.

    Optuna's GridSampler calls `Study.stop`, which raises where a study is asked and told.
    """

    def __init__(self, space: SearchSpace) -> None:
        if space.num_points() is None:
            intervals = [key for key in space.dimensions if key not in space.categories]
            msg = (
                f"sampler=grid does not fit the search space: {', '.join(intervals)} must have "
                "finitely many values. Use a choice or a range there, or another sampler."
            )
            raise ConfigError(msg)
        self._space = space

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        return self._space.dimensions

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return self._space.point(trial.number)

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        return self._space.point(trial.number)[param_name]


class _NumberedSampler(BaseSampler):
    """Has a sampler for each trial number, and puts what it draws on the space's exact grid."""

    def __init__(
        self, make: BaseSampler | Callable[[int], BaseSampler], space: SearchSpace
    ) -> None:
        self._make = make
        self._space = space
        self._current = make if isinstance(make, BaseSampler) else make(0)
        self.is_grid = isinstance(make, _Grid)
        self.is_stateless = self.is_grid or not isinstance(make, BaseSampler)
        self._relative: dict[str, BaseDistribution] | None = None

    @property
    def name(self) -> str:
        return type(self._current).__name__

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        if not isinstance(self._make, BaseSampler):
            self._current = self._make(trial.number)
        self._current.before_trial(study, trial)

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        # Optuna looks through all trials for what they have in common; here that never changes.
        if self._relative is None:
            found = self._current.infer_relative_search_space(study, trial)
            if not found or not self.is_stateless:
                return found
            self._relative = found
        return self._relative

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        params = self._current.sample_relative(study, trial, search_space)
        return {key: self._space.clean(key, value) for key, value in params.items()}

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        value = self._current.sample_independent(study, trial, param_name, param_distribution)
        return self._space.clean(param_name, value)

    def after_trial(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        state: optuna.trial.TrialState,
        values: Sequence[float] | None,
    ) -> None:
        self._current.after_trial(study, trial, state, values)


def grid(space: SearchSpace) -> BaseSampler:
    """The sampler of `hydra/sweeper/sampler=grid`: every point once, point i in trial i.

    Raises:
        ConfigError: The space has infinitely many points.
    """
    return _Grid(space)


def _sampler_for(
    node: Any, space: SearchSpace, seed: int
) -> BaseSampler | Callable[[int], BaseSampler]:
    """One sampler for all trials, or what makes one for each trial number."""
    if isinstance(node, BaseSampler):
        return node
    if node is None:
        if space.is_grid:
            return grid(space)
        target = "optuna.samplers.TPESampler"
        node = {"_target_": target, "multivariate": True, "constant_liar": True}
    if not isinstance(node, Mapping) or not node.get("_target_"):
        raise _no_sampler(node, "it has no _target_")
    try:
        target = get_object(str(node["_target_"]))
        # Those of Optuna that go through all points stop the study themselves, which raises here.
        if target in (grid, optuna.samplers.GridSampler, optuna.samplers.BruteForceSampler):
            if "search_space" in node:
                raise _no_sampler(
                    node["_target_"], "a grid is the sweep's: leave out its search_space"
                )
            return grid(space)
        build = instantiate(node, _partial_=True)
        base = build.keywords.get("seed")
        base = seed if base is None else base
        if target in STATELESS_SAMPLERS and not build.keywords.get("group"):  # Groups are a state.
            _quietly(build, seed=base)  # Wrong arguments come to light now.
            plain = partial(target, *build.args, **build.keywords)  # Hydra's own checks each time.
            return lambda number: _quietly(plain, seed=_trial_seed(base, number))
        takes_seed = "seed" in inspect.signature(target).parameters
        sampler = _quietly(build, seed=base) if takes_seed else _quietly(build)
    except ConfigError:
        raise
    except Exception as exc:  # Any code may stand behind a `_target_`.
        cause = exc.__cause__ if isinstance(exc, InstantiationException) else exc
        raise _no_sampler(node["_target_"], str(cause or exc).splitlines()[0]) from exc
    if not isinstance(sampler, BaseSampler):
        raise _no_sampler(node["_target_"], f"it gives a {type(sampler).__name__}")
    return sampler


def _no_sampler(target: Any, problem: str) -> ConfigError:
    return ConfigError(
        f"sampler={target!s:.80} is not a sampler: {problem:.200}. Choose one by "
        "hydra/sweeper/sampler=tpe (or random, grid), or give sampler a node whose _target_ builds "
        "an Optuna sampler."
    )


def _quietly(build: Callable[..., BaseSampler], **kwargs: Any) -> BaseSampler:
    """What `build` makes, without Optuna 4's warnings that its options are experimental."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return build(**kwargs)


def _trial_seed(seed: int, number: int) -> int:
    """32 bits that differ from trial to trial and from seed to seed."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{number}".encode(), digest_size=4).digest())


def _settled(
    state: TrialState, value: float | None, curve: Mapping[int, float]
) -> tuple[TrialState, float | None, dict[int, float]]:
    """State, value and curve of an ended trial as Optuna is told them."""
    finite = {resource: value for resource, value in curve.items() if math.isfinite(value)}
    if state is TrialState.COMPLETE and value is not None and math.isfinite(value):
        return state, value, finite
    has_diverged = bool(curve) and not math.isfinite(curve[max(curve)])
    if state is TrialState.PRUNED and not has_diverged:
        return state, None, finite
    return TrialState.FAIL, None, finite
