"""The one place that wires everything: from Hydra's arguments to a finished sweep."""

from __future__ import annotations

import logging
import os
import shlex
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from heats import service
from heats.checkpoints import orphans, remove
from heats.cluster import (
    capacity,
    dashboard_url,
    live_nodes,
    local_node,
    ray_cluster,
    service_of,
    without,
)
from heats.config import Check, Isolation
from heats.errors import ConfigError, ExitCode, HeatsError, LedgerError
from heats.interrupts import Interrupts
from heats.plan import Plan, refuse_changes
from heats.race import Race
from heats.record import SweepRecord
from heats.scheduler import make_scheduler
from heats.study import Study
from heats.tracking.ledger import Ledger
from heats.trial import LaneShape, SweepEnded, SweepResumed
from heats.view import LiveView, final_summary, root_option
from heats.wording import program

if TYPE_CHECKING:
    from collections.abc import Callable

    from hydra.types import HydraContext, TaskFunction
    from omegaconf import DictConfig

    from heats.cluster import Node
    from heats.record import TrialRecord
    from heats.tracking.tracker import Tracker
    from heats.trial import RunCreated

logger = logging.getLogger(__name__)

_INLINE_SHAPE = LaneShape(1, use_gpu=False, resources_per_worker={})
_CLOSE_TIMEOUT_S = 60.0
_INTERRUPTED_CLOSE_TIMEOUT_S = 2.5
_INTERRUPT_MARGIN_S = 0.5


def run(
    *,
    hydra_context: HydraContext,
    task_function: TaskFunction,
    config: DictConfig,
    arguments: list[str],
) -> None:
    """Run the sweep that a Hydra command line asks for, and show how it goes.

    Raises:
        SystemExit: 1 where no trial is complete, 2 for bad input (one message, nothing created),
            130 after Ctrl-C. With HYDRA_FULL_ERROR=1 bad input raises its own error instead.
    """
    try:
        plan = Plan.make(hydra_context, task_function, config, arguments)
        _refuse_service(plan)
        if plan.conf.check is Check.isolation:
            from heats.isolation import check_isolation

            code = check_isolation(plan)
        else:
            code = _execute(plan)
    except (ConfigError, LedgerError) as exc:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        sys.stderr.write(f"{exc}\n")
        raise SystemExit(ExitCode.BAD_INPUT) from exc
    if code:
        raise SystemExit(code)


def _refuse_service(plan: Plan) -> None:
    """Leave a process that `heats up` keeps, where the sweep wants another cluster or none."""
    if service.current() is None:
        return
    if plan.conf.lane.isolation is Isolation.inline:
        msg = "lane.isolation=inline needs no lanes"
        raise service.NotHereError(msg)
    if service_of(plan.conf.cluster) is None:
        msg = "its cluster is not what the settings in cluster ask for"
        raise service.NotHereError(msg)


# --- running ----------------------------------------------------------------------------------


