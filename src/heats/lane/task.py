"""The user's task function: how it travels to a worker, and how one job of it is run.

It travels by reference. A worker runs the user's script once, as `__main__` and with its arguments,
up to the point where Hydra would start, and takes the task function there; so classes, Enums,
resolvers and what stands under the main guard are as in the launching process.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import pickle
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from heats.errors import ConfigError
from heats.grammar import remember_interpolations
from heats.lane.files import save_config

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from omegaconf import DictConfig

    TaskFunction = Callable[[DictConfig], Any]


@dataclass(frozen=True, slots=True)
class TaskRef:
    """Where the task function is: a script, a module (`python -m`), or, in a notebook, bytes.

    `argv` and `cwd` are the launching process's; `path` is its `sys.path`. `wrapper` is the dotted
    path of a function that the loaded task function goes through, or None.
    """

    script: str | None
    module: str | None
    pickled: bytes | None = field(default=None, repr=False)
    argv: tuple[str, ...] = ()
    cwd: str = ""
    path: tuple[str, ...] = ()
    wrapper: str | None = None

    @classmethod
    def of_running_program(cls, task_function: TaskFunction) -> TaskRef:
        """The reference to the task function of the program that runs now."""
        main = sys.modules["__main__"]
        spec = getattr(main, "__spec__", None)
        script = getattr(main, "__file__", None)
        here: dict[str, Any] = {
            "argv": tuple(sys.argv),
            "cwd": os.getcwd(),
            "path": tuple(sys.path),
        }
        if spec is not None and spec.name != "__main__":
            return cls(None, spec.name, None, **here)
        if script is not None:
            return cls(str(Path(script).resolve()), None, None, **here)
        from ray import cloudpickle

        return cls(None, None, cloudpickle.dumps(task_function), **here)

    def load(self) -> TaskFunction:
        """The task function, after running the user's program up to where Hydra would start.

        Changes `sys.argv`, `sys.path`, `sys.modules["__main__"]` and the current directory.

        Raises:
            ConfigError: The program ended without starting Hydra.
        """
        from hydra.utils import get_method

        remember_interpolations()
        function = self._loaded()
        if self.wrapper is None:
            return function
        wrapped: TaskFunction = get_method(self.wrapper)(function)
        return wrapped

    def _loaded(self) -> TaskFunction:
        from hydra.core.plugins import Plugins

        os.chdir(self.cwd)
        sys.argv = list(self.argv)
        known = set(sys.path)
        sys.path[:0] = [entry for entry in self.path if entry not in known]
        Plugins.instance()  # Loads them: resolvers that a plugin registers must be here as well.
        if self.pickled is not None:
            function: TaskFunction = pickle.loads(self.pickled)
            return function
        main = ModuleType("__main__")
        if self.module is not None:
            spec = importlib.util.find_spec(self.module)
            if spec is not None and spec.submodule_search_locations is not None:
                spec = importlib.util.find_spec(f"{self.module}.__main__")
            if spec is None or spec.origin is None:
                msg = f"The module {self.module!r} of the running program cannot be found again."
                raise ConfigError(msg)
            main.__spec__, main.__package__, main.__file__ = spec, spec.parent, spec.origin
            source = spec.origin
        else:
            main.__file__ = source = str(self.script)
        sys.modules["__main__"] = main
        with _hydra_captured() as captured:
            try:
                code = compile(Path(source).read_bytes(), source, "exec")
                exec(code, main.__dict__)
            except _ReachedHydraError:
                return captured[0]
        msg = f"{source} ended without starting Hydra, so a worker cannot find the task function."
        raise ConfigError(msg)


class _ReachedHydraError(BaseException):
    """The user's program called its `@hydra.main` function."""


@contextmanager
def _hydra_captured() -> Iterator[list[TaskFunction]]:
    # The module; `hydra.main`, the name, is the function in it.
    module: Any = importlib.import_module("hydra.main")
    captured: list[TaskFunction] = []

    def capture(*, task_function: TaskFunction, **_: Any) -> None:
        captured.append(task_function)
        raise _ReachedHydraError

    original = module._run_hydra
    module._run_hydra = capture
    try:
        yield captured
    finally:
        module._run_hydra = original


