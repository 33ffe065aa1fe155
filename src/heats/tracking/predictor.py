"""The predictor: its source file, the packages it needs, and the model that MLflow makes of it."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlflow
from mlflow.exceptions import MlflowException
from mlflow.models import Model

from heats.errors import ConfigError, PromotionRefusedError

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

# Inline script metadata, as https://peps.python.org/pep-0723/ defines it.
_SCRIPT_METADATA = re.compile(
    r"(?m)^# /// script[ \t]*\n(?P<content>(?:^#(?:| .*)\n)+?)^# ///[ \t]*$"
)


def predictor_source(module: str) -> Path:
    """The source file of a module, without importing it (only the packages it is in).

    Args:
        module: Dotted path, the setting `promotion.predictor`.

    Raises:
        ConfigError: There is no such module, or it has no source file.
    """
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError) as exc:
        msg = f"promotion.predictor={module!r} cannot be found: {exc}."
        raise ConfigError(msg) from exc
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        msg = (
            f"promotion.predictor={module!r} is no Python module that can be found. Give the "
            "dotted path of a module that calls mlflow.models.set_model."
        )
        raise ConfigError(msg)
    return Path(spec.origin)


def requirements(source: Path) -> list[str]:
    """What pip must install to serve the predictor.

    A predictor may declare it itself, as PEP 723 script metadata (`# /// script`). Otherwise it is
    every package that it imports, in the version that is installed here.

    Raises:
        ConfigError: The file cannot be parsed.
    """
    text = source.read_text(encoding="utf-8")
    declared = _SCRIPT_METADATA.search(text)
    try:
        if declared:
            lines = [line[2:] for line in declared["content"].splitlines()]
            return list(tomllib.loads("\n".join(lines)).get("dependencies", []))
        modules = _imported_modules(ast.parse(text))
    except (SyntaxError, tomllib.TOMLDecodeError) as exc:
        msg = f"The predictor {source} cannot be read: {exc}."
        raise ConfigError(msg) from exc
    found = metadata.packages_distributions()
    names: set[str] = set()
    for module in modules - sys.stdlib_module_names:
        owners = set(found.get(module, []))
        # Several distributions may fill one package (mlflow, mlflow-skinny); one is named like it.
        namesake = {name for name in owners if name.lower().replace("-", "_") == module.lower()}
        names |= namesake or owners
    # A local label (2.13.0+cpu) names a build that package indexes do not have.
    return sorted(f"{name}=={metadata.version(name).partition('+')[0]}" for name in names)


def _imported_modules(tree: ast.Module) -> set[str]:
    modules: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules.add(node.module.partition(".")[0])
    return modules


def log_model(
    client: MlflowClient, run: Run, source: Path, checkpoint: Path, *, example: Any, step: int
) -> str:
    """Id of a new logged model of the run, whose status and times stay as they are.

    Args:
        client: MLflow, where its own functions go too.
        run: The trial's run.
        source: The predictor's file; its code is stored in the model.
        checkpoint: Directory that the predictor gets as `context.artifacts["checkpoint"]`.
        example: An input; the signature is inferred from it. None: the predictor's type hints say.
        step: Where in the run's metrics the model stands.

    Raises:
        PromotionRefusedError: The predictor fails on the checkpoint.
    """
    logged = client.create_logged_model(
        run.info.experiment_id, name="model", source_run_id=run.info.run_id
    )
    try:
        # Not mlflow.pyfunc.log_model: it would start the run again, and end it now.
        Model.log(
            artifact_path=None,
            flavor=mlflow.pyfunc,
            name="model",
            model_id=logged.model_id,
            run_id=run.info.run_id,
            step=step,
            python_model=str(source),
            artifacts={"checkpoint": str(checkpoint.absolute())},
            input_example=example,
            pip_requirements=requirements(source),
        )
    except Exception as exc:
        with contextlib.suppress(MlflowException):
            client.delete_logged_model(logged.model_id)
        if isinstance(exc, (MlflowException, ConfigError)):
            raise
        msg = f"The predictor {source} fails on the checkpoint: {type(exc).__name__}: {exc}"
        raise PromotionRefusedError(msg) from exc
    return str(logged.model_id)
