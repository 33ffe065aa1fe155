"""The one place that wires everything: from Hydra's arguments to a finished sweep."""

from __future__ import annotations

import dataclasses
import difflib
import logging
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heats.asha import rung_milestones
from heats.checkpoints import orphans, remove
from heats.cluster import (
    Node,
    WorkerShape,
    capacity,
    dashboard_url,
    local_node,
    ray_cluster,
    worker_shape,
)
from heats.compose import Composer
from heats.config import Isolation, Scheduler, SweepConf, sweep_conf
from heats.errors import ConfigError, HeatsError, LedgerError
from heats.interrupts import Interrupts
from heats.race import Race
from heats.record import SweepRecord
from heats.space import SearchSpace, parse_space
from heats.study import Study
from heats.tracking.ledger import Ledger, check_study_name, read_sweep
from heats.trial import (
    Objective,
    SweepEnded,
    SweepResumed,
    SweepStarted,
)
from heats.view import LiveView, final_summary

if TYPE_CHECKING:
    from hydra.types import HydraContext, TaskFunction
    from omegaconf import DictConfig

    from heats.lane.task import TaskRef
    from heats.record import TrialRecord
    from heats.tracking.runs import Runs
    from heats.tracking.shipper import Shipper
    from heats.trial import Event, RunCreated

logger = logging.getLogger(__name__)

DEFAULT_NUM_TRIALS = 20
_SECTIONS = ("scaling", "lane", "asha", "objective", "checkpoints", "tracking", "stop", "cluster")
_CLOSE_TIMEOUT_S = 60.0
_INTERRUPTED_CLOSE_TIMEOUT_S = 2.5
EXIT_NO_RESULT, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 1, 2, 130


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
        code = _execute(plan)
    except (ConfigError, LedgerError) as exc:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        sys.stderr.write(f"{exc}\n")
        raise SystemExit(EXIT_BAD_INPUT) from exc
    if code:
        raise SystemExit(code)


@dataclass(frozen=True, slots=True)
class Plan:
    """A sweep that was checked and can start; making one creates nothing."""

    conf: SweepConf
    objective: Objective
    space: SearchSpace
    composer: Composer
    num_trials: int
    study_name: str
    sweep_dir: Path
    job_dir: Path
    task: TaskRef
    task_function: TaskFunction
    start: SweepStarted

    @classmethod
    def make(
        cls,
        hydra_context: HydraContext,
        task_function: TaskFunction,
        config: DictConfig,
        arguments: list[str],
    ) -> Plan:
        """Check everything that can be checked before anything starts.

        Raises:
            ConfigError: A setting, an override, a dimension or a name is wrong.
        """
        from omegaconf import OmegaConf, open_dict, read_write

        from heats.lane.task import TaskRef
        from heats.tracking.provenance import redact_text

        conf = sweep_conf(config.hydra.sweeper)
        loader = hydra_context.config_loader
        space = parse_space(conf.params, arguments, Composer(loader, config, []).group_options)
        _refuse_settings_as_dimensions(space, config)
        composer = Composer(loader, config, space.fixed)
        objective = Objective(
            conf.objective.metric, conf.objective.direction, conf.objective.resource
        )
        study = Study(objective, space, conf.sampler, conf.seed)
        num_trials = _num_trials(conf, space, study)
        composer.compose(study.ask().overrides, number=0)  # One point is tried before any starts.
        study_name = conf.study_name or _new_name(config)
        check_study_name(study_name)
        with read_write(config), open_dict(config):
            config.hydra.sweeper.study_name = study_name
        root = Path(conf.tracking.root).absolute()
        _check_writable(root)
        task = TaskRef.of_running_program(task_function)
        own = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
        choices = config.hydra.runtime.choices
        start = SweepStarted(
            time_s=time.time(),
            study_name=study_name,
            argv=task.argv,
            cwd=task.cwd,
            script=task.script,
            module=task.module,
            objective=objective,
            space=space.to_json(),
            fixed=space.fixed,
            settings=_plain(dataclasses.asdict(conf)),
            config_yaml=redact_text(OmegaConf.to_yaml(own)),
            experiment=conf.tracking.experiment or choices.get("recipe") or config.hydra.job.name,
            tracking_uri=conf.tracking.uri or f"sqlite:///{root / 'mlflow.db'}",
        )
        return cls(
            conf=conf,
            objective=objective,
            space=space,
            composer=composer,
            num_trials=num_trials,
            study_name=study_name,
            sweep_dir=root / "sweeps" / study_name,
            job_dir=Path(str(config.hydra.sweep.dir)).absolute(),
            task=task,
            task_function=task_function,
            start=start,
        )

    def shape(self, nodes: list[Node]) -> WorkerShape:
        """The workers of one trial on these nodes."""
        is_single_run = not self.space.dimensions
        return worker_shape(self.conf.scaling, nodes, is_single_run=is_single_run)


