from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.fakes import fake_start

from heats.checkpoints import CHECKPOINTS_DIR, orphans, remove, unneeded
from heats.config import CheckpointConf, Direction, ScoreOrder
from heats.record import SweepRecord
from heats.trial import Objective, Reported, RunCreated, TrialAsked, TrialEnded, TrialState

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

RUNNING, COMPLETE, PRUNED, FAIL = TrialState


def sweep(
    *trials: tuple[TrialState, Sequence[float | None]], direction: Direction = Direction.minimize
) -> SweepRecord:
    """Trials with a checkpoint at each report, named `<trial>.<index>`; None is no objective."""
    record = SweepRecord(fake_start(objective=Objective("loss", direction)))
    for number, (state, losses) in enumerate(trials):
        record.apply(TrialAsked(time_s=0.0, trial=number, params={}, overrides=()))
        for index, loss in enumerate(losses, 1):
            record.apply(
                Reported(
                    time_s=0.0,
                    trial=number,
                    index=index,
                    resource=index,
                    metrics={} if loss is None else {"loss": loss},
                    checkpoint=f"{number}.{index}",
                )
            )
        if state is not RUNNING:
            known = [loss for loss in losses if loss is not None]
            best = min(known, default=1.0) if direction is Direction.minimize else max(known)
            record.apply(TrialEnded(time_s=1.0, trial=number, state=state, value=best))
    return record


def kept(record: SweepRecord, keep_best: int, **settings: Any) -> list[str]:
    gone = unneeded(record, CheckpointConf(keep_best=keep_best, **settings))
    assert all(uri.startswith(f"{number}.") for number, uri in gone)
    known = [uri for trial in record.trials.values() for uri in trial.checkpoints]
    return [uri for uri in known if uri not in {uri for _, uri in gone}]


def test_running_trial_keeps_its_best_and_its_newest() -> None:
    assert kept(sweep((RUNNING, [0.5, 0.1, 0.3, 0.4])), 1) == ["0.2", "0.4"]
    assert kept(sweep((RUNNING, [0.5, 0.4, 0.1])), 1) == ["0.3"]


def test_finished_trial_keeps_its_best_only() -> None:
    assert kept(sweep((COMPLETE, [0.5, 0.1, 0.3])), 1) == ["0.2"]


def test_as_many_of_the_best_are_kept_as_is_said() -> None:
    losses = [0.5, 0.1, 0.3, 0.4, 0.2]
    assert kept(sweep((COMPLETE, losses)), 1, num_to_keep=2) == ["0.2", "0.5"]
    assert kept(sweep((RUNNING, [*losses, 0.9])), 1, num_to_keep=2) == ["0.2", "0.5", "0.6"]
    assert kept(sweep((COMPLETE, losses)), 1, num_to_keep=None) == [f"0.{i}" for i in range(1, 6)]
    assert kept(sweep((COMPLETE, losses), (COMPLETE, [0.9])), 1, num_to_keep=9) == [
        f"0.{i}" for i in range(1, 6)
    ]


def test_another_metric_may_say_which_is_best() -> None:
    record = sweep((COMPLETE, [0.5, 0.1, 0.3]))
    for report in record.trials[0].reports:
        report.metrics["accuracy"] = report.metrics["loss"]
    score: dict[str, Any] = {"checkpoint_score_attribute": "accuracy"}
    assert kept(record, 1, **score) == ["0.1"]
    assert kept(record, 1, **score, checkpoint_score_order=ScoreOrder.min) == ["0.2"]
    assert kept(record, 1, checkpoint_score_attribute="nobody reports it") == ["0.3"]


def test_checkpoint_without_an_objective_is_kept_where_it_is_the_newest() -> None:
    assert kept(sweep((COMPLETE, [None, None])), 1) == ["0.2"]
    assert kept(sweep((COMPLETE, [0.5, None])), 1) == ["0.1"]


@pytest.mark.parametrize("state", [PRUNED, FAIL])
def test_pruned_and_failed_trials_keep_none(state: TrialState) -> None:
    assert kept(sweep((state, [0.1, 0.2])), 3) == []


def test_only_the_best_of_the_finished_keep_theirs_and_the_earlier_of_equals() -> None:
    record = sweep(*((COMPLETE, [loss]) for loss in [0.3, 0.1, 0.2, 0.1, 0.2]))
    assert kept(record, 1) == ["1.1"]
    assert kept(record, 3) == ["1.1", "2.1", "3.1"]
    assert kept(record, 9) == ["0.1", "1.1", "2.1", "3.1", "4.1"]


def test_best_is_the_largest_where_that_is_the_direction() -> None:
    record = sweep((COMPLETE, [0.3, 0.9]), (COMPLETE, [0.5]), direction=Direction.maximize)
    assert kept(record, 1) == ["0.2"]


def test_directory_is_removed_and_one_that_is_gone_is_fine(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "model.safetensors").touch()
    remove(str(folder))
    assert not folder.exists()
    remove(str(folder))


def test_uri_is_removed_and_one_that_is_gone_is_fine(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    uri = folder.as_uri()
    remove(uri)
    assert not folder.exists()
    remove(uri)


def test_removal_that_fails_is_told_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "checkpoint"
    file.touch()
    remove(str(file))
    assert f"Could not remove the checkpoint {file}" in caplog.text


def test_orphans_are_checkpoints_of_ray_that_no_report_names(tmp_path: Path) -> None:
    record = sweep((RUNNING, [0.5]), (RUNNING, []), (RUNNING, []), (RUNNING, []))
    dirs = [str(tmp_path / "run-0"), str(tmp_path / "run-1"), "s3://bucket/run-2"]
    for number, folder in enumerate(dirs):
        created = RunCreated(time_s=0.0, trial=number, run_id="r", artifact_dir=folder)
        record.apply(created)
    half_written = "checkpoint_2026-01-31_10-00-00.000001"
    for name in ("0.1", half_written, "epoch_3"):  # The last one is user code's own.
        (tmp_path / "run-0" / CHECKPOINTS_DIR / name).mkdir(parents=True)
    (tmp_path / "run-0" / "plots").mkdir()
    assert orphans(record) == [str(tmp_path / "run-0" / CHECKPOINTS_DIR / half_written)]
