"""The schema as Hydra takes it, and checked settings out of a composed config.

This module is imported at every start of every Hydra app through the plugin: nothing heavy here.
"""

from __future__ import annotations

import dataclasses
import json
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from heats.config import SweepConf
from heats.errors import ConfigError, unknown_name

if TYPE_CHECKING:
    from omegaconf import DictConfig

T = TypeVar("T")


def sweeper_node() -> dict[str, Any]:
    """The defaults of `SweepConf` as plain containers, for Hydra's config store.

    Plain, because OmegaConf refuses an interpolation such as `asha: ${asha}` where a node is typed;
    `sweep_conf` checks names and types afterwards.
    """
    from omegaconf import OmegaConf

    node = OmegaConf.to_container(OmegaConf.structured(SweepConf), enum_to_str=True)
    assert isinstance(node, dict)  # noqa: S101 - narrows the union that OmegaConf declares
    return {
        "_target_": "hydra_plugins.heats_sweeper.heats_sweeper.HeatsSweeper",
        "_recursive_": False,
        **{str(key): value for key, value in node.items()},
    }


def sweep_conf(node: DictConfig) -> SweepConf:
    """`SweepConf` from a composed `hydra.sweeper` node; interpolations are resolved.

    Raises:
        ConfigError: An unknown key (the known ones are listed, nearest first) or a wrong value.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    values = OmegaConf.to_container(node, resolve=True)
    assert isinstance(values, dict)  # noqa: S101 - narrows the union that OmegaConf declares
    known = {spec.name for spec in dataclasses.fields(SweepConf)}
    values = {key: value for key, value in values.items() if not str(key).startswith("_")}
    for key in values:
        if key not in known:
            raise unknown_name("key under hydra.sweeper", str(key), known)  # noqa: EM101
    try:
        merged = OmegaConf.merge(OmegaConf.structured(SweepConf), values)
        conf = OmegaConf.to_object(merged)
    except OmegaConfBaseException as exc:
        key = getattr(exc, "full_key", None) or "hydra.sweeper"
        msg = f"{key} is not valid: {str(exc).splitlines()[0]}"
        raise ConfigError(msg) from exc
    assert isinstance(conf, SweepConf)  # noqa: S101 - to_object gives the structured type
    return conf


def section(kind: type[T], config: DictConfig, name: str) -> T:
    """A section under `hydra.sweeper` of a trial's own config, or its defaults; all is resolved.

    Raises:
        ConfigError: A value is wrong, or what it points to is not there.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        node = OmegaConf.select(config, f"hydra.sweeper.{name}")
        if node is None:
            return kind()
        values = OmegaConf.to_container(node, resolve=True, enum_to_str=True)
        text = json.dumps(values, sort_keys=True)
    except (OmegaConfBaseException, TypeError, ValueError) as exc:
        msg = f"hydra.sweeper.{name} is not valid: {str(exc).splitlines()[0]}"
        raise ConfigError(msg) from exc
    cached: Any = _section  # Types are hashable, which mypy does not know of a type variable.
    conf: T = cached(kind, text, name)
    return conf


@lru_cache(maxsize=64)
def _section(kind: type, values: str, name: str) -> Any:
    """Checked once for all trials that agree in it: it takes a millisecond."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        merged = OmegaConf.merge(OmegaConf.structured(kind), json.loads(values))
        conf = OmegaConf.to_object(merged)
    except OmegaConfBaseException as exc:
        key = getattr(exc, "full_key", None)
        msg = f"{name}{'.' + key if key else ''} is not valid: {str(exc).splitlines()[0]}"
        raise ConfigError(msg) from exc
    return conf
