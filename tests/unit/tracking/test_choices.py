from __future__ import annotations

import pytest
from tests.fakes import fake_start

from heats.errors import ConfigError
from heats.record import SweepRecord
from heats.tracking.choices import Choices, model_name, promotion_settings


def _record(study_name: str = "digits", **promotion: object) -> SweepRecord:
    return SweepRecord(start=fake_start(study_name, settings={"promotion": promotion}))


def test_choices_stand_in_for_settings() -> None:
    record = _record(evaluate="a.evaluate", predictor="a.predictor", tolerance=0.1, later=1)
    settings = promotion_settings(record, Choices(predictor="b", example="b.example"))
    assert (settings.evaluate, settings.predictor) == ("a.evaluate", "b")
    assert (settings.example, settings.tolerance) == ("b.example", 0.1)


def test_missing_settings_are_named_with_the_options_that_replace_them() -> None:
    with pytest.raises(ConfigError, match=r"promotion\.evaluate and promotion\.predictor") as error:
        promotion_settings(_record(), Choices())
    assert "--evaluate DOTTED.PATH --predictor DOTTED.PATH" in str(error.value)


@pytest.mark.parametrize(
    ("chosen", "configured", "name"),
    [("mine", "theirs", "mine"), (None, "theirs", "theirs"), (None, None, "digits")],
)
def test_model_is_named_by_choice_then_settings_then_study(
    chosen: str | None, configured: str | None, name: str
) -> None:
    record = _record(evaluate="a.b", predictor="c", model=configured)
    choices = Choices(model=chosen)
    assert model_name(record, promotion_settings(record, choices), choices) == name


@pytest.mark.parametrize("name", ["a/b", "a:b", "../up", ".", "a@b", "a'b", "a\n", "x" * 201])
def test_name_that_is_no_model_name_is_bad_input(name: str) -> None:
    record = _record(evaluate="a.b", predictor="c")
    choices = Choices(model=name)
    with pytest.raises(ConfigError, match="--model="):
        model_name(record, promotion_settings(record, choices), choices)
