"""What a promotion may choose, and what the sweep's settings say where it does not."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from heats.config import PromotionConf
from heats.errors import ConfigError
from heats.tracking.registry import DEFAULT_ALIAS, check_model_name

if TYPE_CHECKING:
    from pathlib import Path

    from heats.record import SweepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What a promotion may choose; None: as the sweep's settings say.

    `trial` None is the best one. `evaluate`, `predictor`, `example` and `model` stand in for the
    settings of the same name under `promotion`. `config` is a file to use as the trial's config.
    """

    trial: int | None = None
    model: str | None = None
    alias: str = DEFAULT_ALIAS
    is_forced: bool = False
    evaluate: str | None = None
    predictor: str | None = None
    example: str | None = None
    config: Path | None = None


def promotion_settings(record: SweepRecord, choices: Choices) -> PromotionConf:
    """The sweep's promotion settings, with what the caller chose instead.

    Raises:
        ConfigError: A setting that promotion cannot do without is missing.
    """
    stored = record.start.settings.get("promotion") or {}
    known = {spec.name for spec in dataclasses.fields(PromotionConf)}
    settings = PromotionConf(**{key: value for key, value in stored.items() if key in known})
    for key in ("evaluate", "predictor", "example"):
        setattr(settings, key, getattr(choices, key) or getattr(settings, key))
    missing = [key for key in ("evaluate", "predictor") if not getattr(settings, key)]
    if missing:
        keys = " and ".join(f"promotion.{key}" for key in missing)
        options = " ".join(f"--{key} DOTTED.PATH" for key in missing)
        msg = (
            f"The sweep {record.start.study_name} does not say how its models are evaluated and "
            f"served. Set {keys} in the config (in an app of your own under "
            f"hydra.sweeper) for the next sweep, and give {options} for this one."
        )
        raise ConfigError(msg)
    return settings


def model_name(record: SweepRecord, settings: PromotionConf, choices: Choices) -> str:
    """The registered model's name: the one chosen, else that of the settings, else the study's.

    Raises:
        ConfigError: It cannot be the name of a model.
    """
    named = {"--model": choices.model, "promotion.model": settings.model}
    named["study_name"] = record.start.study_name
    key, name = next((key, name) for key, name in named.items() if name)
    check_model_name(name, key)
    return name