def _execute(plan: Plan) -> int:
    """Run the planned sweep; the exit code."""
    from heats.tracking.tracker import Tracker

    conf = plan.conf
    is_inline = conf.lane.isolation is Isolation.inline
    if conf.cluster.address is None and not is_inline:
        plan.shape(
            without([local_node(conf.cluster)], conf.kept_free)
        )  # Refuses what cannot fit, before Ray starts.
    began = time.monotonic()
    with ExitStack() as stack:
        ledger, record = _open_ledger(plan)
        stack.callback(ledger.close)
        view = LiveView(lambda: record, num_trials=plan.num_trials, rungs=plan.rungs)

        def create_run(trial: TrialRecord) -> Callable[[], RunCreated | None]:
            tracking.result()  # A trial's run needs its parent.
            return tracker.create_trial(trial.number, trial.asked_s)

        def shape_of(config: DictConfig) -> LaneShape:
            return _INLINE_SHAPE if is_inline else plan.shape(nodes, config, nodes_now)

        def nodes_now() -> list[Node]:
            return without(live_nodes(), conf.kept_free)

        nodes = [local_node(conf.cluster)]  # Of another cluster: those found on connecting to it.
        study = Study(plan.objective, plan.space, conf.sampler, conf.seed)
        study.restore(record)
        race = Race(
            conf=conf,
            num_trials=plan.num_trials,
            record=record,
            ledger=ledger,
            study=study,
            scheduler=make_scheduler(conf, plan.space, record, plan.num_trials),
            composer=plan.composer,
            shape_of=shape_of,
            create_run=create_run,
            sweep_job_dir=plan.job_dir,
            on_event=view.on_event,
        )
        if plan.conf.resume:
            if race.is_done() and record.ended is not None and record.ended.finished:
                _print_nothing_to_do(plan, record)
                return _exit_code(record)
            resumed = SweepResumed(time_s=time.time(), pid=os.getpid(), argv=plan.start.argv)
            race.write(resumed, durable=True)
        plan.job_dir.mkdir(parents=True, exist_ok=True)
        tracker = Tracker(record.start, plan.sweep_dir, Path(conf.tracking.root).absolute())
        reason, is_finished = "an error", False

        def interrupt(why: str) -> None:
            race.interrupt(why)
            if race.is_idle:
                raise KeyboardInterrupt  # There is no report to wait for.

        # A lane learns of it with its next flush, and its ranks have their grace from then on.
        grace_s = conf.lane.flush_interval_s + conf.lane.stop_grace_s + _INTERRUPT_MARGIN_S
        interrupts = Interrupts(interrupt, grace_s=grace_s)
        try:
            with view, interrupts:
                # MLflow takes seconds to load and to make its database: Ray starts meanwhile.
                threads = stack.enter_context(ThreadPoolExecutor(1))
                tracking = threads.submit(_start_tracking, race, tracker)
                if is_inline:
                    _run_inline(plan, race)
                elif not race.is_done():
                    _run_in_lanes(plan, race, view, nodes)
            is_finished = race.is_finished
            reason = race.reason or "all trials are done"
        except KeyboardInterrupt:
            if not race.is_interrupted:
                race.interrupt("Ctrl-C")
            is_finished = race.is_finished
            reason = race.reason or "Ctrl-C"
        except HeatsError as exc:
            reason = str(exc)
            raise
        finally:
            ended = SweepEnded(time_s=time.time(), reason=reason, finished=is_finished)
            race.write(ended, durable=True)
            try:
                _remove_orphans(record)
                race.write_results()
            except OSError as exc:
                logger.warning("The sweep's folder could not be tidied up: %s", exc)
            timeout_s = _INTERRUPTED_CLOSE_TIMEOUT_S if race.is_interrupted else _CLOSE_TIMEOUT_S
            if not tracker.close(timeout_s):
                logger.warning(
                    "MLflow at %s has not everything yet: `%s sync %s` sends the rest.",
                    tracker.shown_uri,
                    program(),
                    plan.study_name,
                )
        _print_summary(record, plan.sweep_dir, time.monotonic() - began)
        if race.is_interrupted and not is_finished:
            return ExitCode.INTERRUPTED
        return _exit_code(record)


def _exit_code(record: SweepRecord) -> int:
    return ExitCode.DONE if record.best() is not None else ExitCode.NOT_DONE


def _run_inline(plan: Plan, race: Race) -> None:
    from heats.lane.inline import run_inline

    num_threads = None
    if plan.space.dimensions:  # As a lane's worker has them; a single run takes all CPUs.
        num_threads = int((plan.conf.scaling.resources_per_worker or {}).get("CPU", 1))
    run_inline(
        race,
        plan.task_function,
        seed=plan.conf.seed,
        tracking_uri=plan.start.tracking_uri,
        num_threads=num_threads,
        validation=plan.conf.validation,
    )