def resume_command(sweep_dir: Path, overrides: list[str]) -> tuple[list[str], str]:
    """The command that goes on with a sweep, and the directory to run it in.

    It is the command that started the sweep, told to resume it; `overrides` come last, so
    `n_trials=80` extends it.

    Raises:
        ConfigError: The sweep was started from a notebook, so there is no command.
    """
    start = read_sweep(sweep_dir).start
    if start.module is not None:
        program = ["-m", start.module]
    elif start.script is not None:
        program = [start.script]
    else:
        msg = (
            f"The sweep {start.study_name!r} was started from a notebook: go on with it there, with"
            " hydra.sweeper.resume=true and the same study_name."
        )
        raise ConfigError(msg)
    told = ["hydra.sweeper.resume=true", f"hydra.sweeper.study_name={start.study_name}"]
    arguments = list(start.argv[1:])
    end = _end_of_overrides(arguments)
    arguments[end:end] = [*told, *overrides]
    return [sys.executable, *program, *arguments], start.cwd


def _end_of_overrides(arguments: list[str]) -> int:
    """Place of one more override: argparse wants all of them side by side, as in `a=1 b=2 -m`."""
    for index in range(len(arguments), 0, -1):
        argument = arguments[index - 1]
        if not argument.startswith("-") and ("=" in argument or argument.startswith("~")):
            return index
    return len(arguments)


# --- running ----------------------------------------------------------------------------------


