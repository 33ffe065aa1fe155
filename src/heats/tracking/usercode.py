"""What of the user's project a finished sweep still needs: its functions and a trial's config."""

from __future__ import annotations

import contextlib
import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heats.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from heats.trial import SweepStarted


@contextlib.contextmanager
def as_in_sweep(start: SweepStarted) -> Iterator[None]:
    """Imports and relative paths mean what they meant in the sweep; prints go to standard error."""
    folder = Path(start.cwd)
    script = folder / start.script if start.script else None
    paths = [str(path) for path in (script.parent if script else folder, folder) if path.is_dir()]
    added = [path for path in dict.fromkeys(paths) if path not in sys.path]
    sys.path.extend(added)
    try:
        with contextlib.ExitStack() as stack:
            if folder.is_dir():
                stack.enter_context(contextlib.chdir(folder))
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))
            yield
    finally:
        for path in added:
            sys.path.remove(path)


def load_function(key: str, path: str) -> Callable[..., Any]:
    """The function that a dotted path names.

    Args:
        key: The setting that holds the path, for the error.
        path: `package.module.function`.

    Raises:
        ConfigError: There is no such module or function.
    """
    module_name, _, name = path.rpartition(".")
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as exc:
        msg = f"{key}={path!r} cannot be loaded: {exc}. Give the dotted path of a function."
        raise ConfigError(msg) from exc
    if not callable(function):
        msg = f"{key}={path!r} is no function but {type(function).__name__}."
        raise ConfigError(msg)
    loaded: Callable[..., Any] = function
    return loaded


def trial_config(path: Path) -> dict[str, Any]:
    """The config of a trial, every interpolation resolved: its `recipe.config`, else all of it.

    Call it inside `as_in_sweep`, where resolvers find what they found in the sweep.

    Args:
        path: The `config.yaml` that Hydra wrote for the trial; `hydra.yaml` beside it, if there is
            one, is what `${hydra:...}` refers to.

    Raises:
        ConfigError: The file cannot be read, or an interpolation cannot be resolved.
    """
    from hydra.conf import HydraConf
    from hydra.core.hydra_config import HydraConfig
    from hydra.core.plugins import Plugins
    from hydra.core.singleton import Singleton
    from hydra.core.utils import setup_globals
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    Plugins.instance()  # Loads them, and with them their resolvers.
    singletons = Singleton.get_state()
    try:
        setup_globals()
        config = OmegaConf.load(path)
        hydra_file = path.with_name("hydra.yaml")
        if hydra_file.exists():
            node = OmegaConf.create({"hydra": OmegaConf.structured(HydraConf)})
            OmegaConf.set_struct(node.hydra, False)  # Hydra adds keys that its schema lacks.
            merged = OmegaConf.merge(node, OmegaConf.load(hydra_file))
            assert isinstance(merged, DictConfig)  # noqa: S101 - as the first one is
            HydraConfig.instance().set_config(merged)
        recipe = OmegaConf.select(config, "recipe.config")
        chosen = recipe if isinstance(recipe, DictConfig) else config
        values = OmegaConf.to_container(chosen, resolve=True)
    except (OSError, YAMLError, OmegaConfBaseException) as exc:
        msg = f"The config of the trial, {path}, cannot be used: {exc}"
        raise ConfigError(msg) from exc
    finally:
        Singleton.set_state(singletons)
    if not isinstance(values, dict):
        msg = f"The config of the trial, {path}, is not a mapping."
        raise ConfigError(msg)
    return {str(key): value for key, value in values.items()}
