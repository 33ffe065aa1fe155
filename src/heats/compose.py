"""The config of each trial, as Hydra would compose it, at a fraction of the price.

Hydra's full composition costs 30 to 100 ms. It is paid once for each combination of config-group
choices; everything else of a trial's overrides is applied to a copy, by Hydra's own code.

Problems become one `ConfigError` here (`config_error`), also those that Hydra itself raises.
Hydra and OmegaConf are imported late, so that an entry point can have `config_error` for nothing.
"""

from __future__ import annotations

import copy
import difflib
import pickle
import re
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from heats.errors import ConfigError, unknown_name
from heats.grammar import remember_interpolations

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hydra.core.config_loader import ConfigLoader
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import Override
    from hydra.errors import ConfigCompositionException, OverrideParseException
    from omegaconf import DictConfig
    from omegaconf.errors import OmegaConfBaseException

MAX_BASES = 256
MAX_LISTED_KEYS = 30
_MISSPELT = 0.75
"""How alike (difflib's ratio) a key must be to a known one to be taken for a mistake."""


class Composer:
    """Composes the config of one trial after another.

    Equal to `ConfigLoader.load_sweep_config` followed by what Hydra's launcher sets
    (`hydra.job.num`, `hydra.job.id`); a property test holds it to that.
    """

    def __init__(
        self, config_loader: ConfigLoader, master_config: DictConfig, fixed: Sequence[str] = ()
    ) -> None:
        """Prepare; nothing is composed yet.

        Args:
            config_loader: Hydra's, as a sweeper gets it in its `hydra_context`.
            master_config: The sweep's config with its `hydra` node, as a sweeper gets it.
            fixed: Overrides that every trial has after its own.

        Raises:
            ConfigError: A fixed override cannot be read.
        """
        remember_interpolations()
        self._loader = config_loader
        self._master = master_config
        self._bases: dict[_BaseKey, _Base] = {}
        self._is_group: dict[str, bool] = {}
        self._fixed = _parse(fixed)
        self._num_fixed_task = sum(not o.is_hydra_override() for o in self._fixed)
        self._hydra_overrides = [
            *map(str, master_config.hydra.overrides.hydra),
            *(str(o.input_line) for o in self._fixed if o.is_hydra_override()),
        ]

    def compose(self, overrides: Sequence[str], *, number: int) -> DictConfig:
        """The config of a trial, with its `hydra` node; its own, to be changed at will.

        Args:
            overrides: Of this trial; the fixed ones follow them.
            number: Trial number; becomes `hydra.job.num` and, as text, `hydra.job.id`.

        Raises:
            ConfigError: The overrides do not fit the config; the message names key and remedy.
        """
        from hydra._internal.config_loader_impl import get_overrides_dirname
        from omegaconf import OmegaConf, open_dict

        own = _parse(overrides)
        # Hydra's loader takes the same two steps: the defaults list, then all others in order.
        later = [o for o in own if not self._is_in_base(o)]
        fixed_later = [o for o in self._fixed if not self._is_in_base(o)]
        task = [o for o in (*own, *self._fixed) if not o.is_hydra_override()]
        lines = [str(o.input_line) for o in (*own, *self._fixed) if self._is_in_base(o)]
        is_apart = _are_apart(later, fixed_later)
        base = self._base(_BaseKey(tuple(lines), len(task) if is_apart else None))
        config = base.copy()
        _apply(later if is_apart else [*later, *fixed_later], config)
        hydra = config.hydra
        with open_dict(hydra):
            if is_apart:
                for index in range(len(task) - self._num_fixed_task):
                    hydra.overrides.task[index] = task[index].input_line
            else:
                hydra.overrides.task = [o.input_line for o in task]
            hydra.job.override_dirname = get_overrides_dirname(overrides=task, **base.dirname)
            hydra.job.num = number
            hydra.job.id = str(number)
        # As `load_sweep_config` does: `${now:}` and the like are the same in every trial.
        OmegaConf.copy_cache(from_config=self._master, to_config=config)
        return config

    def known_keys(self) -> list[str]:
        """Dotted keys that an override can change, Hydra's own left out."""
        return list(_dotted_keys(self._master))

    def group_options(self, group: str) -> list[str]:
        """Options of a config group; empty where there is no such group."""
        return self._loader.get_group_options(
            group,
            config_name=self._master.hydra.job.config_name,
            overrides=self._hydra_overrides,
        )

    def _base(self, key: _BaseKey) -> _Base:
        """The full composition that a trial's own values go into."""
        from omegaconf import open_dict

        base = self._bases.get(key)
        if base is None:
            try:
                config = self._loader.load_sweep_config(self._master, list(key.overrides))
            except Exception as exc:  # Hydra raises many types, all of them about the config.
                raise config_error(exc, self.known_keys()) from exc
            if key.num_task is not None:
                _apply([o for o in self._fixed if not self._is_in_base(o)], config)
                fixed = [o.input_line for o in self._fixed if not o.is_hydra_override()]
                with open_dict(config.hydra):
                    config.hydra.overrides.task = [""] * (key.num_task - len(fixed)) + fixed
            if len(self._bases) >= MAX_BASES:
                del self._bases[next(iter(self._bases))]
            base = self._bases[key] = _Base(config)
        return base

    def _is_in_base(self, override: Override) -> bool:
        return override.is_hydra_override() or self._chooses_group(override)

    def _chooses_group(self, override: Override) -> bool:
        """Whether an override is about the defaults list, by Hydra's own rule."""
        group = override.key_or_group
        if group not in self._is_group:
            self._is_group[group] = bool(
                self._loader.get_group_options(
                    group,
                    results_filter=None,
                    config_name=self._master.hydra.job.config_name,
                    overrides=self._hydra_overrides,
                )
            )
        return self._is_group[group] and not isinstance(override.value(), dict)


