"""What a terminal, or a pipe, shows of a running sweep."""

from __future__ import annotations

import dataclasses
import io
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from tests.fakes import fake_events, fake_sweep, replay

from heats.record import SweepRecord
from heats.trial import AttemptLost, Event, SweepStarted, TrialEnded
from heats.view import LiveView, final_summary

if TYPE_CHECKING:
    import pytest


def recent_events(*, is_ended: bool = False, study_name: str = "digits") -> list[Event]:
    """The fake sweep, moved so that its last event is now."""
    events = fake_events(is_ended=is_ended, study_name=study_name)
    shift = time.time() - events[-1].time_s
    return [dataclasses.replace(event, time_s=event.time_s + shift) for event in events]


def terminal(width: int, height: int = 30) -> Console:
    return Console(
        file=io.StringIO(), force_terminal=True, width=width, height=height, color_system=None
    )


def pipe() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, highlight=False)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def wait_for(console: Console, text: str) -> None:
    deadline = time.monotonic() + 5
    while text not in written(console) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert text in written(console)


def test_terminal_shows_counts_best_and_running_trials() -> None:
    record = replay(recent_events(study_name="[red]digits"))
    console = terminal(100)
    with LiveView(lambda: record, num_trials=60, num_lanes=4, rungs=(1, 3, 9), console=console):
        pass
    shown = written(console)
    assert "[red]digits  36/60 trials" in shown
    assert "left" in shown
    assert "15 complete, 20 pruned, 1 failed, 4 running" in shown
    assert "best val_loss 0.06542 by trial 29" in shown
    assert "2/3" in shown
    assert "optimizer" in shown


def test_narrow_terminal_never_wraps() -> None:
    record = replay(recent_events())
    console = terminal(60)
    with LiveView(lambda: record, num_trials=60, num_lanes=4, rungs=(1, 3, 9), console=console):
        pass
    lines = written(console).splitlines()
    assert any("trial  epoch  rung  val_loss    age" in line for line in lines)
    frame = lines[: len(lines) // 2]
    assert len(frame) < 15


def test_more_running_trials_than_lines_are_counted() -> None:
    events = [e for e in recent_events(is_ended=True) if not isinstance(e, TrialEnded)]
    record = replay(events)
    console = terminal(80, height=16)
    with LiveView(lambda: record, console=console):
        pass
    assert "+34" in written(console)


def test_status_is_shown_before_the_first_trial() -> None:
    console = terminal(60)
    with LiveView(lambda: None, console=console) as view:
        view.status("starting Ray")
    assert "starting Ray" in written(console)


def test_pipe_gets_one_line_for_each_ended_trial_without_ansi() -> None:
    events = recent_events(is_ended=True)
    start = events[0]
    assert isinstance(start, SweepStarted)
    record = SweepRecord(start=start)
    console = pipe()
    with LiveView(lambda: record, num_trials=40, console=console) as view:
        view.status("starting 4 lanes")
        now = time.time() + 1
        for event in events:
            record.apply(dataclasses.replace(event, time_s=now))
    lines = written(console).splitlines()
    assert "starting 4 lanes" in lines[0]
    assert len([line for line in lines if "trials]" in line]) == 40
    assert any("trial 7 failed  RuntimeError: <shape> [4, 3]" in line for line in lines)
    assert "\x1b" not in written(console)


def test_pipe_hears_of_a_long_silence() -> None:
    record = replay(recent_events())
    console = pipe()
    with LiveView(lambda: record, num_trials=60, console=console, quiet_s=0.1):
        wait_for(console, "36/60 trials; 15 complete")


def test_resumed_sweep_does_not_repeat_trials_that_ended_before() -> None:
    record = replay(fake_events(is_ended=False))
    console = pipe()
    with LiveView(lambda: record, num_trials=40, console=console):
        time.sleep(0.3)
    assert written(console) == ""


def test_lost_lane_is_told() -> None:
    record = replay(recent_events())
    for console in (pipe(), terminal(80)):
        with LiveView(lambda: record, console=console) as view:
            lost = AttemptLost(time_s=1.0, trial=3, attempt=0, reason="Lane 1 lost\nrank 0 died")
            view.on_event(lost)
        assert "trial 3 starts again: rank 0 died" in written(console)


def test_broken_record_or_closed_pipe_does_not_reach_the_sweep() -> None:
    def broken() -> SweepRecord:
        msg = "no record"
        raise ValueError(msg)

    for console in (pipe(), terminal(80)):
        with LiveView(broken, console=console) as view:
            console.file.close()
            view.status("goes on")


def test_record_may_grow_while_it_is_shown() -> None:
    events = recent_events(is_ended=True)
    record = replay(events[:1])
    console = terminal(80)

    def drive() -> None:
        for event in events[1:]:
            record.apply(event)

    driver = threading.Thread(target=drive)
    with LiveView(lambda: record, num_trials=40, console=console):
        driver.start()
        driver.join()
    assert "40/40 trials" in written(console)


def test_summary_names_result_and_next_commands() -> None:
    text = final_summary(fake_sweep(), Path("mlruns/sweeps/digits")).plain
    assert "digits finished after 1:19: all trials ended" in text
    assert "15 complete, 24 pruned, 1 failed" in text
    assert "trial 29, val_loss 0.06542" in text
    assert "hidden      13" in text
    assert "  heats report digits " in text
    assert "  heats promote digits " in text
    assert "--root" not in text
    assert "resume" not in text


def test_summary_of_an_interrupted_sweep_elsewhere_offers_resume(tmp_path: Path) -> None:
    sweep_dir = tmp_path / "my runs" / "sweeps" / "digits"
    text = final_summary(fake_sweep(is_ended=False), sweep_dir, elapsed_s=75).plain
    assert "digits stopped early after 1:15" in text
    assert f"heats resume digits --root '{tmp_path / 'my runs'}'" in text


def test_summary_without_complete_trial_asks_to_look_why() -> None:
    text = final_summary(fake_sweep(num_trials=0), Path("mlruns/sweeps/digits")).plain
    assert "none: no trial is complete" in text
    assert "promote" not in text


def test_summary_is_not_cut_in_a_narrow_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    text = final_summary(fake_sweep(), Path("mlruns/sweeps/digits"))
    Console(width=20).print(text, soft_wrap=True)
    assert "heats promote digits  register the best checkpoint" in capsys.readouterr().out


def test_summary_offers_no_promotion_that_would_be_refused() -> None:
    start, *rest = fake_events(4)
    assert isinstance(start, SweepStarted)
    record = replay([dataclasses.replace(start, settings={"promotion": {"evaluate": None}}), *rest])
    assert record.best() is not None
    assert "promote" not in final_summary(record, Path("mlruns/sweeps/digits")).plain