def _run_in_lanes(plan: Plan, race: Race, view: LiveView, nodes: list[Node]) -> None:
    import ray  # noqa: F401 - whole, before another thread loads more of it

    # Ray's start is mostly waiting for its processes.
    threading.Thread(target=_load_tune, daemon=True, name="heats-loading").start()
    conf = plan.conf
    is_own = conf.cluster.address is None and service_of(conf.cluster) is None
    view.status("starting Ray" if is_own else "connecting to Ray")
    with (
        ray_cluster(conf.cluster) as found,
        tempfile.TemporaryDirectory(prefix="heats-lanes-", ignore_cleanup_errors=True) as folder,
    ):
        from heats.lane.actors import LaneActors
        from heats.tune.loop import run_trials

        nodes[:] = without(found, conf.kept_free)
        shape = plan.shape(nodes)
        num_lanes = min(capacity(shape, nodes), plan.num_trials)
        num_lanes = min(num_lanes, conf.lane.max_concurrent or num_lanes)
        url = dashboard_url()
        view.num_lanes = num_lanes
        view.status(
            f"starting {num_lanes} lane{'s' * (num_lanes > 1)} of {shape.num_workers} "
            f"worker{'s' * (shape.num_workers > 1)}" + (f"; Ray dashboard at {url}" if url else "")
        )
        keeps_lanes = service_of(conf.cluster) is not None and conf.data.datasets is None
        settings = plan.lane_settings(
            storage_path=str(service.folder() / service.LANES) if keeps_lanes else folder,
            tracking_uri=race.sweep.start.tracking_uri,
        )
        # They start while Ray Tune gets ready, MLflow is loaded and the first trials are composed.
        num_ahead = num_lanes if plan.has_one_shape else 0
        lanes = LaneActors(
            settings, shape, num_ahead=num_ahead, max_lanes=num_lanes, stay=keeps_lanes
        )
        run_trials(
            race,
            settings,
            lanes,
            nodes=lambda: without(live_nodes(), conf.kept_free),
            max_concurrent=conf.lane.max_concurrent,
        )


def _load_tune() -> None:
    import heats.lane.actors
    import heats.tune.scheduler
    import heats.tune.search  # noqa: F401


def _open_ledger(plan: Plan) -> tuple[Ledger, SweepRecord]:
    """A new ledger, or the one to go on with, where nothing that counts has changed."""
    from heats.tracking.provenance import provenance

    if not plan.conf.resume:
        ledger = Ledger.create(plan.sweep_dir, plan.start)
        origin = provenance(Path(plan.task.cwd), plan.task.script)
        origin.save(plan.sweep_dir / "provenance.json")
        return ledger, SweepRecord(plan.start)
    ledger, record = Ledger.open(plan.sweep_dir)
    try:
        refuse_changes(record.start, plan.start)
    except ConfigError:
        ledger.close()
        raise
    return ledger, record


def _start_tracking(race: Race, tracker: Tracker) -> None:
    if race.sweep.run_id is None:
        created = tracker.create_parent()
        if created is not None:
            race.write(created)
    tracker.start()


def _remove_orphans(record: SweepRecord) -> None:
    for path in orphans(record):
        remove(path)


def _print_nothing_to_do(plan: Plan, record: SweepRecord) -> None:
    name, count = plan.study_name, len(record.trials)
    sys.stdout.write(f"{name} has all of its {count} trials: there is nothing to do.\n")
    if plan.space.dimensions and not plan.is_whole_grid:
        command = f"{program()} resume {shlex.quote(name)}{root_option(plan.sweep_dir)}"
        sys.stdout.write(f"For more trials: {command} n_trials={2 * count}\n")


def _print_summary(record: SweepRecord, sweep_dir: Path, elapsed_s: float) -> None:
    from rich.console import Console

    Console().print(final_summary(record, sweep_dir, elapsed_s=elapsed_s), soft_wrap=True)