def _execute(plan: Plan) -> int:
    """Run the planned sweep; the exit code."""
    from heats.tracking.runs import Runs
    from heats.tracking.shipper import Shipper

    conf = plan.conf
    is_inline = conf.lane.isolation is Isolation.inline
    if conf.cluster.address is None and not is_inline:
        plan.shape([local_node(conf.cluster)])  # Refuses what cannot fit, before Ray starts.
    began = time.monotonic()
    with ExitStack() as stack:
        ledger, record = _open_ledger(plan)
        stack.callback(ledger.close)
        plan.job_dir.mkdir(parents=True, exist_ok=True)
        runs = Runs(record.start, root=Path(conf.tracking.root).absolute())
        shipper = Shipper(plan.sweep_dir, runs)
        view = LiveView(lambda: record, num_trials=plan.num_trials, rungs=_rungs(conf))

        def on_event(event: Event) -> None:
            shipper.notify()
            view.on_event(event)

        def create_run(trial: TrialRecord) -> RunCreated | None:
            tracking.result()  # A trial's run needs its parent.
            return runs.create_trial(trial)

        study = Study(plan.objective, plan.space, conf.sampler, conf.seed)
        study.restore(record)
        race = Race(
            conf=conf,
            num_trials=plan.num_trials,
            record=record,
            ledger=ledger,
            study=study,
            composer=plan.composer,
            create_run=create_run,
            sweep_job_dir=plan.job_dir,
            on_event=on_event,
        )
        reason, is_finished = "an error", False
        interrupts = Interrupts(race.interrupt, grace_s=conf.lane.stop_grace_s)
        try:
            with view, interrupts:
                # MLflow takes seconds to load and to make its database: Ray starts meanwhile.
                threads = stack.enter_context(ThreadPoolExecutor(1))
                tracking = threads.submit(_start_tracking, race, runs, shipper)
                if is_inline:
                    _run_inline(plan, race)
                else:
                    _run_in_lanes(plan, race, view)
            is_finished = race.is_finished
            reason = race.reason or "all trials are done"
        except KeyboardInterrupt:
            race.interrupt("Ctrl-C")
            reason = race.reason or "Ctrl-C"
        except HeatsError as exc:
            reason = str(exc)
            raise
        finally:
            _remove_orphans(record)
            race.write_results()
            ended = SweepEnded(time_s=time.time(), reason=reason, finished=is_finished)
            race.write(ended, durable=True)
            timeout_s = _INTERRUPTED_CLOSE_TIMEOUT_S if race.is_interrupted else _CLOSE_TIMEOUT_S
            if not shipper.close(timeout_s):
                logger.warning(
                    "MLflow at %s has not everything yet: `heats sync %s` sends the rest.",
                    record.start.tracking_uri,
                    plan.study_name,
                )
        _print_summary(record, plan.sweep_dir, time.monotonic() - began)
        if race.is_interrupted:
            return EXIT_INTERRUPTED
        return 0 if record.best() is not None else EXIT_NO_RESULT


def _run_inline(plan: Plan, race: Race) -> None:
    from heats.lane.inline import run_inline

    num_threads = None
    if plan.space.dimensions:  # As a lane's worker has them; a single run takes all CPUs.
        num_threads = int((plan.conf.scaling.resources_per_worker or {}).get("CPU", 1))
    run_inline(race, plan.task_function, seed=plan.conf.seed, num_threads=num_threads)


def _run_in_lanes(plan: Plan, race: Race, view: LiveView) -> None:
    from heats.lane.lane import LaneSettings
    from heats.tune.loop import run_trials

    conf = plan.conf
    view.status("starting Ray" if conf.cluster.address is None else "connecting to Ray")
    with (
        ray_cluster(conf.cluster) as nodes,
        tempfile.TemporaryDirectory(prefix="heats-lanes-", ignore_cleanup_errors=True) as folder,
    ):
        shape = plan.shape(nodes)
        num_lanes = min(capacity(shape, nodes), plan.num_trials)
        num_lanes = min(num_lanes, conf.lane.max_concurrent or num_lanes)
        url = dashboard_url()
        view.num_lanes = num_lanes
        view.status(
            f"starting {num_lanes} lane{'s' * (num_lanes > 1)} of {shape.num_workers} "
            f"worker{'s' * (shape.num_workers > 1)}" + (f"; Ray dashboard at {url}" if url else "")
        )
        settings = LaneSettings(
            task=plan.task,
            objective=plan.objective,
            asha=conf.asha if conf.scheduler is Scheduler.asha else None,
            lane=conf.lane,
            num_workers=shape.num_workers,
            use_gpu=shape.use_gpu,
            resources_per_worker=shape.resources_per_worker,
            storage_path=folder,
            tracking_uri=race.sweep.start.tracking_uri,
            seed=conf.seed,
            system_interval_s=(
                conf.tracking.system_metrics_interval_s if conf.tracking.system_metrics else None
            ),
        )
        run_trials(race, settings, num_lanes)


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
        _refuse_changes(record.start, plan.start)
    except ConfigError:
        ledger.close()
        raise
    event = SweepResumed(time_s=time.time(), pid=os.getpid())
    ledger.append(event, durable=True)
    record.apply(event)
    return ledger, record


