from __future__ import annotations

import os

import pytest
from hydra.errors import MissingConfigException
from omegaconf.errors import ValidationError

from heats.entry import clear_errors
from heats.errors import ConfigError, LedgerError, SweepLockedError

FULL = "HYDRA_FULL_ERROR"


@pytest.fixture(autouse=True)
def short_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FULL, raising=False)


def raising(error: BaseException) -> None:
    @clear_errors
    def main() -> None:
        raise error

    main()


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("lr=0 is not valid: give more"),
        LedgerError("lr=0 is not valid: give more"),
        SweepLockedError("lr=0 is not valid: give more"),
        MissingConfigException("lr=0 is not valid: give more"),
        ValidationError("lr=0 is not valid: give more"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        raising(error)
    assert left.value.code == 2
    told = capsys.readouterr()
    assert "lr=0 is not valid: give more" in told.err
    assert "Traceback" not in told.err
    assert told.out == ""
    assert FULL not in os.environ


def test_interrupt_ends_the_process_without_a_traceback() -> None:
    with pytest.raises(SystemExit) as raised:
        raising(KeyboardInterrupt())
    assert raised.value.code == 130
    assert FULL not in os.environ


@pytest.mark.parametrize("error", [ZeroDivisionError("train"), SystemExit(130)])
def test_everything_else_is_raised_as_it_is(error: BaseException) -> None:
    with pytest.raises(type(error)) as raised:
        raising(error)
    assert raised.value is error
    assert FULL not in os.environ


def test_hydras_full_error_raises_bad_input_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FULL, "1")
    with pytest.raises(ConfigError):
        raising(ConfigError("lr"))
    assert os.environ[FULL] == "1"


def test_main_keeps_its_name_its_value_and_hears_hydras_errors() -> None:
    @clear_errors
    def main() -> str | None:
        """The app."""
        return os.environ.get(FULL)

    assert main() == "1"
    assert (main.__name__, main.__doc__) == ("main", "The app.")
    assert FULL not in os.environ