class _BaseKey(NamedTuple):
    """What a base is composed of.

    `overrides` choose groups or are Hydra's own. With `num_task` the fixed overrides are in it as
    well, and room for so many lines of what a trial overrides; None: they follow the trial's own.
    """

    overrides: tuple[str, ...]
    num_task: int | None


class _Base:
    """A composed config to take copies of; `dirname` is how its overrides name a folder.

    Unpickling is four times faster than a deep copy; a config whose classes cannot be pickled is
    copied deeply.
    """

    def __init__(self, config: DictConfig) -> None:
        from omegaconf import OmegaConf

        OmegaConf.clear_cache(config)  # Every copy gets the master's.
        how = config.hydra.job.config.override_dirname
        self.dirname: dict[str, Any] = {
            "kv_sep": how.kv_sep,
            "item_sep": how.item_sep,
            "exclude_keys": how.exclude_keys,
        }
        self._config = config
        self._pickled: bytes | None = None
        try:
            self._pickled = pickle.dumps(config)
            self.copy()
        except Exception:  # noqa: BLE001 - a class may raise anything here; a deep copy will do
            self._pickled = None

    def copy(self) -> DictConfig:
        if self._pickled is None:
            return copy.deepcopy(self._config)
        config: DictConfig = pickle.loads(self._pickled)
        return config


def config_error(exc: Exception, known: Iterable[str] = ()) -> ConfigError:
    """One message for people, for anything that Hydra or OmegaConf raises about a config.

    It names key, value and remedy, and lists the known names, nearest first, for an unknown one.

    Args:
        exc: What was raised; a `ConfigError` among its causes is returned as it is.
        known: Dotted keys of the config, for misspelt ones.
    """
    from hydra.errors import (
        ConfigCompositionException,
        MissingConfigException,
        OverrideParseException,
    )
    from omegaconf.errors import OmegaConfBaseException

    causes = list(_causes(exc))
    for cause in causes:
        if isinstance(cause, ConfigError):
            return cause
    if isinstance(exc, OverrideParseException):
        return _unreadable(exc)
    if isinstance(exc, MissingConfigException) and exc.options and exc.missing_cfg_file:
        group, _, option = exc.missing_cfg_file.rpartition("/")
        return unknown_name(f"option of config group {group!r}", option, exc.options)
    from_omegaconf = next((c for c in causes if isinstance(c, OmegaConfBaseException)), None)
    if isinstance(exc, ConfigCompositionException):
        return _not_composable(exc, from_omegaconf, known)
    if from_omegaconf is not None:
        return _wrong_value(from_omegaconf, known)
    lines = _lines(str(exc)) or [type(exc).__name__]
    return ConfigError(f"The config cannot be composed: {' '.join(lines)[:400]}")


def _not_composable(
    exc: ConfigCompositionException, cause: OmegaConfBaseException | None, known: Iterable[str]
) -> ConfigError:
    from omegaconf.errors import ConfigAttributeError, ConfigKeyError

    key = re.match(r"Could not override '(.+?)'\.", str(exc))
    if key and isinstance(cause, (ConfigAttributeError, ConfigKeyError)):
        names = list(known) or _siblings(key[1], cause)
        error = _unknown_key(key[1], names)
        if difflib.get_close_matches(key[1], names, n=1, cutoff=_MISSPELT):
            return error
        return ConfigError(f"{error} To add a new key, write +{key[1]}=...")
    missing = re.match(r"Could not delete from config\. '(.+?)' does not exist", str(exc))
    if missing:
        known = list(known)
        if missing[1] in known:  # Hydra takes null for absent.
            return ConfigError(f"~{missing[1]} deletes nothing: {missing[1]!r} is null already.")
        return _unknown_key(missing[1], known)
    override = re.match(r"Error merging override ([^=]+)=(.*)", str(exc), re.DOTALL)
    if override and cause is not None:
        value = f"{override[1].lstrip('+')}={override[2]:.80}"
        return ConfigError(f"{value} is not valid: {_reason(cause)}. Give a value of that type.")
    lines = _lines(str(exc))
    if cause is not None and not lines:
        return _wrong_value(cause, known)
    message = " ".join(lines) or type(exc).__name__
    return ConfigError(f"The config cannot be composed: {message[:400]}")


