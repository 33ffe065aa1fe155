"""What the documents say of the configuration is what the schema says."""

from __future__ import annotations

import dataclasses
import re
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from heats.config import AppConf, SweepConf

REPO = Path(__file__).parents[2]
ROW = re.compile(r"^\| `(?P<key>[\w.]+)` \| `(?P<default>[^`]+)` \|", re.MULTILINE)
DOCUMENTS = sorted([*REPO.glob("*.md"), *REPO.glob("docs/*.md"), *REPO.glob("deploy/*.md")])


def documented() -> dict[str, str]:
    """Key to the text of its default, of every row in docs/configuration.md."""
    text = (REPO / "docs" / "configuration.md").read_text(encoding="utf-8")
    rows = ROW.findall(text)
    assert len(rows) == len(dict(rows)), "a key has two rows"
    return dict(rows)


def schema() -> dict[str, Any]:
    """Key to default, as docs/configuration.md writes keys."""
    app, sweep = flat(AppConf()), flat(SweepConf())
    # `seed` is the recipe's in the app, and the sampler's in the sweeper: two settings.
    own = {f"hydra.sweeper.{key}": sweep[key] for key in {*sweep.keys() - app.keys(), "seed"}}
    return {**app, **own}


def flat(conf: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted key to default, of a dataclass and those in it."""
    found: dict[str, Any] = {}
    for spec in dataclasses.fields(conf):
        value = getattr(conf, spec.name)
        if dataclasses.is_dataclass(value):
            found |= flat(value, f"{prefix}{spec.name}.")
        else:
            found[prefix + spec.name] = value
    return found


def is_default(text: str, value: object) -> bool:
    """Whether a document's text is this default."""
    if value is None or isinstance(value, bool):
        return text == {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Enum):
        return text == value.name
    if isinstance(value, float):
        return float(text) == value
    return text == str(value)


def test_every_key_of_the_schema_is_documented_and_no_other() -> None:
    assert documented().keys() == schema().keys()


@pytest.mark.parametrize(("key", "value"), sorted(schema().items()))
def test_documented_default_is_the_real_one(key: str, value: object) -> None:
    assert is_default(documented()[key], value), f"{key} is {value!r}, not {documented()[key]}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text(encoding="utf-8"))
    missing = [target for target in targets if not (document.parent / target).exists()]
    assert missing == []
