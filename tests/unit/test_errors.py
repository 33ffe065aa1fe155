from __future__ import annotations

import pickle

import pytest

from heats import errors

ALL = [
    each
    for each in vars(errors).values()
    if isinstance(each, type) and issubclass(each, BaseException)
]


@pytest.mark.parametrize("kind", ALL)
def test_error_crosses_process_borders_whole(kind: type[BaseException]) -> None:
    error = kind("lr=0 is not valid: give more than 0")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == str(error)


def test_stop_is_no_exception_that_user_code_would_swallow() -> None:
    assert not issubclass(errors.TrialStoppedError, Exception)