def _wrong_value(exc: OmegaConfBaseException, known: Iterable[str]) -> ConfigError:
    from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue

    key = str(getattr(exc, "full_key", None) or "the config")
    if isinstance(exc, MissingMandatoryValue):
        return ConfigError(f"{key} has no value. Give one: {key}=...")
    if isinstance(exc, (ConfigAttributeError, ConfigKeyError)):
        return _unknown_key(key, known)
    return ConfigError(f"{key} is not valid: {_reason(exc)}. Correct it in the config.")


def _unknown_key(key: str, known: Iterable[str]) -> ConfigError:
    """Few known keys are listed all; of many the nearest, and those beside the place it names."""
    names = set(known)
    if len(names) > MAX_LISTED_KEYS:
        parent = key.rpartition(".")[0]
        beside = sorted(name for name in names if name.rpartition(".")[0] == parent)
        near = difflib.get_close_matches(key, sorted(names), n=5, cutoff=0.5)
        names = {*near, *beside[:MAX_LISTED_KEYS]}
    return unknown_name("config key", key, names)


def _siblings(key: str, exc: OmegaConfBaseException) -> list[str]:
    """Dotted keys beside a missing one, which the error knows where the whole config is not."""
    prefix = key.rpartition(".")[0]
    node = getattr(exc, "parent_node", None)
    names = [str(name) for name in node] if isinstance(node, Iterable) else []
    return [f"{prefix}.{name}" if prefix else name for name in names if name != "hydra"]


def _unreadable(exc: OverrideParseException) -> ConfigError:
    key, _, value = exc.override.partition("=")
    lines = [line for line in _lines(exc.message) if not line.startswith("Error parsing override")]
    reason = " ".join(lines).replace(exc.override, "").removeprefix("LexerNoViableAltException:")
    if "NoneType" in reason and "choice(" in value:
        remedy = f"Write null among plain values: {key}=null,a,b"
    else:
        remedy = (
            f"Write {key}=a,b or {key}=range(1,4) or {key}=interval(0.1,1) to sweep, and quote "
            f"text with special characters: {key}='a,b'"
        )
    told = reason.strip()[:200] or "the grammar has no such form"
    return ConfigError(f"{key:.80}={value:.80} cannot be read: {told}. {remedy}.")


def _reason(exc: OmegaConfBaseException) -> str:
    """What OmegaConf says, without its lines on full key and types."""
    reason = (_lines(str(exc)) or [type(exc).__name__])[0].rstrip(".")
    return reason if len(reason) <= 200 else f"{reason[:120]} ... {reason[-70:]}"


def _lines(message: str) -> list[str]:
    lines = (line.strip() for line in message.splitlines())
    return [line for line in lines if line.strip("^") and not line.startswith("See https")]


def _causes(exc: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = exc
    while seen is not None:
        yield seen
        seen = seen.__cause__


def _apply(overrides: list[Override], config: DictConfig) -> None:
    from hydra._internal.config_loader_impl import ConfigLoaderImpl

    try:
        ConfigLoaderImpl._apply_overrides_to_config(overrides, config)
    except Exception as exc:  # Hydra raises many types, all of them about the config.
        raise config_error(exc, _dotted_keys(config)) from exc


def _are_apart(own: list[Override], others: list[Override]) -> bool:
    """Whether it does not matter which of two lists of overrides comes first."""
    from hydra.core.override_parser.types import OverrideType

    if any(override.type is not OverrideType.CHANGE for override in own):
        return False  # What is added comes in the order in which it was added.
    keys = [f"{override.key_or_group}." for override in own]
    other_keys = [f"{override.key_or_group}." for override in others]
    return not any(
        key.startswith(other) or other.startswith(key) for key in keys for other in other_keys
    )


@cache
def _parser() -> OverridesParser:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create()


def _parse(overrides: Sequence[str]) -> list[Override]:
    from hydra.errors import HydraException

    try:
        parsed = _parser().parse_overrides(list(overrides))
    except (HydraException, RecursionError) as exc:
        raise config_error(exc) from exc
    for override in parsed:
        if override.is_sweep_override():
            msg = f"{override.input_line:.80} sweeps, but a single trial needs one value. Quote it."
            raise ConfigError(msg)
    return parsed


def _dotted_keys(config: DictConfig) -> Iterator[str]:
    """Every key of a config with its path; nothing is resolved, the `hydra` node is left out."""
    from omegaconf import OmegaConf

    def walk(node: object, prefix: str) -> Iterator[str]:
        if isinstance(node, dict):
            for key, child in node.items():
                yield f"{prefix}{key}"
                yield from walk(child, f"{prefix}{key}.")

    content = OmegaConf.to_container(config)
    assert isinstance(content, dict)  # noqa: S101 - narrows the union that OmegaConf declares
    content.pop("hydra", None)
    return walk(content, "")
