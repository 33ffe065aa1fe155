from __future__ import annotations

import json
import math
import os
import random
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes import fake_start

from heats.config import Direction, Scheduler
from heats.errors import ConfigError, LedgerError, SweepLockedError, SweepNotFoundError
from heats.tracking.codec import decode_line, encode_event
from heats.tracking.ledger import (
    Ledger,
    check_study_name,
    find_sweep,
    is_running,
    list_sweeps,
    read_events,
    read_sweep,
    writer_pid,
)
from heats.trial import (
    AttemptLost,
    CheckpointDropped,
    Event,
    Exploited,
    Fault,
    Judged,
    Objective,
    Reported,
    RunCreated,
    SweepEnded,
    SweepResumed,
    SweepStarted,
    SystemSampled,
    TrialAsked,
    TrialEnded,
    TrialState,
    TurnPaused,
    TurnStarted,
    Verdict,
)

if TYPE_CHECKING:
    from collections.abc import Callable

FIXTURE = Path(__file__).parents[2] / "fixtures" / "ledger_v1.jsonl"


def started(name: str = "mnist", time_s: float = 1_700_000_000.0, **fields: Any) -> SweepStarted:
    values: dict[str, Any] = {
        "argv": ("sweep.py", "-m", "lr=tag(log,interval(1e-5,1e-1))", "name=é\udcff\n"),
        "cwd": "/home/me",
        "script": "sweep.py",
        "module": None,
        "objective": Objective("loss", Direction.minimize, "epoch"),
        "space": {"lr": {"low": 1e-5, "high": 0.1, "log": True}, "width": (16, 32, None)},
        "fixed": ("epochs=3",),
        "settings": {"scheduler": Scheduler.asha, "stop": {"target": -math.inf}, 3: {"$tuple": 1}},
        "config_yaml": "lr: 0.001\n",
        "experiment": "digits",
        "tracking_uri": "",
        "tags": {"team": "vision"},
    }
    return SweepStarted(study_name=name, time_s=time_s, **(values | fields))


EVENTS: list[Event] = [
    started(),
    RunCreated(time_s=1.5, trial=None, run_id="p0", artifact_dir="/a/p0"),
    TrialAsked(time_s=2.0, trial=0, params={"lr": 1e-3, "n": math.nan}, overrides=("lr=0.001",)),
    RunCreated(time_s=2.25, trial=0, run_id="r0", artifact_dir="/a/r0"),
    TurnStarted(time_s=2.5, trial=0, attempt=0),
    Reported(time_s=3.0, trial=0, index=1, resource=1, metrics={"loss": 0.1 + 0.2}),
    Reported(
        time_s=4.0,
        trial=0,
        index=2,
        resource=2,
        metrics={"loss": math.inf, "aux": -math.inf},
        checkpoint="/a/r0/checkpoint_2",
    ),
    SystemSampled(time_s=4.5, trial=0, step=1, metrics={"system/cpu_utilization_percentage": 9.5}),
    Judged(time_s=5.0, trial=0, rung=2, resource=2, value=5e-324, verdict=Verdict.CONTINUE),
    CheckpointDropped(time_s=5.5, trial=0, checkpoint="/a/r0/checkpoint_2"),
    AttemptLost(time_s=6.0, trial=0, attempt=0, reason="rank 1 is gone"),
    TrialEnded(time_s=7.0, trial=0, state=TrialState.COMPLETE, value=0.3),
    TrialAsked(time_s=7.5, trial=1, params={"lr": 0.1}, overrides=("lr=0.1",)),
    TrialEnded(
        time_s=8.0, trial=1, state=TrialState.FAIL, value=None, error="Traceback\n  …", log="1/x"
    ),
    SweepEnded(time_s=9.0, reason="interrupted", finished=False),
    SweepResumed(time_s=10.0, pid=12),
]
LATER: list[Event] = [  # What the fixture was written without.
    Exploited(
        time_s=5.125,
        trial=0,
        index=2,
        donor=0,
        checkpoint="/a/r0/checkpoint_2",
        resource=2,
        params={"lr": 1e-3, "n": math.nan},
        overrides=("lr=0.001",),
    ),
    TurnPaused(time_s=5.25, trial=0),
    AttemptLost(time_s=6.5, trial=0, attempt=1, reason="...", fault=Fault.rank_died),
]


@pytest.fixture
def sweep_dir(tmp_path: Path) -> Path:
    path = tmp_path / "sweeps" / "mnist"
    with Ledger.create(path, started()) as ledger:
        for event in EVENTS[1:]:
            ledger.append(event)
    return path


