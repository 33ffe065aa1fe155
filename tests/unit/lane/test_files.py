from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

import pytest
from omegaconf import OmegaConf

from heats.lane.files import save_config

if TYPE_CHECKING:
    from pathlib import Path


class Color(Enum):
    red = 1


CONTENTS: list[Any] = [
    {},
    [],
    ["lr=0.1", "name='a b'"],
    {"lr": 0.1},
    {"hydra": {}},
    {"hydra": {"job": {"num": 3, "config": {"exclude": []}}, "env": None, "on": "yes"}},
    {"a b: c": {"1e3": "1e3", "x": ["y", {"z": "${a}"}]}},
    {"model": {"name": "m"}, "lr": 0.1, "missing": "???", "color": Color.red},
    {"text": {"lines": "one\ntwo\n", "long": "word " * 60, "odd": "\u00e9: #", 5: True}},
    {"x" * 200: {"y": 1}},
]


@pytest.mark.parametrize("content", CONTENTS)
def test_file_says_what_omegaconf_says(tmp_path: Path, content: Any) -> None:
    config, path = OmegaConf.create(content), tmp_path / "config.yaml"
    for _ in range(2):  # The second time its blocks are known.
        save_config(config, path)
        assert path.read_text(encoding="utf-8") == OmegaConf.to_yaml(config)


def test_changed_block_is_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "hydra.yaml"
    for number in (1, 2):
        config = OmegaConf.create({"hydra": {"job": {"num": number}, "env": {"set": {}}}})
        save_config(config, path)
        assert path.read_text(encoding="utf-8") == OmegaConf.to_yaml(config)
