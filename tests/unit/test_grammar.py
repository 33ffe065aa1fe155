from __future__ import annotations

from importlib import import_module

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError

from heats.grammar import remember_interpolations


def test_text_that_is_known_is_resolved_anew_where_it_stands() -> None:
    remember_interpolations()
    remember_interpolations()
    OmegaConf.register_new_resolver("heats_test_sum", lambda *args: sum(args), replace=True)
    texts = {"a": "${x}", "b": "<${x}> \\${x}", "c": "${heats_test_sum:${x},2}", "d": "${.e}"}
    for x in (1, 5):
        for _ in range(2):
            config = OmegaConf.create({"x": x, "e": f"e{x}", **texts})
            assert OmegaConf.to_container(config, resolve=True) == {
                "x": x, "e": f"e{x}", "a": x, "b": f"<{x}> ${{x}}", "c": x + 2, "d": f"e{x}"
            }  # fmt: skip
    for _ in range(2):
        with pytest.raises(InterpolationResolutionError):
            _ = OmegaConf.create({"a": "${nosuch}"}).a
    assert import_module("omegaconf.base").parse.cache_info().hits >= 12