def test_every_event_reads_back_as_it_was_written() -> None:
    assert {type(event) for event in EVENTS + LATER} == set(get_args(Event))
    for event in EVENTS + LATER:
        read = decode_line(encode_event(event))
        assert repr(read) == repr(event)  # repr, because NaN is not equal to itself


any_value = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner)
        | st.dictionaries(st.sampled_from(["$float", "$tuple", "$enum", "$map"]), inner)
    ),
    max_leaves=10,
)


@settings(deadline=None, max_examples=200)
@given(st.dictionaries(st.text(), any_value), st.dictionaries(st.text(), st.floats()))
def test_any_settings_and_metrics_read_back(value: dict[str, Any], metrics: dict[str, Any]) -> None:
    start = started(settings=value, space={})
    assert decode_line(encode_event(start)) == start
    report = Reported(time_s=1.0, trial=0, index=1, resource=1, metrics=metrics)
    assert repr(decode_line(encode_event(report))) == repr(report)


def test_each_line_is_json_with_the_checksum_last(sweep_dir: Path) -> None:
    lines = [
        json.loads(line, parse_constant=pytest.fail)
        for line in sweep_dir.joinpath("ledger.jsonl").read_text().splitlines()
    ]
    assert [line["event"] for line in lines[:3]] == ["sweep_started", "run_created", "trial_asked"]
    assert all(list(line)[-1] == "crc" for line in lines)


def test_an_object_that_json_cannot_hold_is_refused() -> None:
    with pytest.raises(LedgerError, match=r"'sweep_started' cannot be written .*PosixPath"):
        encode_event(started(settings={"root": Path("x")}))


def test_the_ledger_of_version_1_still_reads() -> None:
    events = [event for event, _ in read_events(FIXTURE)]
    assert list(map(repr, events)) == list(map(repr, EVENTS))


