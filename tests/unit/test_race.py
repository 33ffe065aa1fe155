from __future__ import annotations

import dataclasses
import logging
import math
import pickle
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from tests.fakes import FakeRuns, fake_start

from heats.compose import Composer
from heats.config import (
    AshaConf,
    AshaMode,
    CheckpointConf,
    Direction,
    FailureConf,
    ObjectiveConf,
    PbtConf,
    Scheduler,
    StopConf,
    SweepConf,
)
from heats.race import Race
from heats.record import SweepRecord
from heats.results import RESULTS_FILE
from heats.scheduler import make_scheduler
from heats.space import parse_space
from heats.study import Study
from heats.tracking.ledger import Ledger, read_events, read_sweep
from heats.trial import (
    AttemptLost,
    CheckpointDropped,
    Ending,
    Event,
    Exploited,
    Fault,
    LaneShape,
    Objective,
    Outcome,
    Report,
    SystemSampled,
    TrialEnded,
    TrialSpec,
    TrialState,
    TurnStarted,
    Verdict,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hydra.core.config_loader import ConfigLoader

RUNNING, COMPLETE, PRUNED, FAIL = TrialState
CONTINUE, STOP, PAUSE, LEAVE = Verdict
STOPPED = Outcome(Ending.STOPPED)
LOST = Outcome.failed(Fault.rank_died, "rank 0 went away")
RAISED = Outcome.failed(Fault.error, "Traceback ...\nValueError: no data")


def returned(value: float | None = None) -> Outcome:
    return Outcome(Ending.RETURNED, returned=value)


@pytest.fixture(scope="module")
def loader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConfigLoader]:
    folder = tmp_path_factory.mktemp("conf")
    (folder / "config.yaml").write_text("lr: 0.1\nmodel: {size: 1}\n", encoding="utf-8")
    with initialize_config_dir(str(folder), version_base="1.3"):
        yield GlobalHydra.instance().config_loader()


