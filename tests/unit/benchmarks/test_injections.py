"""What the fault table computes from a sweep's records and its trials' own files."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from benchmarks.fault_rows import ROWS
from benchmarks.faulty import ANY_TIME, IN_STEP, next_loss, num_epochs
from benchmarks.injections import (
    Epoch,
    History,
    back_at,
    delay_s,
    injection,
    other,
    read_history,
    repeated,
)

from heats.config import Direction
from heats.record import SweepRecord
from heats.tracking.ledger import Ledger
from heats.trial import (
    AttemptLost,
    Fault,
    Objective,
    Reported,
    SweepStarted,
    TrialAsked,
    TrialEnded,
    TrialState,
    TurnStarted,
)

if TYPE_CHECKING:
    from pathlib import Path

    from heats.trial import Event

LR = 0.5
HIT, OTHER = 0, 1
HIT_S = 104.5


def epochs_with_a_loss() -> list[Epoch]:
    """Five epochs, a second each; then, ten seconds later, on from the fourth."""
    before = [Epoch(0, number, 100.0 + number) for number in range(1, 6)]
    return before + [Epoch(1, number, 111.0 + number) for number in range(5, num_epochs(HIT) + 1)]


def started() -> SweepStarted:
    return SweepStarted(
        time_s=99.0,
        study_name="faults",
        argv=(),
        cwd="/",
        script=None,
        module=None,
        objective=Objective("loss", Direction.minimize),
        space={},
        fixed=(),
        settings={},
        config_yaml="",
        experiment="faults",
        tracking_uri="",
    )


def trial_events(number: int, *, state: TrialState = TrialState.COMPLETE) -> list[Event]:
    """A trial with the reports that it should have."""
    events: list[Event] = [
        TrialAsked(time_s=99.0, trial=number, params={"lr": LR}, overrides=()),
        TurnStarted(time_s=99.5, trial=number, attempt=0),
    ]
    loss = 1.0
    for epoch in range(1, num_epochs(number) + 1):
        loss = next_loss(loss, LR, epoch)
        metrics = {"loss": loss, "epoch": float(epoch)}
        events.append(
            Reported(
                time_s=100.0 + epoch, trial=number, index=epoch, resource=epoch, metrics=metrics
            )
        )
    events.append(TrialEnded(time_s=140.0, trial=number, state=state, value=loss, error="no luck"))
    return events


def loss_of(number: int, fault: Fault, time_s: float) -> AttemptLost:
    return AttemptLost(time_s=time_s, trial=number, attempt=0, reason="", fault=fault)


def history(events: list[Event], epochs: dict[int, list[Epoch]]) -> History:
    record = SweepRecord(started())
    for event in events:
        record.apply(event)
    return History(record, [each for each in events if isinstance(each, AttemptLost)], epochs)


def test_repeated_epochs_are_those_trained_in_both_attempts() -> None:
    assert repeated(epochs_with_a_loss()) == 1


def test_back_at_work_is_the_first_epoch_that_was_not_trained_before() -> None:
    assert back_at(epochs_with_a_loss(), HIT_S) == pytest.approx(117.0)


def test_epochs_of_the_attempt_that_was_hit_do_not_count_as_back_at_work() -> None:
    told_to_leave = [Epoch(0, 1, 101.0), Epoch(0, 2, 102.0), Epoch(1, 3, 110.0)]

    assert back_at(told_to_leave, 101.5) == pytest.approx(110.0)


def test_a_trial_that_never_came_back_has_no_time_for_it() -> None:
    assert back_at([Epoch(0, 1, 101.0)], 101.5) is None


def test_delay_is_the_longest_epoch_beyond_the_median_one() -> None:
    times = [100.0, 101.0, 102.0, 105.0, 106.0]

    assert delay_s([Epoch(0, i, t) for i, t in enumerate(times)]) == pytest.approx(2.0)


def test_time_between_attempts_is_no_delay_of_an_epoch() -> None:
    assert delay_s([Epoch(0, 1, 1.0), Epoch(0, 2, 2.0), Epoch(1, 3, 50.0)]) == 0.0


def test_injection_is_timed_from_the_fault() -> None:
    lost = loss_of(HIT, Fault.rank_died, 105.5)

    found = injection(
        history([*trial_events(HIT), lost], {HIT: epochs_with_a_loss()}),
        HIT,
        HIT_S,
        Fault.rank_died,
    )

    assert found.problems == []
    assert (found.detected_s, found.back_s, found.repeated) == pytest.approx((1.0, 12.5, 1))


def test_injection_that_was_taken_for_another_fault_is_a_problem() -> None:
    lost = loss_of(HIT, Fault.error, 105.5)

    found = injection(
        history([*trial_events(HIT), lost], {HIT: epochs_with_a_loss()}), HIT, HIT_S, Fault.hang
    )

    assert found.problems == ["trial 0 was lost to ['error'], not to hang"]


def test_injection_that_nobody_saw_is_a_problem() -> None:
    found = injection(history(trial_events(HIT), {}), HIT, HIT_S, Fault.hang)

    assert found.problems == ["trial 0 was lost to nothing, not to hang"]


def test_trial_that_failed_is_a_problem() -> None:
    failed = trial_events(OTHER, state=TrialState.FAIL)

    assert other(history(failed, {}), OTHER).problems == ["trial 1 is FAIL no luck"]


@pytest.mark.parametrize("change", ["missing", "doubled", "wrong"])
def test_reports_that_differ_from_an_undisturbed_trial_are_a_problem(change: str) -> None:
    events = trial_events(OTHER)
    if change == "missing":
        del events[5]
    elif change == "doubled":
        events.insert(5, events[5])
    else:
        events[5] = Reported(time_s=104.0, trial=OTHER, index=4, resource=4, metrics={"loss": 0.0})

    assert other(history(events, {}), OTHER).problems == [
        "trial 1 has other reports than an undisturbed one"
    ]


def test_other_trial_may_lose_a_turn_that_never_began_and_nothing_else() -> None:
    events = trial_events(OTHER)
    retired, killed = (
        loss_of(OTHER, Fault.retired, 100.0),
        loss_of(OTHER, Fault.rank_died, 100.0),
    )

    assert other(history([*events, retired], {}), OTHER).problems == []
    assert other(history([*events, killed], {}), OTHER).problems != []


def test_history_has_what_the_ledger_and_the_trials_wrote(tmp_path: Path) -> None:
    sweep_dir = tmp_path / "sweep"
    lost = loss_of(HIT, Fault.rank_died, 105.5)
    with Ledger.create(sweep_dir, started()) as ledger:
        for event in [*trial_events(HIT), lost]:
            ledger.append(event)
    folder = tmp_path / "epochs"
    folder.mkdir()
    told = [(0, 100.0), (1, 101.0), (0, 110.0), (2, 111.0)]
    lines = [json.dumps({"epoch": epoch, "time_s": time_s}) for epoch, time_s in told]
    (folder / "0.jsonl").write_text("\n".join(lines), encoding="utf-8")

    read = read_history(sweep_dir, tmp_path)

    assert read.lost_of(HIT) == [lost]
    assert read.epochs == {HIT: [Epoch(0, 1, 101.0), Epoch(1, 2, 111.0)]}
    assert read.record.trials[HIT].state is TrialState.COMPLETE


def test_every_row_has_a_fault_that_the_training_knows() -> None:
    assert {row.act for row in ROWS.values()} - {None} == {*IN_STEP, *ANY_TIME}