def test_a_line_of_a_newer_heats_is_said_so(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(encode_event(started(version=2)) + encode_event(EVENTS[1]))
    with pytest.raises(LedgerError, match="a newer heats wrote it"):
        list(read_events(path))


def test_readers_follow_the_writer_from_an_offset(tmp_path: Path) -> None:
    with Ledger.create(tmp_path / "s", started()) as ledger:
        *_, (_, offset) = read_events(ledger.path)
        assert not list(read_events(ledger.path, offset=offset))
        ledger.append(EVENTS[1])
        ((event, end),) = read_events(ledger.path, offset=offset)
    assert event == EVENTS[1]
    assert end == (tmp_path / "s" / "ledger.jsonl").stat().st_size


def test_a_sweep_is_created_once(sweep_dir: Path) -> None:
    with pytest.raises(LedgerError, match=r"`heats resume mnist`, or give another study_name"):
        Ledger.create(sweep_dir, started())
    assert not is_running(sweep_dir)


def test_a_start_torn_by_a_crash_does_not_block_the_name(tmp_path: Path) -> None:
    (tmp_path / "ledger.jsonl").write_bytes(encode_event(started())[:-5])
    Ledger.create(tmp_path, started()).close()
    assert read_sweep(tmp_path).start == started()


def test_a_torn_tail_of_any_length_is_cut_and_said(
    sweep_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = sweep_dir / "ledger.jsonl"
    whole = path.read_bytes()
    ends = [0, *(end for _, end in read_events(path))]
    for torn in range(1, 201):
        path.write_bytes(whole[:-torn])
        kept = max(end for end in ends if end <= len(whole) - torn)
        caplog.clear()
        assert sum(1 for _ in read_events(path)) == ends.index(kept)
        ledger, _ = Ledger.open(sweep_dir)
        with ledger:
            ledger.append(EVENTS[-1])
        assert path.read_bytes() == whole[:kept] + encode_event(EVENTS[-1])
        lost = len(whole) - torn - kept
        assert (f"torn last line of {lost} bytes" in caplog.text) == (lost > 0)


def test_a_flipped_bit_before_the_last_line_is_named(sweep_dir: Path) -> None:
    path = sweep_dir / "ledger.jsonl"
    whole = path.read_bytes()
    ends = [end for _, end in read_events(path)]
    flips = random.Random(0)
    for _ in range(200):
        at = flips.randrange(ends[-2])
        damaged = bytearray(whole)
        damaged[at] ^= 1 << flips.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(LedgerError, match=r"Line \d+ of .* is damaged") as caught:
            Ledger.open(sweep_dir)
        line = sum(end <= at for end in ends) + 1
        assert f"Line {line} of" in str(caught.value)
        with pytest.raises(LedgerError):
            read_sweep(sweep_dir)
    assert not is_running(sweep_dir)


def test_a_full_disk_names_the_file_and_keeps_the_ledger_whole(
    sweep_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import resource
    import signal

    path = sweep_dir / "ledger.jsonl"
    before = path.read_bytes()
    ledger, _ = Ledger.open(sweep_dir)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, limits[1]))
        with pytest.raises(LedgerError, match=r"ledger.jsonl cannot be written: File too large"):
            ledger.append(EVENTS[3])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == before
    ledger.append(EVENTS[3])
    ledger.close()
    assert path.read_bytes() == before + encode_event(EVENTS[3])


WRITER = """
import sys, time, os
from pathlib import Path
from heats.tracking.ledger import Ledger
ledger, _ = Ledger.open(Path(sys.argv[1]))
if os.fork() == 0:
    time.sleep(30)
    os._exit(0)
print("open", flush=True)
time.sleep(30)
"""


def test_the_lock_names_its_owner_and_dies_with_it_though_a_fork_lives(sweep_dir: Path) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(sweep_dir)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "open\n"
        assert is_running(sweep_dir)
        assert writer_pid(sweep_dir) == writer.pid
        with pytest.raises(SweepLockedError, match=f"process {writer.pid} on .* already writes"):
            Ledger.open(sweep_dir)
        writer.kill()
        writer.wait()
        assert not is_running(sweep_dir)
        assert writer_pid(sweep_dir) is None
        Ledger.open(sweep_dir)[0].close()
    finally:
        os.killpg(writer.pid, 9)
        writer.wait()
        if writer.stdout:
            writer.stdout.close()


def test_sweeps_are_found_by_name_prefix_and_age(tmp_path: Path) -> None:
    for age, name in enumerate(["digits-b", "mnist", "digits-a"]):
        Ledger.create(tmp_path / "sweeps" / name, started(name, time_s=100.0 - age)).close()
    assert [path.name for path in list_sweeps(tmp_path)] == ["digits-b", "mnist", "digits-a"]
    assert find_sweep(tmp_path, "mni").name == "mnist"
    assert find_sweep(tmp_path, "latest") == find_sweep(tmp_path, "last")
    assert find_sweep(tmp_path, "latest").name == "digits-b"
    with pytest.raises(SweepNotFoundError, match="more of one of: digits-b, digits-a"):
        find_sweep(tmp_path, "dig")
    with pytest.raises(SweepNotFoundError, match=r"Did you mean 'mnist'\? Known: mnist, digits-a"):
        find_sweep(tmp_path, "minst")
    with pytest.raises(SweepNotFoundError, match=r"no sweep in .* yet"):
        find_sweep(tmp_path / "empty", "latest")


@pytest.mark.parametrize(
    "name",
    ["", " a", "..", "a/../b", "a/b", "a\\b", "a\nb", "a\x00", "a\u202eb", "a\u200b", ".hidden",
     "-rf", "latest", "x" * 300, "a..b", "~root"],
)  # fmt: skip
@pytest.mark.parametrize("check", [check_study_name, lambda name: find_sweep(Path("x"), name)])
def test_a_name_that_cannot_be_a_folder_is_refused(check: Callable[[str], Any], name: str) -> None:
    with pytest.raises((ConfigError, SweepNotFoundError)):
        check(name)


@pytest.mark.parametrize("name", ["mnist", "2026-01-31_12-00-00", "übung 3", "a.b", "日本"])
def test_a_plain_name_is_accepted(name: str) -> None:
    check_study_name(name)


def test_twenty_thousand_reports_take_less_than_a_second(tmp_path: Path) -> None:
    with Ledger.create(tmp_path / "s", started()) as ledger:
        ledger.append(EVENTS[2])
        metrics = {"loss": 0.123456789, "accuracy": 0.5, "epoch": 3.0}
        begun = time.process_time()
        for index in range(5_000):
            ledger.append(
                Reported(time_s=1.5e9 + index, trial=0, index=index, resource=3, metrics=metrics)
            )
        assert time.process_time() - begun < 0.25


@pytest.mark.parametrize(
    ("changes", "mode"),
    [
        ({}, 0o644),
        ({"argv": ("sweep.py", "-m", "+api_token=abc", "lr=1,2")}, 0o600),
        ({"tracking_uri": "postgresql://me:secret@db/mlflow"}, 0o600),
    ],
)
def test_ledger_with_a_secret_is_for_its_user_alone(
    tmp_path: Path, changes: dict[str, Any], mode: int
) -> None:
    before = os.umask(0o022)
    try:
        ledger = Ledger.create(tmp_path / "sweep", fake_start(**changes))
    finally:
        os.umask(before)
    ledger.close()
    assert stat.S_IMODE(ledger.path.stat().st_mode) == mode