def run_task(
    function: TaskFunction, config: bytes, *, job_dir: str, is_chief: bool
) -> float | None:
    """Run one job as Hydra's own launchers do, in `job_dir`; the returned number, if it is one.

    `config` is the composed config with its `hydra` node, pickled, as a `TrialSpec` has it.
    Only the chief (rank 0) writes Hydra's files and configures logging. Hydra's global state is
    set, so `HydraConfig.get()`, `hydra.job.chdir` and `hydra.job.env_set` work.

    Source: `hydra.core.utils.run_job` of hydra-core 1.3.
    """
    from hydra.core.utils import setup_globals

    setup_globals()
    with _own_hydra_state():
        returned = _run_job(function, config, job_dir, is_chief=is_chief)
    try:
        return None if returned is None else float(returned)
    except (TypeError, ValueError):
        return None


def _run_job(function: TaskFunction, pickled: bytes, job_dir: str, *, is_chief: bool) -> Any:
    from hydra.core.hydra_config import HydraConfig
    from hydra.core.utils import JobRuntime, configure_log, env_override
    from omegaconf import OmegaConf, open_dict, read_write

    config: DictConfig = pickle.loads(pickled)
    task_config = _without_hydra(config)
    hydra = config.hydra
    with read_write(hydra), open_dict(hydra):
        hydra.runtime.output_dir = job_dir
    _show_hydra(config)
    JobRuntime.instance().set("name", hydra.job.name)
    Path(job_dir).mkdir(parents=True, exist_ok=True)
    if is_chief:
        configure_log(hydra.job_logging, hydra.verbose)
        if hydra.output_subdir is not None:
            folder = Path(job_dir, hydra.output_subdir)
            folder.mkdir(parents=True, exist_ok=True)
            save_config(task_config, folder / "config.yaml")
            save_config(HydraConfig.instance().cfg, folder / "hydra.yaml")
            save_config(hydra.overrides.task, folder / "overrides.yaml")
    if hydra.job.chdir:
        os.chdir(job_dir)
    env: Any = OmegaConf.to_container(hydra.job.env_set, resolve=True)
    with env_override(env):
        return function(task_config)


def _without_hydra(config: DictConfig) -> DictConfig:
    """A copy without the `hydra` node that shares nothing with `config`.

    By pickle, for a tenth of what a copy by OmegaConf takes.
    """
    content = config.__dict__["_content"]
    hydra = content.pop("hydra")
    copy: DictConfig = pickle.loads(pickle.dumps(config))
    content["hydra"] = hydra
    return copy


def _show_hydra(config: DictConfig) -> None:
    """Make the `hydra` node what `HydraConfig.get()` gives; it can refer to the rest of `config`.

    Source: `HydraConfig.set_config` of hydra-core 1.3, without its deep copy of the node.
    """
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import DictConfig, OmegaConf

    OmegaConf.set_readonly(config.hydra, True)
    shown = DictConfig({})
    shown.__dict__["_content"]["hydra"] = config.hydra
    HydraConfig.instance().cfg = shown  # type: ignore[assignment] # It holds one in Hydra too.


@contextmanager
def _own_hydra_state() -> Iterator[None]:
    """Give a job a `HydraConfig` and a `JobRuntime` of its own, and undo what it registers.

    Resolvers of modules that the job imported stay, because the modules do.

    Hydra's `Singleton.get_state` and `set_state` do so by deep copies and a new search for plugins,
    0.1 s for each trial.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.core.singleton import Singleton
    from hydra.core.utils import JobRuntime
    from omegaconf.basecontainer import BaseContainer

    instances, resolvers = Singleton._instances, BaseContainer._resolvers
    own: dict[Any, Any] = dict(instances)
    for kind in (HydraConfig, JobRuntime):
        own.pop(kind, None)
    Singleton._instances, BaseContainer._resolvers = own, dict(resolvers)
    try:
        yield
    finally:
        imported = {
            name: resolver
            for name, resolver in BaseContainer._resolvers.items()
            if name not in resolvers and _module_of_resolver(resolver) != "__main__"
        }
        Singleton._instances, BaseContainer._resolvers = instances, resolvers | imported


def _module_of_resolver(wrapper: Any) -> str | None:
    """The module of the function that was registered, which OmegaConf wraps."""
    resolver = inspect.getclosurevars(wrapper).nonlocals.get("resolver")
    return getattr(resolver, "__module__", None)
