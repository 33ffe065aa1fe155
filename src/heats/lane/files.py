"""Hydra's files of a job: YAML as OmegaConf writes it, at a fraction of the price."""

from __future__ import annotations

import pickle
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from pathlib import Path

_HEAD = "hydra:\n"


def save_config(config: Any, path: Path) -> None:
    """Write what `OmegaConf.to_yaml(config)` says."""
    from omegaconf import OmegaConf

    content = OmegaConf.to_container(config, resolve=False, enum_to_str=True)
    path.write_text(_yaml(content), encoding="utf-8")


def _yaml(content: Any) -> str:
    """The content as YAML, put together of blocks that earlier jobs had too.

    The block of a key does not depend on its neighbours, and most are the same in every trial.
    """
    match content:
        case {"hydra": dict(node), **others} if node and not others:
            blocks = (_block(pickle.dumps({"hydra": {key: node[key]}})) for key in node)
            return _HEAD + "".join(block.removeprefix(_HEAD) for block in blocks)
        case dict() if content:
            return "".join(_block(pickle.dumps({key: content[key]})) for key in content)
    return _dumped(content)


@lru_cache(maxsize=512)
def _block(pickled: bytes) -> str:
    return _dumped(pickle.loads(pickled))


def _dumped(content: Any) -> str:
    """By libyaml where it is there: ten times faster."""
    options: dict[str, Any] = {"default_flow_style": False, "sort_keys": False}
    text: str = yaml.dump(content, Dumper=_dumper(), allow_unicode=True, **options)
    return text


@cache
def _dumper() -> Any:
    from omegaconf._utils import OmegaConfDumper

    class Dumper(getattr(yaml, "CDumper", yaml.Dumper)):  # type: ignore[misc]
        """OmegaConf's, on libyaml."""

    Dumper.add_representer(str, OmegaConfDumper.str_representer)
    return Dumper