class Sweep:
    """A race in a folder, driven as a lane drives it; another one on the folder resumes it."""

    def __init__(
        self,
        loader: ConfigLoader,
        folder: Path,
        *,
        space: tuple[str, ...] = ("lr=tag(log,interval(1e-5,0.1))",),
        num_trials: int = 3,
        **settings: Any,
    ) -> None:
        settings.setdefault("objective", ObjectiveConf(metric="loss"))
        settings.setdefault("asha", AshaConf(max_resource=9, reduction_factor=3))
        conf = SweepConf(**settings)
        objective = Objective(
            conf.objective.metric, conf.objective.direction, conf.objective.resource
        )
        points = parse_space(None, list(space))
        master = loader.load_configuration("config", [], RunMode.MULTIRUN)
        self.ledger, self.record = self._open(folder / "sweep", objective, points.to_json())
        self.study = Study(objective, points, conf.sampler, conf.seed)
        self.study.restore(self.record)
        self.folder = folder
        self.job_dir = folder / "jobs"
        self.job_dir.mkdir(exist_ok=True)
        self.runs = FakeRuns(folder / "artifacts")
        self.events: list[Event] = []
        self.race = Race(
            conf=conf,
            num_trials=num_trials,
            record=self.record,
            ledger=self.ledger,
            study=self.study,
            scheduler=make_scheduler(conf, points, self.record, num_trials),
            composer=Composer(loader, master, points.fixed),
            shape_of=lambda config: LaneShape(1, False, {"CPU": 1.0}),
            create_run=self.runs.create_trial,
            sweep_job_dir=self.job_dir,
            on_event=self.events.append,
        )

    def _open(
        self, sweep_dir: Path, objective: Objective, space: dict[str, Any]
    ) -> tuple[Ledger, SweepRecord]:
        if sweep_dir.exists():
            return Ledger.open(sweep_dir)
        start = fake_start("s", objective=objective, space=space)
        return Ledger.create(sweep_dir, start), SweepRecord(start)

    def next(self) -> TrialSpec:
        spec = self.race.next_trial()
        assert spec is not None
        return spec

    def report(self, spec: TrialSpec, epoch: int, loss: float, *, saves: bool = False) -> Verdict:
        return self.race.record(spec.number, [self.made(spec, epoch, loss, saves=saves)])

    def made(self, spec: TrialSpec, epoch: int, loss: float, *, saves: bool = False) -> Report:
        checkpoint = None
        if saves:
            name = f"attempt-{spec.attempt}-epoch-{epoch}"
            folder = Path(spec.artifact_dir, "checkpoints", name)
            folder.mkdir(parents=True)
            checkpoint = str(folder)
        return Report(time.time(), {"epoch": epoch, "loss": loss}, checkpoint)

    def train(
        self, spec: TrialSpec, losses: list[float], *, first: int = 1, saves: bool = False
    ) -> TrialState:
        """Train until the losses are over or the verdict is to stop; the trial's state then."""
        for epoch, loss in enumerate(losses, first):
            if self.report(spec, epoch, loss, saves=saves) is STOP:
                self.race.end(spec.number, STOPPED)
                break
        else:
            self.race.end(spec.number, returned())
        return self.state(spec)

    def state(self, spec: TrialSpec) -> TrialState:
        return self.record.trials[spec.number].state

    def error(self, spec: TrialSpec) -> str:
        error = self.record.trials[spec.number].error
        assert error is not None
        return error

    def losses(self, spec: TrialSpec) -> list[float]:
        return [report.metrics["loss"] for report in self.record.trials[spec.number].reports]

    def saved(self, spec: TrialSpec) -> list[str]:
        """The trial's checkpoints on disk; the record must know just these."""
        on_disk = sorted(path.name for path in Path(spec.artifact_dir, "checkpoints").iterdir())
        known = self.record.trials[spec.number].checkpoints
        assert sorted(Path(uri).name for uri in known) == on_disk
        return on_disk

    def results(self) -> dict[str, Any]:
        text = (self.job_dir / RESULTS_FILE).read_text(encoding="utf-8")
        results: dict[str, Any] = yaml.safe_load(text)
        return results

    def told(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


class Sweeps:
    def __init__(self, loader: ConfigLoader, folder: Path) -> None:
        self._loader, self._folder = loader, folder
        self._last: Sweep | None = None

    def __call__(self, **settings: Any) -> Sweep:
        """The sweep; a second call resumes it, in a driver that knows the ledger only."""
        self.close()
        self._last = Sweep(self._loader, self._folder, **settings)
        return self._last

    def close(self) -> None:
        if self._last is not None:
            self._last.ledger.close()


@pytest.fixture
def sweep(loader: ConfigLoader, tmp_path: Path) -> Iterator[Sweeps]:
    sweeps = Sweeps(loader, tmp_path)
    yield sweeps
    sweeps.close()


# --- a trial's way ------------------------------------------------------------------------------


def test_trial_gets_its_config_run_and_folders(sweep: Sweeps) -> None:
    s = sweep()
    spec = s.next()
    assert (spec.number, spec.attempt, spec.checkpoint, spec.first_report_index) == (0, 0, None, 0)
    config = pickle.loads(spec.config)
    assert config.lr == s.record.trials[0].params["lr"]
    assert config.hydra.job.num == 0
    assert spec.run_id == f"{0:032x}"
    assert spec.artifact_dir == str(s.folder / "artifacts" / "run-0")
    assert spec.job_dir == str(s.job_dir / "0") == s.race.sweep.trials[0].job_dir


def test_trial_that_reports_and_returns_is_complete_with_its_best_value(sweep: Sweeps) -> None:
    s = sweep()
    spec = s.next()
    assert s.train(spec, [0.5, 0.2, 0.3]) is COMPLETE
    assert s.record.trials[0].value == 0.2
    assert s.study.trials[0].value == 0.2
    assert s.study.trials[0].intermediate_values == {1: 0.5, 2: 0.2, 3: 0.3}


def test_every_event_is_in_the_ledger_before_anyone_hears_of_it(sweep: Sweeps) -> None:
    s = sweep()
    spec = s.next()
    s.report(spec, 1, 0.5)
    s.race.end(spec.number, returned())
    written = [event for event, _ in read_events(s.ledger.path)]
    assert written[1:] == s.events
    assert read_sweep(s.ledger.path.parent) == s.record


def test_trial_without_an_mlflow_run_keeps_its_artifacts_in_its_job_folder(sweep: Sweeps) -> None:
    s = sweep()
    s.runs.is_down = True
    spec = s.next()
    assert spec.run_id is None
    assert spec.artifact_dir == str(s.job_dir / "0" / "artifacts")
    s.race.end(0, LOST)
    s.runs.is_down = False
    assert s.next().run_id == f"{0:032x}"


def test_trial_below_the_rung_is_pruned_with_its_whole_curve(sweep: Sweeps) -> None:
    s = sweep()
    good, bad = s.next(), s.next()
    assert s.train(good, [0.5, 0.4, 0.3]) is COMPLETE
    assert s.report(bad, 1, 0.1) is CONTINUE
    assert s.report(bad, 2, 0.6) is CONTINUE
    assert s.report(bad, 3, 0.7) is STOP
    s.race.end(bad.number, STOPPED)
    assert s.state(bad) is PRUNED
    assert s.record.trials[1].error is None
    assert s.record.trials[1].value == 0.1
    pruned = s.study.trials[1]
    assert pruned.state.name == "PRUNED"
    assert pruned.intermediate_values == {1: 0.1, 2: 0.6, 3: 0.7}


def test_reports_made_after_a_late_stop_are_kept(sweep: Sweeps) -> None:
    s = sweep()
    s.train(s.next(), [0.1, 0.1, 0.1])
    late = s.next()
    batch = [s.made(late, epoch, loss) for epoch, loss in enumerate([0.9, 0.8, 0.05], 1)]
    assert s.race.record(late.number, batch) is STOP
    s.race.end(late.number, returned())
    assert s.state(late) is COMPLETE
    assert s.record.trials[late.number].value == 0.05


def test_trial_stopped_at_its_full_resource_is_complete(sweep: Sweeps) -> None:
    s = sweep(asha=AshaConf(max_resource=2))
    spec = s.next()
    s.report(spec, 1, 0.3)
    s.report(spec, 2, 0.2)
    s.race.end(spec.number, STOPPED)
    assert s.state(spec) is COMPLETE


def test_trial_as_long_as_one_that_came_to_its_end_is_complete(sweep: Sweeps) -> None:
    s = sweep(num_trials=4, asha=AshaConf(reduction_factor=2))
    assert s.train(s.next(), [0.1] * 4) is COMPLETE
    second = s.next()
    for epoch in (1, 2, 3):
        assert s.report(second, epoch, 0.1) is CONTINUE
    assert s.report(second, 4, 0.9) is STOP
    s.race.end(second.number, STOPPED)
    assert s.state(second) is COMPLETE
    assert s.train(s.next(), [0.9]) is PRUNED

    s = sweep(num_trials=4, asha=AshaConf(reduction_factor=2))
    last = s.next()
    for epoch in (1, 2, 3):
        s.report(last, epoch, 0.1)
    assert s.report(last, 4, 0.9) is STOP
    s.race.end(last.number, STOPPED)
    assert s.state(last) is COMPLETE


def test_lengths_that_differ_say_nothing_of_a_trial_that_was_stopped(sweep: Sweeps) -> None:
    s = sweep(num_trials=5, asha=AshaConf(reduction_factor=2))
    assert s.train(s.next(), [0.1] * 2) is COMPLETE  # It gave up by itself, or was shorter.
    longer = s.next()
    for epoch in (1, 2, 3):
        assert s.report(longer, epoch, 0.1) is CONTINUE
    stopped = s.next()
    assert s.report(stopped, 1, 0.1) is CONTINUE
    assert s.report(stopped, 2, 0.9) is STOP
    s.race.end(stopped.number, STOPPED)
    assert s.state(stopped) is PRUNED
    s.report(longer, 4, 0.1)
    s.race.end(longer.number, returned())
    assert s.train(s.next(), [0.1, 0.9]) is PRUNED


@pytest.mark.parametrize("scheduler", list(Scheduler))
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_trial_that_diverges_stops_at_once_and_never_is_best(
    sweep: Sweeps, scheduler: Scheduler, bad: float
) -> None:
    s = sweep(scheduler=scheduler, asha=AshaConf(min_resource=4))
    spec = s.next()
    assert s.report(spec, 1, 0.01) is CONTINUE
    assert s.report(spec, 2, bad) is STOP
    s.race.end(spec.number, STOPPED)
    assert s.state(spec) is PRUNED
    assert s.error(spec) == f"diverged: loss={bad} at epoch 2"
    assert s.record.best() is None
    s.train(s.next(), [0.9])
    assert s.results()["best_trial"] == 1
    assert all(
        math.isfinite(value)
        for trial in s.study.trials
        for value in [*(trial.values or []), *trial.intermediate_values.values()]
    )


def test_trial_that_diverges_and_returns_all_the_same_is_pruned(sweep: Sweeps) -> None:
    s = sweep()
    spec = s.next()
    s.race.record(spec.number, [s.made(spec, 1, math.nan), s.made(spec, 2, 0.1)])
    s.race.end(spec.number, returned())
    assert s.state(spec) is PRUNED
    assert s.error(spec) == "diverged: loss=nan at epoch 1"


def test_trial_that_raises_fails_with_its_traceback_and_log(sweep: Sweeps) -> None:
    s = sweep()
    spec = s.next()
    s.report(spec, 1, 0.5)
    log = Path(spec.job_dir, "rank-0.log")
    log.parent.mkdir(parents=True)
    log.write_text("...", encoding="utf-8")
    s.race.end(spec.number, RAISED)
    assert s.state(spec) is FAIL
    assert s.error(spec) == RAISED.error
    assert s.record.trials[0].log == str(log)
    assert s.study.trials[0].state.name == "FAIL"


def test_config_that_does_not_compose_fails_its_trial_and_the_next_one_comes(
    sweep: Sweeps, caplog: pytest.LogCaptureFixture
) -> None:
    s = sweep(space=("model.size=1,{a:1}", "model.size.a=1"), num_trials=2)
    spec = s.race.next_trial()
    assert [trial.state for trial in s.record.trials.values()] == [FAIL, RUNNING]
    assert spec is not None
    assert spec.number == 1
    assert "model.size" in (s.record.trials[0].error or "")


def test_samples_of_the_system_are_no_reports(sweep: Sweeps) -> None:
    s = sweep()
    spec = s.next()
    sample = Report(time.time(), {"system/cpu_utilization_percentage": 50.0}, is_system=True)
    s.race.record(spec.number, [sample, sample])
    s.race.end(spec.number, LOST)
    s.next()
    s.race.record(spec.number, [sample])
    assert [event.step for event in s.told(SystemSampled)] == [0, 1, 2]
    assert s.record.trials[0].reports == []


# --- the objective ------------------------------------------------------------------------------


def test_metric_that_is_never_reported_fails_naming_what_is(
    sweep: Sweeps, caplog: pytest.LogCaptureFixture
) -> None:
    s = sweep()
    spec = s.next()
    for epoch in (1, 2):
        s.race.record(0, [Report(time.time(), {"epoch": epoch, "val_loss": 0.5, "acc": 0.1})])
    s.race.end(spec.number, returned(0.25))
    assert s.state(spec) is FAIL
    for known in ("'loss'", "acc, epoch, val_loss", "objective.metric"):
        assert known in s.error(spec)
    assert caplog.text.count("no metric 'loss'") == 1


def test_report_without_the_metric_after_one_with_it_warns_of_nothing(
    sweep: Sweeps, caplog: pytest.LogCaptureFixture
) -> None:
    s = sweep()
    spec = s.next()
    s.report(spec, 1, 0.5)
    s.race.record(0, [Report(time.time(), {"epoch": 2, "train_loss": 0.5})])
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_returned_value_is_the_objective_where_no_metric_is_named(sweep: Sweeps) -> None:
    s = sweep(objective=ObjectiveConf())
    spec = s.next()
    s.race.record(0, [Report(time.time(), {"epoch": 1, "loss": 0.5})])
    s.race.end(spec.number, returned(0.25))
    assert s.state(spec) is COMPLETE
    assert s.record.trials[0].value == 0.25
    assert s.results()["metric"] == "objective"


@pytest.mark.parametrize("value", [None, math.nan])
def test_no_returned_number_fails_where_it_is_the_objective(
    sweep: Sweeps, value: float | None
) -> None:
    s = sweep(objective=ObjectiveConf())
    spec = s.next()
    s.race.end(spec.number, returned(value))
    assert s.state(spec) is FAIL
    assert s.error(spec).startswith("The task function returned")


def test_reports_are_counted_where_they_do_not_name_the_resource(sweep: Sweeps) -> None:
    s = sweep()
    spec = s.next()
    for loss in (0.5, 0.4):
        s.race.record(0, [Report(time.time(), {"loss": loss})])
    assert [report.resource for report in s.record.trials[spec.number].reports] == [1, 2]


# --- a lane that goes away ----------------------------------------------------------------------


def test_lost_trial_comes_again_from_its_last_checkpoint(sweep: Sweeps) -> None:
    s = sweep()
    spec = s.next()
    for epoch, saves in [(1, True), (2, True), (3, False)]:
        s.report(spec, epoch, 1 / epoch, saves=saves)
    s.race.end(spec.number, LOST)
    lost = s.told(AttemptLost)
    assert [(event.trial, event.attempt, event.reason) for event in lost] == [(0, 0, LOST.error)]
    assert s.state(spec) is RUNNING
    again = s.next()
    assert (again.number, again.attempt) == (0, 1)
    assert again.checkpoint == str(Path(spec.artifact_dir, "checkpoints", "attempt-0-epoch-2"))
    assert again.first_report_index == 2
    assert again.run_id == spec.run_id
    assert s.runs.created == [0]
    assert s.told(TurnStarted)[-1].checkpoint == again.checkpoint


def test_report_repeated_after_a_restart_counts_once(sweep: Sweeps) -> None:
    s = sweep()
    spec = s.next()
    s.report(spec, 1, 0.5, saves=True)
    s.report(spec, 2, 0.4)
    s.report(spec, 3, 0.3)
    s.race.end(spec.number, LOST)
    again = s.next()
    assert s.train(again, [0.4, 0.3, 0.2], first=2) is COMPLETE
    assert s.losses(spec) == [0.5, 0.4, 0.3, 0.2]
    assert [report.index for report in s.record.trials[0].reports] == [1, 2, 3, 4]
    assert [judged.rung for judged in s.record.trials[0].judged] == [1, 3]


def test_trial_without_a_checkpoint_starts_from_its_beginning(sweep: Sweeps) -> None:
    s = sweep()
    spec = s.next()
    s.report(spec, 1, 0.5)
    s.race.end(spec.number, LOST)
    again = s.next()
    assert (again.checkpoint, again.first_report_index) == (None, 0)
    s.train(again, [0.5, 0.4])
    assert s.losses(spec) == [0.5, 0.4]


def test_trial_that_loses_every_lane_fails_after_max_retries(sweep: Sweeps) -> None:
    s = sweep(failure=FailureConf(max_retries=2))
    for attempt in range(3):
        spec = s.next()
        assert (spec.number, spec.attempt) == (0, attempt)
        s.race.end(spec.number, LOST)
    assert s.state(spec) is FAIL
    assert s.error(spec) == LOST.error
    assert s.next().number == 1


def test_trial_whose_code_raised_starts_again_as_often_as_it_may(sweep: Sweeps) -> None:
    s = sweep(failure=FailureConf(max_failures=1, max_retries=0))
    first = s.next()
    s.report(first, 1, 0.5, saves=True)
    s.race.end(first.number, RAISED)
    again = s.next()
    assert (again.number, again.attempt, again.first_report_index) == (0, 1, 1)
    s.race.end(again.number, RAISED)
    assert s.state(again) is FAIL
    assert s.error(again) == RAISED.error
    other = s.next()
    assert other.number == 1
    s.race.end(other.number, LOST)  # It is counted apart.
    assert s.state(other) is FAIL


def test_resuming_does_not_use_up_retries(sweep: Sweeps) -> None:
    settings: dict[str, Any] = {"failure": FailureConf(max_retries=1)}
    for _ in range(3):
        s = sweep(**settings)
        spec = s.next()
    s.race.end(spec.number, LOST)
    assert s.state(spec) is RUNNING
    assert s.next().number == 0


def test_trial_whose_lane_is_lost_after_its_stop_stays_stopped(sweep: Sweeps) -> None:
    s = sweep()
    s.train(s.next(), [0.1])
    bad = s.next()
    assert s.report(bad, 1, 0.9) is STOP
    s.race.end(bad.number, LOST)
    assert s.state(bad) is PRUNED


# --- interrupt and resume -----------------------------------------------------------------------


def test_interrupted_trials_stay_unfinished_and_go_on_in_a_new_driver(sweep: Sweeps) -> None:
    s = sweep(num_trials=4)
    done, first, second = s.next(), s.next(), s.next()
    s.train(done, [0.5])
    s.report(first, 1, 0.4, saves=True)
    s.race.interrupt("Ctrl-C")
    assert s.report(first, 2, 0.3) is LEAVE
    s.race.end(first.number, STOPPED)
    s.race.end(second.number, LOST)
    assert s.race.next_trial() is None
    assert s.race.is_done()
    assert (s.race.is_interrupted, s.race.is_finished, s.race.reason) == (True, False, "Ctrl-C")
    assert [trial.state for trial in s.record.trials.values()] == [COMPLETE, RUNNING, RUNNING]

    s = sweep(num_trials=4)
    again = [s.next() for _ in range(3)]
    assert [(spec.number, spec.attempt) for spec in again] == [(1, 1), (2, 1), (3, 0)]
    assert [spec.first_report_index for spec in again] == [1, 0, 0]
    s.train(again[0], [0.3, 0.2], first=2)
    assert s.losses(first) == [0.4, 0.3, 0.2]
    assert s.race.next_trial() is None
    s.race.end(2, RAISED)
    s.race.end(3, RAISED)
    assert s.race.is_done()
    assert s.race.is_finished


def test_interrupt_after_the_last_trial_leaves_a_finished_sweep(sweep: Sweeps) -> None:
    s = sweep(num_trials=1)
    s.train(s.next(), [0.5])
    s.race.interrupt("Ctrl-C")
    assert s.race.is_finished
    assert s.race.reason is None


def test_interrupt_before_the_last_trial_leaves_an_unfinished_sweep(sweep: Sweeps) -> None:
    s = sweep(num_trials=2)
    s.train(s.next(), [0.5])
    s.race.interrupt("Ctrl-C")
    assert not s.race.is_finished


def test_interrupt_of_a_study_that_has_ended_leaves_nothing_to_resume(sweep: Sweeps) -> None:
    s = sweep(num_trials=4, stop=StopConf(target=0.05))
    first, second = s.next(), s.next()
    assert s.report(first, 1, 0.01) is STOP
    s.race.interrupt("Ctrl-C")
    assert s.report(second, 1, 0.5) is STOP
    for spec in (first, second):
        s.race.end(spec.number, STOPPED)
    assert (s.state(first), s.state(second)) == (COMPLETE, PRUNED)
    assert s.race.is_finished
    assert s.race.reason == "trial 0 reached the target 0.05"


def test_trial_that_returns_although_interrupted_is_complete(sweep: Sweeps) -> None:
    s = sweep()
    spec = s.next()
    s.report(spec, 1, 0.4)
    s.race.interrupt("SIGTERM")
    s.race.end(spec.number, returned())
    assert s.state(spec) is COMPLETE


def test_trial_stopped_at_its_rung_ends_although_interrupted(sweep: Sweeps) -> None:
    s = sweep()
    s.train(s.next(), [0.1])
    bad = s.next()
    s.race.interrupt("Ctrl-C")
    assert s.report(bad, 1, 0.9) is STOP
    s.race.end(bad.number, STOPPED)
    assert s.state(bad) is PRUNED


def test_trial_whose_stop_is_the_last_word_of_a_ledger_does_not_run_again(sweep: Sweeps) -> None:
    s = sweep()
    s.train(s.next(), [0.1])
    bad = s.next()
    assert s.report(bad, 1, 0.9) is STOP  # And here the driver is killed.
    s = sweep()
    assert s.next().number == 2
    assert s.state(bad) is PRUNED


def test_rungs_are_rebuilt_on_resume(sweep: Sweeps) -> None:
    s = sweep()
    s.train(s.next(), [0.1])
    s = sweep()
    assert s.report(s.next(), 1, 0.2) is STOP


def test_resumed_sweep_proposes_what_the_uninterrupted_one_does(
    loader: ConfigLoader, tmp_path: Path
) -> None:
    def play(folder: Path, *, every: int) -> list[Any]:
        settings: dict[str, Any] = {
            "num_trials": 8,
            "sampler": {"_target_": "optuna.samplers.TPESampler", "n_startup_trials": 3},
        }
        s = Sweep(loader, folder, **settings)
        for number in range(8):
            spec = s.next()
            assert spec.number == number
            lr = s.record.trials[number].params["lr"]
            assert isinstance(lr, float)
            s.train(spec, [abs(math.log10(lr) + 3) / epoch for epoch in (1, 2, 3)])
            if number % every == every - 1:
                s.ledger.close()
                s = Sweep(loader, folder, **settings)
        s.ledger.close()
        return [
            (t.params, t.state, t.value, [j.verdict for j in t.judged])
            for t in s.record.trials.values()
        ]

    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    assert play(folders[0], every=100) == play(folders[1], every=3)


# --- the end of the study -----------------------------------------------------------------------


def test_study_is_done_only_when_no_running_trial_can_come_back(sweep: Sweeps) -> None:
    s = sweep(num_trials=1)
    assert not s.race.is_done()
    spec = s.next()
    assert s.race.next_trial() is None
    assert not s.race.is_done()
    s.race.end(spec.number, LOST)
    assert not s.race.is_done()
    s.train(s.next(), [0.5])
    assert s.race.is_done()
    assert s.race.is_finished
    assert s.race.reason is None


def test_grid_that_is_exhausted_ends_the_study(sweep: Sweeps) -> None:
    s = sweep(space=("lr=0.1,0.2",), num_trials=5)
    s.train(s.next(), [0.5])
    s.train(s.next(), [0.4])
    assert s.race.next_trial() is None
    assert s.race.is_done()


def test_target_ends_the_study_and_its_trial_is_complete(sweep: Sweeps) -> None:
    s = sweep(stop=StopConf(target=0.1))
    other, good = s.next(), s.next()
    s.report(other, 1, 0.5)
    assert s.report(good, 1, 0.1) is STOP
    s.race.end(good.number, STOPPED)
    assert s.report(other, 2, 0.4) is STOP
    s.race.end(other.number, STOPPED)
    assert (s.state(good), s.state(other)) == (COMPLETE, PRUNED)
    assert s.race.is_done()
    assert s.race.is_finished
    assert s.race.reason == "trial 1 reached the target 0.1"


def test_target_holds_for_the_returned_value_too(sweep: Sweeps) -> None:
    objective = ObjectiveConf(direction=Direction.maximize)
    s = sweep(objective=objective, stop=StopConf(target=0.9))
    s.race.end(s.next().number, returned(0.5))
    assert not s.race.is_done()
    s.race.end(s.next().number, returned(0.95))
    assert s.race.is_done()
    assert s.race.reason == "trial 1 reached the target 0.9"


def test_no_trial_stays_running_when_the_study_ends_while_one_waits_for_a_lane(
    sweep: Sweeps,
) -> None:
    s = sweep(stop=StopConf(target=0.1))
    waiting, gone, good = s.next(), s.next(), s.next()
    s.race.end(waiting.number, LOST)
    s.report(good, 1, 0.05)
    s.race.end(good.number, STOPPED)
    s.race.end(gone.number, LOST)
    assert [trial.state for trial in s.record.trials.values()] == [PRUNED, FAIL, COMPLETE]
    assert s.race.is_finished


def test_time_limit_stops_running_trials_and_starts_no_more(sweep: Sweeps) -> None:
    s = sweep(stop=StopConf(time_limit_s=0.05))
    spec = s.next()
    time.sleep(0.06)
    assert s.report(spec, 1, 0.5) is STOP
    s.race.end(spec.number, STOPPED)
    assert s.state(spec) is PRUNED
    assert s.race.next_trial() is None
    assert s.race.is_done()
    assert s.race.reason == "the time limit of 0.05 s was reached"


def test_failures_in_a_row_end_the_study(sweep: Sweeps) -> None:
    s = sweep(stop=StopConf(max_failures=2), num_trials=9)
    for outcome in (RAISED, returned(), RAISED):
        spec = s.next()
        s.report(spec, 1, 0.5)
        s.race.end(spec.number, outcome)
    assert not s.race.is_done()
    s.race.end(s.next().number, RAISED)
    assert s.race.is_done()
    assert s.race.reason is not None
    assert s.race.reason.startswith("2 trials failed in a row (stop.max_failures)")
    assert s.race.reason.endswith("ValueError: no data")


# --- what it leaves -----------------------------------------------------------------------------


def test_results_are_written_after_each_trial(sweep: Sweeps) -> None:
    s = sweep()
    s.train(s.next(), [0.5])
    first = s.results()
    assert first == {
        "name": "heats",
        "best_params": s.record.trials[0].params,
        "best_value": 0.5,
        "best_trial": 0,
        "best_run_id": f"{0:032x}",
        "study_name": "s",
        "metric": "loss",
        "direction": "minimize",
        "num_trials": {"running": 0, "complete": 1, "pruned": 0, "fail": 0},
    }
    s.train(s.next(), [0.2])
    assert s.results()["best_trial"] == 1
    assert [path.name for path in s.job_dir.iterdir()] == [RESULTS_FILE]


def test_results_of_a_sweep_without_a_complete_trial_name_none(sweep: Sweeps) -> None:
    s = sweep()
    s.race.end(s.next().number, RAISED)
    results = s.results()
    assert (results["best_params"], results["best_value"], results["best_trial"]) == (
        {},
        None,
        None,
    )


def test_running_trial_keeps_its_best_and_its_newest_checkpoint(sweep: Sweeps) -> None:
    s = sweep(scheduler=Scheduler.none)
    spec = s.next()
    for epoch, loss in enumerate([0.5, 0.1, 0.3, 0.4], 1):
        s.report(spec, epoch, loss, saves=True)
    assert s.saved(spec) == ["attempt-0-epoch-2", "attempt-0-epoch-4"]
    s.race.end(spec.number, returned())
    assert s.saved(spec) == ["attempt-0-epoch-2"]


def test_pruned_and_failed_trials_keep_no_checkpoint(sweep: Sweeps) -> None:
    s = sweep()
    good, bad, broken = s.next(), s.next(), s.next()
    s.train(good, [0.1], saves=True)
    s.train(bad, [0.9], saves=True)
    s.report(broken, 1, 0.05, saves=True)
    s.race.end(broken.number, RAISED)
    assert (s.state(bad), s.state(broken)) == (PRUNED, FAIL)
    assert [s.saved(spec) for spec in (good, bad, broken)] == [["attempt-0-epoch-1"], [], []]
    assert {event.trial for event in s.told(CheckpointDropped)} == {1, 2}


def test_only_the_best_finished_trials_keep_their_checkpoint(sweep: Sweeps) -> None:
    s = sweep(num_trials=4, scheduler=Scheduler.none, checkpoint=CheckpointConf(keep_best=2))
    specs = [s.next() for _ in range(4)]
    for spec, loss in zip(specs, [0.5, 0.2, 0.4, 0.3], strict=True):
        s.train(spec, [loss], saves=True)
    assert [len(s.saved(spec)) for spec in specs] == [0, 1, 0, 1]


def test_interrupted_trial_keeps_what_it_continues_from(sweep: Sweeps) -> None:
    s = sweep()
    spec = s.next()
    s.report(spec, 1, 0.5, saves=True)
    s.race.interrupt("Ctrl-C")
    s.race.end(spec.number, STOPPED)
    assert s.saved(spec) == ["attempt-0-epoch-1"]


def test_ended_trial_is_on_disk_when_the_driver_dies(sweep: Sweeps) -> None:
    s = sweep()
    s.train(s.next(), [0.5])
    last = [event for event, _ in read_events(s.ledger.path)][-1]
    assert isinstance(last, TrialEnded)
    assert dataclasses.astuple(last)[1:4] == (0, COMPLETE, 0.5)


# --- pauses -------------------------------------------------------------------------------------

PROMOTE = AshaConf(max_resource=9, reduction_factor=3, mode=AshaMode.promote)


def paused(s: Sweep, spec: TrialSpec, loss: float, *, epoch: int = 1) -> None:
    assert s.report(spec, epoch, loss, saves=True) is PAUSE
    s.race.end(spec.number, STOPPED)


def test_paused_trial_goes_on_from_its_checkpoint_once_it_is_among_the_best(sweep: Sweeps) -> None:
    s = sweep(asha=PROMOTE)
    for loss in (0.2, 0.4, 0.6):
        paused(s, s.next(), loss)
    promoted = s.next()
    assert (promoted.number, promoted.attempt, promoted.first_report_index) == (0, 1, 1)
    assert Path(promoted.checkpoint or "").name == "attempt-0-epoch-1"
    assert s.train(promoted, [0.1], first=2) is COMPLETE
    assert s.race.next_trial() is None
    assert s.race.is_done()
    assert [s.record.trials[number].state for number in (1, 2)] == [PRUNED, PRUNED]
    assert s.losses(promoted) == [0.2, 0.1]


def test_best_of_few_trials_goes_on_to_its_end(sweep: Sweeps) -> None:
    s = sweep(asha=PROMOTE, num_trials=2)
    for loss in (0.4, 0.2):
        paused(s, s.next(), loss)
    best = s.next()
    assert best.number == 1, "of two no best third is known, but nothing else will come"
    paused(s, best, 0.1, epoch=3)
    again = s.next()
    assert s.train(again, [0.05], first=9) is COMPLETE
    assert s.race.next_trial() is None
    assert s.race.is_done()
    assert s.record.trials[0].state is PRUNED


def test_trial_that_still_leaves_its_lane_does_not_go_on_yet(sweep: Sweeps) -> None:
    s = sweep(asha=PROMOTE, num_trials=4)
    best = s.next()
    assert s.report(best, 1, 0.1, saves=True) is PAUSE
    for loss in (0.4, 0.6):
        paused(s, s.next(), loss)
    assert s.next().number == 3
    s.race.end(best.number, STOPPED)
    assert s.next().number == 0


def test_paused_trial_that_loses_its_lane_stays_paused(sweep: Sweeps) -> None:
    s = sweep(asha=PROMOTE)
    spec = s.next()
    assert s.report(spec, 1, 0.1, saves=True) is PAUSE
    s.race.end(spec.number, LOST)
    assert s.record.trials[0].is_paused
    assert s.next().number == 1
    assert s.told(AttemptLost) == []


def test_paused_trial_that_raises_while_it_leaves_stays_paused(sweep: Sweeps) -> None:
    s = sweep(asha=PROMOTE)
    spec = s.next()
    assert s.report(spec, 1, 0.1, saves=True) is PAUSE
    s.race.end(spec.number, RAISED)
    for loss in (0.4, 0.6):
        paused(s, s.next(), loss)
    promoted = s.next()
    assert promoted.number == 0
    assert s.report(promoted, 3, 0.05) is PAUSE, "it is judged again"


def test_paused_trials_wait_for_the_next_driver(sweep: Sweeps) -> None:
    s = sweep(asha=PROMOTE)
    for loss in (0.2, 0.4):
        paused(s, s.next(), loss)
    s.race.interrupt("Ctrl-C")
    assert not s.race.is_finished
    again = sweep(asha=PROMOTE)
    third = again.next()
    assert third.number == 2
    paused(again, third, 0.6)
    assert again.next().number == 0
    assert again.race.next_trial() is None
    assert not again.race.is_done(), "trial 0 may let another one go on"


def test_trial_that_leaves_when_the_study_ends_ends_with_it(sweep: Sweeps) -> None:
    s = sweep(asha=PROMOTE, stop=StopConf(target=0.05))
    leaving, other = s.next(), s.next()
    assert s.report(leaving, 1, 0.2, saves=True) is PAUSE
    assert s.report(other, 1, 0.04) is STOP
    s.race.end(leaving.number, LOST)
    s.race.end(other.number, STOPPED)
    assert s.record.trials[0].state is PRUNED
    assert s.race.is_finished


def test_paused_trials_go_on_where_the_next_driver_has_no_scheduler(sweep: Sweeps) -> None:
    s = sweep(asha=PROMOTE)
    paused(s, s.next(), 0.2)
    again = sweep(scheduler=Scheduler.none)
    assert again.next().number == 0


def test_preempted_trial_is_charged_where_it_never_gets_anywhere(sweep: Sweeps) -> None:
    gone = Outcome.failed(Fault.preempted, "its node went away")
    s = sweep(failure=FailureConf(max_retries=1))
    for epoch in (1, 2, 3):
        spec = s.next()
        assert spec.number == 0
        s.report(spec, epoch, 0.5, saves=True)
        s.race.end(0, gone)
    for attempt in (3, 4):
        assert s.next().attempt == attempt
        s.race.end(0, gone)
    assert s.record.trials[0].state is FAIL


def test_end_of_the_study_ends_what_is_paused(sweep: Sweeps) -> None:
    s = sweep(asha=PROMOTE, stop=StopConf(target=0.05))
    paused(s, s.next(), 0.2)
    spec = s.next()
    assert s.report(spec, 1, 0.04) is STOP
    s.race.end(spec.number, STOPPED)
    assert s.record.trials[0].state is PRUNED
    assert s.race.is_finished


# --- populations --------------------------------------------------------------------------------


def population(sweep: Sweeps, num_trials: int = 4, **conf: Any) -> Sweep:
    return sweep(
        scheduler=Scheduler.pbt,
        num_trials=num_trials,
        pbt=PbtConf(**{"perturbation_interval": 2, **conf}),
    )


def race_on(s: Sweep, specs: list[TrialSpec], epoch: int) -> None:
    """Report with losses 0.1, 0.2, ..., the worst one first, as each report is judged at once."""
    for spec in reversed(specs):
        verdict = s.report(spec, epoch, 0.1 + 0.1 * spec.number, saves=True)
        assert verdict is CONTINUE


def test_worst_trial_goes_on_from_a_checkpoint_of_the_best_with_other_values(sweep: Sweeps) -> None:
    s = population(sweep)
    specs = [s.next() for _ in range(4)]
    race_on(s, specs, 2)
    before = dict(s.record.trials[3].params)
    assert s.report(specs[3], 3, 0.9) is CONTINUE
    assert s.report(specs[3], 4, 0.8, saves=True) is PAUSE
    s.race.end(3, STOPPED)
    again = s.next()
    (told,) = s.told(Exploited)
    assert (again.number, told.donor) == (3, 0)
    assert again.checkpoint == told.checkpoint
    assert again.checkpoint in s.record.trials[0].checkpoints
    assert pickle.loads(again.config).lr == s.record.trials[3].params["lr"] != before["lr"]
    assert 1e-5 <= pickle.loads(again.config).lr <= 0.1
    assert s.report(again, 3, 0.05) is CONTINUE
    assert s.losses(again) == [0.4, 0.9, 0.8, 0.05], "the donor was at 2, so 3 comes again"


def test_what_a_trial_does_after_it_was_given_other_values_is_lost(sweep: Sweeps) -> None:
    s = population(sweep)
    specs = [s.next() for _ in range(4)]
    race_on(s, specs, 2)
    assert s.report(specs[3], 4, 0.8, saves=True) is PAUSE
    s.report(specs[3], 5, 0.7, saves=True)  # Its lane heard of it late.
    s.race.end(3, STOPPED)
    (told,) = s.told(Exploited)
    assert s.next().checkpoint == told.checkpoint
    assert s.losses(specs[3]) == [0.4, 0.8]


def test_same_checkpoint_of_a_donor_can_be_gone_on_from_twice(sweep: Sweeps) -> None:
    s = population(sweep)
    specs = [s.next() for _ in range(4)]
    race_on(s, specs, 2)
    for _ in range(2):
        s.report(specs[3], 4, 0.8, saves=True)
        s.race.end(3, STOPPED)
        specs[3] = s.next()
        assert specs[3].checkpoint == s.told(Exploited)[-1].checkpoint
    assert len(s.told(Exploited)) == 2


def test_checkpoint_that_another_trial_goes_on_from_outlives_its_own(sweep: Sweeps) -> None:
    s = population(sweep)
    specs = [s.next() for _ in range(4)]
    race_on(s, specs, 2)
    s.report(specs[3], 4, 0.8)
    s.race.end(3, STOPPED)
    (told,) = s.told(Exploited)
    donor = specs[told.donor]
    s.report(donor, 3, 0.09, saves=True)
    dropped = [(each.trial, each.checkpoint) for each in s.told(CheckpointDropped)]
    assert (told.donor, told.checkpoint) in dropped
    assert Path(told.checkpoint).is_dir()
    again = s.next()
    assert again.checkpoint == told.checkpoint
    s.report(again, 3, 0.07, saves=True)
    assert not Path(told.checkpoint).is_dir(), "nobody needs it any more"


def test_population_that_does_not_run_at_once_takes_turns(sweep: Sweeps) -> None:
    s = population(sweep, num_trials=3)
    order = []
    for _ in range(6):
        spec = s.next()
        order.append(spec.number)
        first = 2 * order.count(spec.number) - 1
        s.report(spec, first, 0.5)
        assert s.report(spec, first + 1, 0.1 * spec.number, saves=True) is PAUSE
        s.race.end(spec.number, STOPPED)
    assert order[:3] == [0, 1, 2]
    assert sorted(order[3:]) == [0, 1, 2]


def test_population_is_taken_up_again(sweep: Sweeps) -> None:
    s = population(sweep)
    specs = [s.next() for _ in range(4)]
    race_on(s, specs, 2)
    s.report(specs[3], 4, 0.8)
    (told,) = s.told(Exploited)
    s.race.interrupt("Ctrl-C")
    for number in range(4):
        s.race.end(number, STOPPED)
    again = population(sweep)
    taken = {spec.number: spec for spec in (again.next() for _ in range(4))}
    assert taken[3].checkpoint == told.checkpoint
    assert again.record.trials[3].params == told.params
    assert again.report(taken[0], 3, 0.2) is CONTINUE, "its interval began at 2"
    assert len(again.record.trials[0].judged) == 1
    assert again.report(taken[0], 4, 0.01, saves=True) is CONTINUE
    assert len(again.record.trials[0].judged) == 2


def test_pb2_chooses_values_within_the_bounds(sweep: Sweeps) -> None:
    s = sweep(scheduler=Scheduler.pb2, num_trials=4, pbt=PbtConf(perturbation_interval=1))
    specs = [s.next() for _ in range(4)]
    for epoch in range(1, 6):
        for number in reversed(range(4)):
            spec = specs[number]
            loss = 1 / epoch + 0.1 * number
            if s.report(spec, epoch, loss, saves=True) is PAUSE:
                s.race.end(number, STOPPED)
                specs[number] = s.next()
    told = s.told(Exploited)
    assert len(told) >= 2
    assert all(1e-5 <= each.params["lr"] <= 0.1 for each in told)
    assert len({each.params["lr"] for each in told}) > 1
