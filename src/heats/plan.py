"""What a command line asks for, checked as far as can be before anything starts."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import os
import re
import secrets
import sys
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heats.asha import rung_milestones
from heats.cluster import lane_shape
from heats.compose import Composer
from heats.config import AppConf, BackendConf, DataConf, ScalingConf, Scheduler, SweepConf
from heats.errors import ConfigError
from heats.scheduler import pace
from heats.settings import section, sweep_conf
from heats.space import parse_space
from heats.study import Study
from heats.tracking.ledger import check_study_name, read_sweep
from heats.trial import Objective, SweepStarted

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from hydra.types import HydraContext, TaskFunction
    from omegaconf import DictConfig

    from heats.cluster import Node
    from heats.lane.lane import LaneSettings
    from heats.lane.task import TaskRef
    from heats.space import SearchSpace
    from heats.trial import LaneShape

DEFAULT_NUM_TRIALS = 20
_MAX_TRIES = 100

_OF_LANES = ("scaling", "backend")
"""Sections that trials may differ in: each gets a lane of its own shape."""

_OF_TRIALS = (*(f"{section}." for section in _OF_LANES), "data.datasets.")


@dataclass(frozen=True, slots=True)
class Plan:
    """A sweep that was checked and can start; making one creates nothing."""

    conf: SweepConf
    objective: Objective
    space: SearchSpace
    composer: Composer
    num_trials: int
    is_whole_grid: bool
    study_name: str
    sweep_dir: Path
    job_dir: Path
    task: TaskRef
    task_function: TaskFunction
    start: SweepStarted
    first_data: DataConf  # Of a first trial: others may read other datasets.

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
        overrides = study.ask().overrides
        point = composer.compose(overrides, number=0)  # One is tried before any starts.
        _check_choices(space, composer, overrides)
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
            settings=_plain(
                dataclasses.asdict(conf) | {"n_trials": num_trials, "sampler": study.sampler_name}
            ),
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
            is_whole_grid=num_trials == study.num_points,
            study_name=study_name,
            sweep_dir=root / "sweeps" / study_name,
            job_dir=Path(str(config.hydra.sweep.dir)).absolute(),
            task=task,
            task_function=task_function,
            start=start,
            first_data=section(DataConf, point, "data"),
        )

    @property
    def rungs(self) -> list[int]:
        """Where ASHA decides, for people to see; of rungs without end none."""
        asha = self.conf.asha
        if self.conf.scheduler is not Scheduler.asha or asha.max_resource is None:
            return []
        return rung_milestones(
            min_resource=asha.min_resource,
            max_resource=asha.max_resource,
            reduction_factor=asha.reduction_factor,
        )

    def shape(
        self,
        nodes: list[Node],
        config: DictConfig | None = None,
        now: Callable[[], list[Node]] | None = None,
    ) -> LaneShape:
        """The workers of a trial on these nodes, which is what trials may have.

        `config` is the trial's own; None: as the sweep has it. `now` gives the nodes that there are
        now, for elastic workers; None: the same.

        Raises:
            ConfigError: They do not fit.
        """
        scaling, backend = self.conf.scaling, self.conf.backend
        if config is not None:
            scaling = section(ScalingConf, config, "scaling")
            backend = section(BackendConf, config, "backend")
        is_single_run = not self.space.dimensions
        try:
            is_elastic = isinstance(scaling.num_workers, list)
            there = now() if now is not None and is_elastic else None
            return lane_shape(scaling, backend, nodes, is_single_run=is_single_run, now=there)
        except ConfigError as exc:
            kept = [f"{amount:g} {name}" for name, amount in self.conf.kept_free.items()]
            if not kept:
                raise
            msg = f"{exc} Ray Data and validation keep {' + '.join(kept)} (data, validation)."
            raise ConfigError(msg) from exc

    @property
    def has_one_shape(self) -> bool:
        """Whether all trials have the same workers, as far as the search space tells."""
        names = (key.lstrip("+").partition(".")[0] for key in self.space.dimensions)
        return not set(_OF_LANES) & set(names)

    def lane_settings(self, *, storage_path: str, tracking_uri: str) -> LaneSettings:
        """What lanes need to know, for one driver run."""
        from heats.lane.lane import LaneSettings

        conf = self.conf
        tracking = conf.tracking
        return LaneSettings(
            sweep_id=f"heats-{secrets.token_hex(8)}",
            task=self.task,
            objective=self.objective,
            pace=pace(conf),
            lane=conf.lane,
            storage_path=storage_path,
            tracking_uri=tracking_uri,
            seed=conf.seed,
            system_interval_s=(
                tracking.system_metrics_interval_s if tracking.system_metrics else None
            ),
            validation=conf.validation,
            data=self.first_data,
        )


def resume_command(sweep_dir: Path, overrides: list[str]) -> tuple[list[str], str]:
    """The command that goes on with a sweep, and the directory to run it in.

    It is the command of its last driver, told to resume it; `overrides` come last, so `n_trials=80`
    extends it. In an app that has no key of that name it means `hydra.sweeper.n_trials=80`.

    Raises:
        ConfigError: The sweep was started from a notebook, so there is no command.
    """
    record = read_sweep(sweep_dir)
    start = record.start
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
    arguments = [argument for argument in record.argv[1:] if argument not in told]
    end = _end_of_overrides(arguments)
    own_keys = re.findall(r"^([^\s:]+):", start.config_yaml, flags=re.MULTILINE)
    arguments[end:end] = [*told, *(_of_sweeper(override, own_keys) for override in overrides)]
    return [sys.executable, *program, *arguments], start.cwd


def _of_sweeper(override: str, own_keys: Container[str]) -> str:
    """An override of a sweep's setting as the app takes it, whose own keys come first."""
    section = re.split(r"[.=]", override, maxsplit=1)[0]
    settings = {field.name for field in dataclasses.fields(SweepConf)}
    is_ours = section in settings and section not in own_keys
    return f"hydra.sweeper.{override}" if is_ours else override


