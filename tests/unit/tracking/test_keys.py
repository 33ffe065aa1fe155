from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heats.tracking.keys import MAX_KEY_CHARS, mlflow_key, original_key


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("lr", "lr"),
        ("opt.lr", "opt.lr"),
        ("val/loss", "val/loss"),
        ("grid_x", "grid_x"),
        ("größe", "größe"),
        ("+a", "_x2B_a"),
        ("layers[0]", "layers_x5B_0_x5D_"),
        ("🔥", "_x1F525_"),
        ("a\n", "a_xA_"),
        ("/abs", "_x2F_abs"),
        ("..", "_x2E__x2E_"),
        ("", "_x_"),
        ("_x2B_a", "_x5F_x2B_a"),
    ],
)
def test_a_key_gets_a_name_that_mlflow_takes(key: str, name: str) -> None:
    assert mlflow_key(key) == name
    assert original_key(name) == key


def test_no_short_key_loses_its_way_back() -> None:
    for size in range(7):
        for letters in product("_x5+./", repeat=size):
            key = "".join(letters)
            assert original_key(mlflow_key(key)) == key


@settings(deadline=None)
@given(st.text(max_size=30))
def test_any_key_is_accepted_by_mlflow_and_comes_back(key: str) -> None:
    from mlflow.utils.validation import _validate_metric_name, _validate_param_name

    _validate_metric_name(mlflow_key(key))  # type: ignore[no-untyped-call]
    _validate_param_name(mlflow_key(key))  # type: ignore[no-untyped-call]
    assert original_key(mlflow_key(key)) == key


def test_long_keys_are_cut_and_stay_different() -> None:
    names = {mlflow_key("k" * 300), mlflow_key("k" * 301), mlflow_key("\udcff" * 99)}
    assert len(names) == 3
    assert all(len(name) <= MAX_KEY_CHARS for name in names)
