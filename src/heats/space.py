"""The search space of a sweep: Hydra's sweep overrides as Optuna distributions, and points back.

Hydra's own parser reads the overrides, so all that a Hydra user can type works here.
"""

from __future__ import annotations

import json
import logging
import math
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.types import (
    ChoiceSweep,
    Glob,
    IntervalSweep,
    RangeSweep,
)
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
    distribution_to_json,
    json_to_distribution,
)

from heats.errors import ConfigError, unknown_name
from heats.override import element_text, parse_override, plain, refusal, refuse_nested_sweep

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hydra.core.override_parser.types import Override

    from heats.trial import ParamValue

    GroupOptions = Callable[[str], list[str]]

logger = logging.getLogger(__name__)

MAX_CATEGORIES = 10_000
MAX_LENGTH = 200_000  # Hydra's parser takes about 12 microseconds a character.
MAX_EXACT_INT = 2**53  # Optuna computes with float64.


@dataclass(frozen=True, slots=True)
class Category:
    """One choice: as Optuna stores it, as a value for people and records, and as override text."""

    stored: str | int | float | bool
    value: ParamValue
    text: str


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """All dimensions of a sweep, and what stays fixed.

    A key of `dimensions` is the override's key as it was typed, with `+`, `++` and `@package`.
    `categories` has the choices of each categorical dimension, in the order of its distribution.
    `fixed` are the overrides that do not sweep, as typed, deletions included.
    """

    dimensions: dict[str, BaseDistribution]
    categories: dict[str, tuple[Category, ...]]
    fixed: tuple[str, ...] = ()

    @property
    def is_grid(self) -> bool:
        """Whether every dimension lists its values (choices, not ranges or intervals)."""
        return all(key in self.categories for key in self.dimensions)

    def num_points(self) -> int | None:
        """Number of points, 1 for an empty space; None where there are infinitely many."""
        total = 1
        for distribution in self.dimensions.values():
            num_values = _num_values(distribution)
            if num_values is None:
                return None
            total *= num_values
        return total

    def point(self, index: int) -> dict[str, Any]:
        """Optuna parameters of a grid point; the last dimension varies fastest, as in Hydra.

        Raises:
            IndexError: There are not that many points, or infinitely many.
        """
        num_points = self.num_points()
        if num_points is None or not 0 <= index < num_points:
            msg = f"point {index} of {'infinitely many' if num_points is None else num_points}"
            raise IndexError(msg)
        params: dict[str, Any] = {}
        for key, distribution in reversed(self.dimensions.items()):
            index, position = divmod(index, _num_values(distribution) or 1)
            params[key] = _value_at(distribution, position)
        return {key: params[key] for key in self.dimensions}

    def clean(self, key: str, value: Any) -> Any:
        """The value on the dimension's own grid: 0.3, not 0.30000000000000004."""
        distribution = self.dimensions[key]
        if isinstance(distribution, IntDistribution):
            return int(value)
        if isinstance(distribution, FloatDistribution):
            if distribution.step is None:
                return float(value)
            return _value_at(distribution, round((value - distribution.low) / distribution.step))
        return value

    def values(self, params: Mapping[str, Any]) -> dict[str, ParamValue]:
        """What the trial gets for Optuna's parameters; a list or dict as its override text."""
        return {
            key: self._category(key, params[key]).value
            if key in self.categories
            else self.clean(key, params[key])
            for key in self.dimensions
        }

    def overrides(self, params: Mapping[str, Any]) -> tuple[str, ...]:
        """Hydra overrides that parse back to exactly the values of Optuna's parameters."""
        return tuple(
            f"{key}={self._category(key, params[key]).text}"
            if key in self.categories
            else f"{key}={self.clean(key, params[key])!r}"
            for key in self.dimensions
        )

    def params(self, overrides: Sequence[str]) -> dict[str, Any]:
        """Optuna's parameters for what `overrides` gave.

        Raises:
            ConfigError: An override is not of this space.
        """
        texts = dict(override.split("=", 1) for override in overrides)
        if texts.keys() != self.dimensions.keys():
            msg = (
                f"The point {', '.join(overrides)[:80]!r} does not fit the search space, which has "
                f"{', '.join(self.dimensions) or 'no dimensions'}. Start a new study."
            )
            raise ConfigError(msg)
        return {key: self._param(key, texts[key]) for key in self.dimensions}

    def to_json(self) -> dict[str, Any]:
        """The space as plain containers for `json.dumps`; `from_json` takes it back."""
        return {
            "dimensions": {
                key: json.loads(distribution_to_json(distribution))
                for key, distribution in self.dimensions.items()
            },
            "texts": {
                key: [category.text for category in categories]
                for key, categories in self.categories.items()
            },
            "fixed": list(self.fixed),
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> SearchSpace:
        """The space that `to_json` wrote."""
        categories = {}
        for key, texts in raw["texts"].items():
            listed = parse_override(f"{key}={','.join(texts)}").value()
            elements = listed.list if isinstance(listed, ChoiceSweep) else [listed]
            categories[key] = _categories([plain(element) for element in elements])
        return cls(
            dimensions={
                key: json_to_distribution(json.dumps(distribution))
                for key, distribution in raw["dimensions"].items()
            },
            categories=categories,
            fixed=tuple(raw["fixed"]),
        )

    def _category(self, key: str, stored: Any) -> Category:
        distribution = self.dimensions[key]
        assert isinstance(distribution, CategoricalDistribution)  # noqa: S101 - has categories
        return self.categories[key][distribution.choices.index(stored)]

    def _param(self, key: str, text: str) -> Any:
        distribution = self.dimensions[key]
        try:
            if key in self.categories:
                return next(c.stored for c in self.categories[key] if c.text == text)
            value = int(text) if isinstance(distribution, IntDistribution) else float(text)
            if distribution._contains(value):
                return value
        except (StopIteration, ValueError):
            pass
        msg = f"{key}={text:.80} is not in the search space: {distribution}. Start a new study."
        raise ConfigError(msg)


def parse_space(
    params: Mapping[str, str] | None,
    overrides: Sequence[str],
    group_options: GroupOptions | None = None,
) -> SearchSpace:
    """The search space of `params` (`hydra.sweeper.params`) and the command line's `overrides`.

    A later entry for a key replaces an earlier one, whether either sweeps or not; where only the
    earlier one had a `+`, the later one keeps it.

    Args:
        params: Override texts by key.
        overrides: Overrides in Hydra's grammar, sweeping or not.
        group_options: Gives the options of a config group, nothing for what is not a group. With
            it, `glob()` works and the options of a swept group are checked.

    Raises:
        ConfigError: An override cannot be read or swept; the message names key, value and remedy.
    """
    sweeps_and_fixed: dict[str, tuple[str, Override]] = {}
    for text in [*(_param_text(*item) for item in (params or {}).items()), *overrides]:
        if len(text) > MAX_LENGTH:
            _refuse_many(text, max(text.count(","), MAX_CATEGORIES) + 1)
        override = parse_override(text)
        name = override.get_key_element().lstrip("+~")
        if override.is_delete():
            earlier = sweeps_and_fixed.get(name)
            if earlier is not None and earlier[1].is_sweep_override():
                del sweeps_and_fixed[name]
            name = f"~{name}"
        elif name in sweeps_and_fixed and text[0] != "+":
            earlier_text = sweeps_and_fixed[name][0]
            prefix = earlier_text[: len(earlier_text) - len(earlier_text.lstrip("+"))]
            text, override = prefix + text, parse_override(prefix + text)
        sweeps_and_fixed[name] = (text, override)

    dimensions: dict[str, BaseDistribution] = {}
    categories: dict[str, tuple[Category, ...]] = {}
    fixed = []
    for text, override in sweeps_and_fixed.values():
        if not override.is_sweep_override():
            refuse_nested_sweep(text, override.value())
            fixed.append(text)
            continue
        if override.is_hydra_override() or override.is_delete():
            raise refusal(text, "this cannot be swept", "Give it one value")
        key = override.get_key_element()
        dimension = _dimension(text, override, group_options)
        if isinstance(dimension, BaseDistribution):
            dimensions[key] = dimension
        else:
            categories[key] = dimension
            dimensions[key] = CategoricalDistribution([c.stored for c in dimension])
    return SearchSpace(dimensions, categories, tuple(fixed))


def _param_text(key: str, value: object) -> str:
    if value is None:
        text = f"params.{key}=null"
        raise refusal(text, "it has no search space", "Give a text such as interval(0.1, 1)")
    return f"{key}={value}"


def _dimension(
    text: str, override: Override, group_options: GroupOptions | None
) -> BaseDistribution | tuple[Category, ...]:
    sweep: Any = override._value  # What `value()` gives for a sweep, but typed without Glob.
    if isinstance(sweep, IntervalSweep):
        return _interval(text, sweep)
    if isinstance(sweep, RangeSweep):
        return _range(text, sweep)
    group = override.key_or_group
    if isinstance(sweep, Glob):
        options = group_options(group) if group_options else []
        elements: list[Any] = list(sweep.filter(options))
        if not elements:
            known = ", ".join(options) or f"none, {group} is not a config group"
            raise refusal(text, "it matches no option", f"Known options: {known}")
    else:
        assert isinstance(sweep, ChoiceSweep)  # noqa: S101 - the grammar has no other sweep
        elements = [plain(element) for element in sweep.list]
        refuse_nested_sweep(text, elements)
        if group_options is not None and "." not in group:
            _check_options(group, elements, group_options)
    _refuse_many(text, len(elements))
    return _categories(elements)


def _interval(text: str, sweep: IntervalSweep) -> BaseDistribution:
    low, high, log = sweep.start, sweep.end, "log" in sweep.tags
    assert low is not None  # noqa: S101 - the grammar needs both ends
    assert high is not None  # noqa: S101
    if not math.isfinite(float(high) - float(low)):
        raise refusal(text, "the bounds must be finite numbers", "Give two finite bounds")
    if low > high:
        raise refusal(text, "the bounds are reversed", f"Write interval({high}, {low})")
    if log and low <= 0:
        raise refusal(
            text, "a log scale needs bounds above 0", "Raise the lower bound or leave out tag(log)"
        )
    if isinstance(low, int) and isinstance(high, int):
        _refuse_inexact(text, low, high)
        return IntDistribution(low, high, log=log)
    return FloatDistribution(low, high, log=log)


def _range(text: str, sweep: RangeSweep) -> BaseDistribution | tuple[Category, ...]:
    ends = (sweep.start, sweep.stop, sweep.step)
    if any(end is None or not math.isfinite(end) for end in ends):
        raise refusal(text, "start, stop and step must be finite numbers", "Give finite numbers")
    if sweep.step == 0:
        raise refusal(text, "the step is 0", "Give a step other than 0")
    # By the shortest decimal text, so that 0.7, 0.8, 0.9 end before a stop of 1.0.
    start, stop, step = (Decimal(repr(end)) for end in ends)
    count = int(((stop - start) / step).to_integral_value(ROUND_CEILING))
    if count <= 0:
        raise refusal(
            text, "it is empty (the stop is excluded)", "Let the step lead from start to stop"
        )
    is_int = all(isinstance(end, int) for end in ends)
    number = int if is_int else float
    if sweep.shuffle:
        # Listed order: categories keep their order from one start to the next, or a resumed study
        # would not know its own search space. A sampler draws at random anyway.
        _refuse_many(text, count)
        return _categories([number(start + k * step) for k in range(count)])
    if "log" in sweep.tags:
        logger.warning(
            "%.80s: tag(log) has no effect on a range; write tag(log, int(interval(a, b))).", text
        )
    low, high = sorted((start, start + (count - 1) * step))
    if is_int:
        _refuse_inexact(text, int(low), int(high))
        return IntDistribution(int(low), int(high), step=int(abs(step)))
    return FloatDistribution(float(low), float(high), step=float(abs(step)))


def _categories(elements: Sequence[Any]) -> tuple[Category, ...]:
    """Choices without repetitions.

    Stored as hydra-optuna-sweeper stores them (null, lists and dicts as text), unless two of them
    would then be equal to Optuna (`1`, `1.0` and `True` are): then all are stored as texts.
    """
    by_text = {element_text(element): element for element in elements}
    stored = [
        element
        if isinstance(element, (str, int))
        or (isinstance(element, float) and math.isfinite(element))
        else text
        for text, element in by_text.items()
    ]
    if len(set(stored)) < len(stored):
        stored = list(by_text)
    return tuple(
        Category(kept, text if isinstance(element, (list, dict)) else element, text)
        for kept, (text, element) in zip(stored, by_text.items(), strict=True)
    )


def _check_options(group: str, elements: Sequence[Any], group_options: GroupOptions) -> None:
    if not group_options(group):
        return  # Not a config group: any value goes, until it is composed.
    for element in elements:
        if isinstance(element, str) and "${" not in element and not element.startswith("/"):
            folder, _, name = f"{group}/{element}".rpartition("/")
            options = group_options(folder)
            if name.removesuffix(".yaml").removesuffix(".yml") not in options:
                what = f"option of config group {folder!r}"
                raise unknown_name(what, name, options)


def _refuse_inexact(text: str, low: int, high: int) -> None:
    if max(abs(low), abs(high)) > MAX_EXACT_INT:
        problem = "integers beyond 2**53 cannot be sampled exactly"
        raise refusal(text, problem, "Use choice() for such values")


def _refuse_many(text: str, count: int) -> None:
    if count > MAX_CATEGORIES:
        problem = f"it lists {count:,} choices, more than {MAX_CATEGORIES:,}"
        raise refusal(text, problem, "Use range() or interval()")


def _num_values(distribution: BaseDistribution) -> int | None:
    if isinstance(distribution, CategoricalDistribution):
        return len(distribution.choices)
    if isinstance(distribution, IntDistribution):
        return (distribution.high - distribution.low) // distribution.step + 1
    assert isinstance(distribution, FloatDistribution)  # noqa: S101 - Optuna has no other
    if distribution.step is None:
        return 1 if distribution.low == distribution.high else None
    span = Decimal(repr(distribution.high)) - Decimal(repr(distribution.low))
    return round(span / Decimal(repr(distribution.step))) + 1


def _value_at(distribution: BaseDistribution, position: int) -> Any:
    if isinstance(distribution, CategoricalDistribution):
        return distribution.choices[position]
    assert isinstance(distribution, (IntDistribution, FloatDistribution))  # noqa: S101 - no other
    if isinstance(distribution, IntDistribution):
        return distribution.low + position * distribution.step
    step = Decimal(repr(distribution.step or 0.0))
    return float(Decimal(repr(distribution.low)) + position * step)