def _end_of_overrides(arguments: list[str]) -> int:
    """Place of one more override: argparse wants all of them side by side, as in `a=1 b=2 -m`."""
    for index in range(len(arguments), 0, -1):
        argument = arguments[index - 1]
        if not argument.startswith("-") and ("=" in argument or argument.startswith("~")):
            return index
    return len(arguments)


def refuse_changes(before: SweepStarted, now: SweepStarted) -> None:
    """Raise ConfigError where a resumed sweep would not be the same study any more.

    What its fixed overrides mean is in the config, where a larger budget may be told from the rest.
    """
    what = {
        "search space": (_searched(before), _searched(now)),
        "objective": (before.objective, now.objective),
        "config": (_with_defaults(before.config_yaml), _with_defaults(now.config_yaml)),
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


def _searched(start: SweepStarted) -> dict[str, Any]:
    return {key: value for key, value in start.space.items() if key != "fixed"}


def _with_defaults(config_yaml: str) -> str:
    """A config with what its heats did not know yet as it is by default."""
    import yaml

    config = yaml.safe_load(config_yaml)
    if not isinstance(config, dict) or "recipe" not in config:
        return config_yaml  # Another app's own: heats adds nothing to it.
    return str(yaml.safe_dump(_filled(config, _plain(dataclasses.asdict(AppConf())))))


def _filled(config: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    filled = defaults | config
    for key, default in defaults.items():
        if isinstance(default, dict) and isinstance(filled[key], dict):
            filled[key] = _filled(filled[key], default)
    return filled


def _as_lines(value: object) -> list[str]:
    if isinstance(value, dict):
        return [f"{key}: {each}" for key, each in sorted(value.items())]
    return str(value).splitlines()


def _is_budget(line: str) -> bool:
    """Whether a line of the config is about how much to run, not about what."""
    key = line.strip().partition(":")[0]
    budget = {"n_trials", "max_concurrent", "time_limit_s", "target", "max_failures", "study_name"}
    return key in budget


# --- checks -----------------------------------------------------------------------------------


def _num_trials(conf: SweepConf, space: SearchSpace, study: Study) -> int:
    if not space.dimensions:
        return 1
    num_points = study.num_points
    if num_points is None:
        return conf.n_trials or DEFAULT_NUM_TRIALS
    return min(conf.n_trials or num_points, num_points)


def _check_choices(space: SearchSpace, composer: Composer, overrides: tuple[str, ...]) -> None:
    """Raise ConfigError where one of the listed values does not fit the config.

    Each is tried once, in a point that fits; of very many only the first.
    """
    tries = ((key, each.text) for key, listed in space.categories.items() for each in listed)
    for key, text in itertools.islice(tries, _MAX_TRIES):
        point = tuple(f"{key}={text}" if each.startswith(f"{key}=") else each for each in overrides)
        if point != overrides:
            composer.compose(point, number=0)


def _refuse_settings_as_dimensions(space: SearchSpace, config: DictConfig) -> None:
    """Settings of the sweep itself cannot differ between its trials; workers and datasets can."""
    from omegaconf import OmegaConf

    sweeper = OmegaConf.to_container(config.hydra.sweeper, resolve=False)
    for key in space.dimensions:
        name = key.lstrip("+")
        section = name.partition(".")[0]
        is_ours = isinstance(sweeper, dict) and sweeper.get(section) == f"${{{section}}}"
        if is_ours and not name.startswith(_OF_TRIALS):
            msg = f"{key} is a setting of the whole sweep and cannot be searched over."
            raise ConfigError(msg)


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