def _refuse_changes(before: SweepStarted, now: SweepStarted) -> None:
    """Raise ConfigError where a resumed sweep would not be the same study any more."""
    what = {
        "search space": (before.space, now.space),
        "objective": (before.objective, now.objective),
        "config": (before.config_yaml, now.config_yaml),
    }
    for name, (old, new) in what.items():
        if old == new:
            continue
        lines = difflib.unified_diff(_as_lines(old), _as_lines(new), n=0, lineterm="")
        diff = [line for line in list(lines)[2:] if not line.startswith("@@")]
        if name == "config" and all(_is_budget(line[1:]) for line in diff):
            continue
        shown = "\n".join(diff[:20])
        msg = (
            f"The {name} is not what the sweep {before.study_name!r} was started with, so its "
            f"trials could not be compared:\n{shown}\nUndo the change, or start a new study."
        )
        raise ConfigError(msg)


def _as_lines(value: object) -> list[str]:
    if isinstance(value, dict):
        return [f"{key}: {each}" for key, each in sorted(value.items())]
    return str(value).splitlines()


def _is_budget(line: str) -> bool:
    """Whether a line of the config is about how much to run, not about what."""
    key = line.strip().partition(":")[0]
    budget = {"n_trials", "max_concurrent", "time_limit_s", "target", "max_failures", "study_name"}
    return key in budget


def _start_tracking(race: Race, runs: Runs, shipper: Shipper) -> None:
    if race.sweep.run_id is None:
        created = runs.create_parent()
        if created is not None:
            race.write(created)
    shipper.start()


def _remove_orphans(record: SweepRecord) -> None:
    for path in orphans(record):
        remove(path)


def _print_summary(record: SweepRecord, sweep_dir: Path, elapsed_s: float) -> None:
    from rich.console import Console

    Console().print(final_summary(record, sweep_dir, elapsed_s=elapsed_s), soft_wrap=True)


# --- checks -----------------------------------------------------------------------------------


def _num_trials(conf: SweepConf, space: SearchSpace, study: Study) -> int:
    if not space.dimensions:
        return 1
    num_points = study.num_points
    if num_points is None:
        return conf.n_trials or DEFAULT_NUM_TRIALS
    return min(conf.n_trials or num_points, num_points)


def _refuse_settings_as_dimensions(space: SearchSpace, config: DictConfig) -> None:
    """Settings of the sweep itself cannot differ between its trials."""
    from omegaconf import OmegaConf

    sweeper = OmegaConf.to_container(config.hydra.sweeper, resolve=False)
    for key in space.dimensions:
        section = key.lstrip("+").partition(".")[0]
        is_ours = isinstance(sweeper, dict) and sweeper.get(section) == f"${{{section}}}"
        if is_ours:
            msg = f"{key} is a setting of the whole sweep and cannot be searched over."
            raise ConfigError(msg)


def _rungs(conf: SweepConf) -> list[int]:
    """Where ASHA decides, for people to see; of rungs without end none."""
    if conf.scheduler is Scheduler.none or conf.asha.max_resource is None:
        return []
    return rung_milestones(
        min_resource=conf.asha.min_resource,
        max_resource=conf.asha.max_resource,
        reduction_factor=conf.asha.reduction_factor,
    )


def _new_name(config: DictConfig) -> str:
    """A new study's name: the named sweep, the recipe or the app, and the time."""
    choices = config.hydra.runtime.choices
    base = choices.get("sweeps") or choices.get("recipe") or config.hydra.job.name
    return f"{Path(str(base)).name}-{time.strftime('%Y%m%d-%H%M%S')}"


def _check_writable(root: Path) -> None:
    """Raise ConfigError where the first existing folder above cannot be written."""
    folder = root
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        msg = f"tracking.root={str(root)!r:.80} cannot be written: give a folder that can."
        raise ConfigError(msg)


def _plain(value: Any) -> Any:
    """JSON's types only."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value.value if isinstance(value, Enum) else value
