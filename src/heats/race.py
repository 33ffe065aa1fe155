"""The race: which trial runs next, whether it goes on, and what becomes of it.

This is the one `Coordinator`. It joins the study, the scheduler, the ledger and the checkpoints,
and knows nothing of Ray: Ray Tune drives it, `lane.inline` drives it, and a test can.
"""

from __future__ import annotations

import logging
import math
import pickle
import time
from collections import Counter, deque
from pathlib import Path
from typing import TYPE_CHECKING

from heats import checkpoints
from heats.attempt import Attempt
from heats.errors import ConfigError
from heats.fate import Fate, Lengths, fate, is_sealed
from heats.lane.health import TREATMENTS, Budget
from heats.results import Results
from heats.stops import Stops
from heats.trial import (
    AttemptLost,
    CheckpointDropped,
    Ending,
    Exploited,
    Judged,
    Outcome,
    Report,
    Reported,
    SystemSampled,
    TrialAsked,
    TrialEnded,
    TrialSpec,
    TrialState,
    TurnPaused,
    TurnStarted,
    Verdict,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from omegaconf import DictConfig

    from heats.compose import Composer
    from heats.config import SweepConf
    from heats.record import SweepRecord, TrialRecord
    from heats.study import Study
    from heats.tracking.ledger import Ledger
    from heats.trial import Event, Exploit, Fault, LaneShape, RunCreated, TrialScheduler

logger = logging.getLogger(__name__)


class Race:
    """Runs a study's trials against each other.

    Args:
        conf: The sweep's settings.
        num_trials: How many trials the study is to have in all.
        record: The sweep so far; of a resumed sweep, with its trials.
        ledger: Takes every event before anything else learns of it.
        study: Proposes points; already restored from the record.
        scheduler: Says who goes on; restored as well; None: everyone does.
        composer: Makes a trial's config of its overrides.
        shape_of: The workers that a trial with this config needs; raises ConfigError.
        create_run: Has a trial's MLflow run made, and gives what waits for it; that gives None
            where the run has to come later.
        sweep_job_dir: Holds the trials' folders and `optimization_results.yaml`; it exists.
        on_event: Is told of each event after it was written.
    """

    def __init__(
        self,
        *,
        conf: SweepConf,
        num_trials: int,
        record: SweepRecord,
        ledger: Ledger,
        study: Study,
        scheduler: TrialScheduler | None,
        composer: Composer,
        shape_of: Callable[[DictConfig], LaneShape],
        create_run: Callable[[TrialRecord], Callable[[], RunCreated | None]],
        sweep_job_dir: Path,
        on_event: Callable[[Event], None],
    ) -> None:
        self._conf, self._num_trials = conf, num_trials
        self.sweep = record
        self._ledger, self._study = ledger, study
        self._composer, self._shape_of = composer, shape_of
        self._create_run = create_run
        self._job_dir, self._on_event = sweep_job_dir, on_event
        self._objective = record.objective
        self._scheduler = scheduler
        self._results = Results(sweep_job_dir, record)
        self._stops = Stops(conf.stop, record)
        self._lengths = Lengths(conf, record)
        self._running: set[int] = set()
        self._num_samples: Counter[int] = Counter()
        self._num_faults: Counter[tuple[int, Budget]] = Counter()
        self._free_at: dict[int, int] = {}
        self._attempts: dict[int, Attempt] = {}
        self._waiting = deque(
            number
            for number, trial in sorted(record.trials.items())
            if trial.state is TrialState.RUNNING and not (trial.is_paused and scheduler is not None)
        )
        for trial in record.trials.values():
            is_target = trial.value is not None and self._stops.is_target(trial.value)
            if not is_target and not is_sealed(trial, self._objective):
                self._lengths.learn(trial)
        self._stop_reason: str | None = None
        self._is_interrupted = self._leaves = False
        self._is_metric_checked = self._has_warned_of_pauses = False
        self._may_drop = True  # What an earlier driver did not come to.

    # --- what Ray Tune asks and tells -----------------------------------------------------------

    def next_trial(self) -> TrialSpec | None:
        """The next attempt to run: one that waits to go on, or a new point of the study."""
        self._end_study(self._stops.now())
        while not self._is_over():
            if self._waiting:
                number = self._waiting.popleft()
                if is_sealed(
                    self.sweep.trials[number], self._objective
                ):  # The driver died before it said so.
                    self._settle(number, Outcome(Ending.STOPPED))
                    continue
            elif (paused := self._resume()) is not None:
                number = paused
            elif self._has_points:
                number = self._ask()
            elif self._running:
                return None
            elif not self._has_complete and (last := self._resume(is_last=True)) is not None:
                number = last
            else:
                self._settle_paused()  # No result will come that could let one go on.
                return None
            spec = self._spec(number)
            if spec is not None:
                return spec
        return None

    def is_done(self) -> bool:
        """Whether no trial will come any more; a running one may come back, so it waits for it."""
        self._end_study(self._stops.now())
        if self._is_over():
            return True
        return not (self._waiting or self._running or self._has_points or self._paused())

    def record(self, number: int, reports: list[Report]) -> Verdict:
        """Write a running trial's reports down; the scheduler's verdict on the last of them."""
        verdict = Verdict.CONTINUE
        for report in reports:
            if report.is_system:
                self._take_sample(number, report)
            else:  # Reports after a verdict happened all the same, so they are kept.
                told = self._take_report(number, report)
                verdict = verdict if told is Verdict.CONTINUE else told
        self._drop_checkpoints()
        self._end_study(self._stops.now())
        if verdict is not Verdict.STOP and self._is_over():
            return Verdict.LEAVE if self._leaves else Verdict.STOP
        return verdict

    def end(self, number: int, outcome: Outcome) -> None:
        """Write the end of an attempt down: the trial's final state, or that it comes again."""
        self._running.discard(number)
        fault = outcome.fault
        is_own = fault is not None and TREATMENTS[fault].budget is Budget.failures
        is_sealed_now = is_sealed(self.sweep.trials[number], self._objective)
        if is_sealed_now and outcome.ending is not Ending.RETURNED and not is_own:
            outcome = Outcome(Ending.STOPPED)  # The verdict stands, whatever became of the lane.
        elif self._has_paused(number, outcome):
            if self._leaves or not self._is_over():
                return
            outcome = Outcome(Ending.STOPPED)  # The study ended while it was leaving its lane.
        elif fault is not None and self._starts_again(number, fault, outcome.error or fault.value):
            return
        elif outcome.ending is Ending.STOPPED and self._leaves:
            return  # It stays unfinished and continues from its newest checkpoint on resume.
        self._settle(number, outcome)

    # --- what the sweeper asks and tells --------------------------------------------------------

    @property
    def reason(self) -> str | None:
        """Why the study ended before its last trial; None where it did not."""
        return None if self._leaves and self.is_finished else self._stop_reason

    @property
    def is_interrupted(self) -> bool:
        """Whether the sweep was told to leave, to be resumed later."""
        return self._is_interrupted

    @property
    def is_finished(self) -> bool:
        """Whether no trial is owed any more."""
        if any(trial.state is TrialState.RUNNING for trial in self.sweep.trials.values()):
            return False
        return not (self._leaves and self._has_points)

    @property
    def is_idle(self) -> bool:
        """Whether no trial runs now: Ray or the first lane may just be starting."""
        return not self._running

    def interrupt(self, reason: str) -> None:
        """End soon, leaving everything resumable: running trials stop at their next report.

        A study that has ended already, and waits for its last trials to stop, stays ended.
        """
        self._is_interrupted = True
        if self._stop_reason is None:
            self._stop_reason, self._leaves = reason, True

    def write(self, event: Event, *, durable: bool = False) -> None:
        """Write an event: to the ledger, then to the record, then to whoever listens."""
        self._ledger.append(event, durable=durable)
        self.sweep.apply(event)
        self._on_event(event)

    def write_results(self) -> None:
        """Rewrite `optimization_results.yaml` with the best trial so far."""
        self._results.write()

    # --- asking ---------------------------------------------------------------------------------

    @property
    def _has_points(self) -> bool:
        return len(self.sweep.trials) < self._num_trials and not self._study.is_exhausted

    def _ask(self) -> int:
        proposal = self._study.ask()
        self.write(
            TrialAsked(
                time_s=time.time(),
                trial=proposal.number,
                params=proposal.params,
                overrides=proposal.overrides,
            ),
            durable=True,
        )
        return proposal.number

    def _spec(self, number: int) -> TrialSpec | None:
        """The next attempt at a trial; None where its config does not compose, and so it failed."""
        trial = self.sweep.trials[number]
        created_run = self._create_run(trial) if trial.run_id is None else None
        error = None
        try:
            config = self._composer.compose(trial.overrides, number=number)
            shape = self._shape_of(config)
            pickled = pickle.dumps(config)
        except ConfigError as exc:
            error = str(exc)
        created = created_run() if created_run is not None else None
        if created is not None:
            self.write(created)
        if error is not None:
            self._finish(number, Fate(TrialState.FAIL, None, error))
            return None
        job_dir = self._job_dir / str(config.hydra.sweep.subdir)
        artifact_dir = trial.artifact_dir or str(job_dir / "artifacts")
        last = trial.last_checkpoint
        attempt = trial.attempts
        self.write(
            TurnStarted(
                time_s=time.time(),
                trial=number,
                attempt=attempt,
                checkpoint=last.checkpoint if last else None,
                job_dir=str(job_dir),
            )
        )
        self._running.add(number)
        self._attempts[number] = Attempt.of(trial, job_dir / "rank-0.log")
        return TrialSpec(
            number=number,
            attempt=attempt,
            config=pickled,
            shape=shape,
            run_id=trial.run_id,
            artifact_dir=artifact_dir,
            job_dir=str(job_dir),
            checkpoint=last.checkpoint if last else None,
            first_report_index=last.index if last else 0,
            reported=tuple((uri, each.metrics) for uri, each in trial.checkpoints.items()),
        )

    # --- reports --------------------------------------------------------------------------------

    def _take_report(self, number: int, report: Report) -> Verdict:
        news = self._attempts[number].take(report, self._objective.resource)
        if news is None:
            return Verdict.CONTINUE
        index, spent = news
        self.write(
            Reported(
                time_s=report.time_s,
                trial=number,
                index=index,
                resource=spent,
                metrics=report.metrics,
                checkpoint=report.checkpoint,
                tags=report.tags,
            )
        )
        self._may_drop |= report.checkpoint is not None
        self._lengths.see(spent)
        value = report.metrics.get(self._objective.name)
        if value is None:
            self._name_metrics_once(report)
            return Verdict.CONTINUE
        self._is_metric_checked = True
        self._study.report(number, spent, value)
        if reason := self._stops.at_value(number, value):
            self._end_study(reason)
            return Verdict.STOP
        if self._scheduler is None:
            return Verdict.CONTINUE if math.isfinite(value) else Verdict.STOP
        verdict = Verdict.CONTINUE
        for judgement in self._scheduler.judge(number, spent, value):
            verdict = judgement.verdict
            self.write(
                Judged(
                    time_s=time.time(),
                    trial=number,
                    rung=judgement.rung,
                    resource=spent,
                    value=value,
                    verdict=verdict,
                    needed=judgement.needed,
                )
            )
            if judgement.exploit is not None:
                self._exploit(number, judgement.exploit)
        return verdict

    def _exploit(self, number: int, exploit: Exploit) -> None:
        last = self.sweep.trials[exploit.donor].last_checkpoint
        if last is None or last.checkpoint is None:
            return  # It was dropped in this moment: the trial goes on from its own.
        self.write(
            Exploited(
                time_s=time.time(),
                trial=number,
                index=self._attempts[number].next_index - 1,
                donor=exploit.donor,
                checkpoint=last.checkpoint,
                resource=last.resource,
                params=exploit.params,
                overrides=exploit.overrides,
            ),
            durable=True,
        )
        self._attempts[number].is_abandoned = True

    def _take_sample(self, number: int, report: Report) -> None:
        step = self._num_samples[number]
        self._num_samples[number] += 1
        self.write(
            SystemSampled(time_s=report.time_s, trial=number, step=step, metrics=report.metrics)
        )

    def _name_metrics_once(self, report: Report) -> None:
        if self._objective.metric is not None and not self._is_metric_checked:
            self._is_metric_checked = True
            logger.warning(
                "The first report has no metric %r; it has: %s. If this goes on, the trials fail: "
                "set objective.metric to one of these.",
                self._objective.metric,
                ", ".join(sorted(report.metrics)) or "none that is a number",
            )

    # --- ends -----------------------------------------------------------------------------------

    def _settle(self, number: int, outcome: Outcome) -> None:
        end = fate(
            self.sweep.trials[number],
            outcome,
            self._objective,
            max_resource=self._lengths.full(),
            is_target=self._stops.is_target,
        )
        self._finish(number, end)
        if outcome.ending is Ending.RETURNED:
            self._lengths.learn(self.sweep.trials[number])
        if end.state is TrialState.COMPLETE and end.value is not None:
            self._end_study(self._stops.at_value(number, end.value))

    # --- pauses ---------------------------------------------------------------------------------

    def _paused(self) -> list[int]:
        """Trials that wait for their scheduler; not those that are still leaving their lane."""
        if self._scheduler is None:
            return []
        trials = self.sweep.trials.items()
        return [number for number, each in trials if each.is_paused and number not in self._running]

    def _resume(self, *, is_last: bool = False) -> int | None:
        if self._scheduler is None:
            return None

        def is_ready(number: int) -> bool:
            return self.sweep.trials[number].is_paused and number not in self._running

        return self._scheduler.resume(is_ready, is_last=is_last)

    @property
    def _has_complete(self) -> bool:
        return any(each.state is TrialState.COMPLETE for each in self.sweep.trials.values())

    def _has_paused(self, number: int, outcome: Outcome) -> bool:
        """Whether an attempt ended because its trial was told to pause, however it left."""
        trial = self.sweep.trials[number]
        if not trial.is_paused or outcome.ending is Ending.RETURNED:
            return False
        self.write(TurnPaused(time_s=time.time(), trial=number))
        if trial.last_checkpoint is None and not self._has_warned_of_pauses:
            self._has_warned_of_pauses = True
            logger.warning(
                "Trial %d reported no checkpoint, so when it goes on it starts from its beginning. "
                "Report one where the scheduler decides, or choose asha.mode=stop.",
                number,
            )
        return True

    def _settle_paused(self) -> None:
        for number in self._paused():
            self._settle(number, Outcome(Ending.STOPPED))

    def _starts_again(self, number: int, fault: Fault, reason: str) -> bool:
        trial = self.sweep.trials[number]
        budget = TREATMENTS[fault].budget
        num_reports = trial.last.index if trial.last else 0
        if budget is Budget.free and self._free_at.get(number) == num_reports:
            budget = Budget.retries  # A second time without anything in between: it could go on.
        self._free_at[number] = num_reports
        if self._leaves and budget is not Budget.failures:
            return True
        self._num_faults[number, budget] += 1
        count = self._num_faults[number, budget]
        if self._is_over() or not budget.allows(count, self._conf.failure):
            return False
        self.write(
            AttemptLost(
                time_s=time.time(),
                trial=number,
                attempt=trial.attempts - 1,
                reason=reason,
                fault=fault,
            ),
            durable=True,
        )
        last = trial.last_checkpoint
        where = f"from {self._objective.resource} {last.resource}" if last else "from its beginning"
        logger.warning(
            "Trial %d starts again %s (%s, charged to %s): %s",
            number,
            where,
            fault.value.replace("_", " "),
            budget.value,
            reason,
        )
        self._waiting.append(number)
        return True

    def _finish(self, number: int, end: Fate) -> None:
        log = None
        if end.state is TrialState.FAIL:
            attempt = self._attempts.get(number)
            log = str(attempt.log) if attempt is not None and attempt.log.exists() else None
        self.write(
            TrialEnded(
                time_s=time.time(),
                trial=number,
                state=end.state,
                value=end.value,
                error=end.error,
                log=log,
            ),
            durable=True,
        )
        self._study.tell(number, end.state, end.value)
        trial = self.sweep.trials[number]
        self._may_drop |= bool(trial.checkpoints)
        self._drop_checkpoints()
        self._end_study(self._stops.at_end(trial))
        self._results.update(trial)

    def _drop_checkpoints(self) -> None:
        if not self._may_drop:  # To look through all trials costs more the more there are.
            return
        self._may_drop = False
        for number, uri in checkpoints.unneeded(self.sweep, self._conf.checkpoint):
            self.write(CheckpointDropped(time_s=time.time(), trial=number, checkpoint=uri))
            if not any(uri in trial.checkpoints for trial in self.sweep.trials.values()):
                checkpoints.remove(uri)  # Else another trial of a population goes on from it.

    # --- the study's own end --------------------------------------------------------------------

    def _is_over(self) -> bool:
        return self._stop_reason is not None

    def _end_study(self, reason: str | None) -> None:
        """End for good, if there is a reason: nothing that waits goes on or stays RUNNING."""
        if reason is None or self._stop_reason is not None:
            return
        self._stop_reason = reason
        while self._waiting:
            self._settle(self._waiting.popleft(), Outcome(Ending.STOPPED))
        self._settle_paused()
