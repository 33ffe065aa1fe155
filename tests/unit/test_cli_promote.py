"""What is said after a promotion."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from heats.cli_promote import _promotion_text
from heats.tracking.models import Promotion

if TYPE_CHECKING:
    import pytest

FIRST = Promotion(
    model="digits",
    version="1",
    alias="champion",
    previous=None,
    study="night",
    trial=3,
    run_id="r3",
    objective="val_accuracy",
    value=0.98,
    checkpoint="checkpoint",
    tracking_uri="sqlite:///mlruns/mlflow.db",
    is_new=True,
    request='{"inputs": [[0.0]]}',
)


def test_first_version_is_served_but_cannot_be_undone() -> None:
    text = _promotion_text(FIRST)
    assert text.startswith("digits@champion is version 1 now: trial 3 of night")
    assert "curl http://127.0.0.1:5001/invocations" in text
    assert "rollback" not in text
    assert "export PATH" not in text


def test_second_version_can_be_undone() -> None:
    text = _promotion_text(dataclasses.replace(FIRST, version="2", previous="1", alias="best"))
    assert "it was version 1" in text
    assert "  heats rollback digits --alias best" in text


def test_commands_say_how_to_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert f"  export PATH={Path(sys.executable).parent}:$PATH" in _promotion_text(FIRST)
