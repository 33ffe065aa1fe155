"""The Hydra plugin: `hydra/sweeper=heats`, its samplers, and the schema of the shipped app.

Hydra imports this module at every start of every Hydra app on the machine, also of those that do
not use heats: nothing heavy may be imported here, and nothing of another plugin replaced.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.plugins.sweeper import Sweeper
from omegaconf import OmegaConf

from heats.config import AppConf
from heats.settings import sweeper_node

if TYPE_CHECKING:
    from hydra.types import HydraContext, TaskFunction
    from omegaconf import DictConfig

SAMPLER_GROUP = "hydra/sweeper/sampler"
SAMPLERS: dict[str, dict[str, Any]] = {
    "tpe": {
        "_target_": "optuna.samplers.TPESampler",
        "n_startup_trials": 10,
        "multivariate": True,
        "constant_liar": True,
        "seed": None,  # hydra.sweeper.seed, here and below.
    },
    "random": {"_target_": "optuna.samplers.RandomSampler", "seed": None},
    # Not a class: heats.study knows this name, because a grid needs the search space to be built.
    "grid": {"_target_": "heats.study.grid"},
}


class HeatsSweeper(Sweeper):
    """Hands a sweep over to heats.sweeper, which is loaded only now."""

    def __init__(self, **settings: Any) -> None:
        """Take any settings: heats.config.sweep_conf checks them, with better messages."""
        self.settings = settings

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Keep what Hydra gives until `sweep` is called."""
        self.given: dict[str, Any] = {
            "hydra_context": hydra_context,
            "task_function": task_function,
            "config": config,
        }

    def sweep(self, arguments: list[str]) -> Any:
        """The result of the sweep over `arguments`, the overrides of the command line."""
        if not self.given["config"].hydra.callbacks:  # They have seen the start: it is this one's.
            from heats.up.client import hand_over

            code = hand_over()
            if code is not None:
                raise SystemExit(code)
        from heats.sweeper import run

        return run(**self.given, arguments=arguments)


def project_dir() -> str:
    """The folder that holds the app's config folder, else the current directory."""
    main = []
    if GlobalHydra.instance().is_initialized():
        search_path = GlobalHydra.instance().config_loader().get_search_path().get_path()
        main = [part.path for part in search_path if part.provider == "main"]
    scheme, _, path = main[0].rpartition("://") if main else ("", "", "")
    is_folder = bool(path) and scheme in ("", "file")
    return str(Path(path).absolute().parent if is_folder else Path.cwd())


def register() -> None:
    """Make the configs known to Hydra.

    The Optuna sweeper of Hydra keeps its samplers in the same group, under the same names. Where it
    is installed its own are left (or put) in place: they name Optuna's classes as ours do.
    """
    store = ConfigStore.instance()
    store.store(name="heats_app", node=AppConf, provider="heats")
    # The entry without a choice lets `hydra/sweeper/sampler=tpe` do without a `+`.
    node = {"defaults": ["_self_", {"sampler": None}], **sweeper_node()}
    store.store(group="hydra/sweeper", name="heats", node=node, provider="heats")
    try:
        taken = store.list(SAMPLER_GROUP)
    except OSError:
        taken = []
    for name, node in SAMPLERS.items():
        if f"{name}.yaml" not in taken:
            store.store(group=SAMPLER_GROUP, name=name, node=node, provider="heats")
    OmegaConf.register_new_resolver("heats.project_dir", project_dir, replace=True)


register()
