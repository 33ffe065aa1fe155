"""The HTML report: one file, complete, and nothing in it that a name could run."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from typing import TYPE_CHECKING

import pytest
from tests.fakes import fake_events, fake_start, fake_sweep, replay

from heats.analysis.report import command_line, log_report, render_report, write_report
from heats.tracking.provenance import Provenance
from heats.trial import TrialAsked, TrialEnded

if TYPE_CHECKING:
    from pathlib import Path

EVIL = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def html() -> str:
    origin = Provenance(
        commit="0123456789abcdef",
        branch="main",
        is_dirty=True,
        diff="",
        python="3.11",
        platform="linux",
        packages={},
    )
    return render_report(fake_sweep(), state="finished", origin=origin)


def body(html: str) -> str:
    """The page without plotly.js itself."""
    return "".join(re.split(r"<script>/\*\*.*?</script>", html, flags=re.DOTALL))


def test_report_names_facts_and_best_trial(html: str) -> None:
    page = body(html)
    for text in (
        "<h1>digits</h1>",
        "python sweep.py -m &#39;lr=tag(log,interval(1e-4,1))&#39; batch_size=16,32,64",
        "minimize val_loss",
        "0.06542",
        "0123456789ab, with uncommitted changes",
        "0.0001 to 1, log",
        "run-29/checkpoint_000027",
        " at rung 3<",
    ):
        assert text in page


def test_report_loads_nothing_from_elsewhere(html: str) -> None:
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)=", body(html))
    assert html.count("plotly.js v") == 1


def test_charts_are_valid_json(html: str) -> None:
    found = re.findall(r'<script type="application/json" id="data-(\w+)">(.*?)</script>', html)
    assert [key for key, _ in found] == [
        "history", "curves", "parallel", "importance", "slices", "timeline",
    ]  # fmt: skip
    assert all("data" in json.loads(text) for _, text in found)


def test_names_from_users_are_never_markup() -> None:
    events = [
        dataclasses.replace(event, params={EVIL: EVIL, "lr": event.params["lr"]})
        if isinstance(event, TrialAsked)
        else dataclasses.replace(event, error=f"ValueError: {EVIL}")
        if isinstance(event, TrialEnded)
        else event
        for event in fake_events(8)
    ]
    events[0] = fake_start(EVIL, argv=("sweep.py", EVIL), fixed=(EVIL,), experiment=EVIL)
    html = render_report(replay(events), state="finished")
    assert EVIL not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html


def test_sweep_without_trials_still_has_a_report(tmp_path: Path) -> None:
    path = write_report(fake_sweep(num_trials=0), tmp_path / "new" / "r.html", state="running")
    page = path.read_text(encoding="utf-8")
    assert "No trial has started yet." in page
    assert [entry.name for entry in path.parent.iterdir()] == ["r.html"]


def test_command_line_of_a_module_and_of_a_notebook() -> None:
    module = fake_start(module="my.app", argv=("/x/my/app.py", "-m", "lr=1,2"))
    assert command_line(replay([module])) == "python -m my.app -m lr=1,2"
    assert command_line(replay([fake_start(argv=())])) == ""


def test_report_that_cannot_be_logged_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record = replay([fake_start(tracking_uri="http://me:secret@127.0.0.1:9")])
    with caplog.at_level(logging.WARNING):
        assert not log_report(record, tmp_path / "r.html", root=tmp_path)
    assert "http://me:***@127.0.0.1:9" in caplog.text
    assert f"It is at {tmp_path / 'r.html'}" in caplog.text
    assert "secret" not in caplog.text
