"""The model registry: which version holds an alias, and giving the alias back."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import mlflow
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from heats.errors import ConfigError, PromotionRefusedError, TrackingError, unknown_name
from heats.tracking.provenance import redact_url
from heats.wording import last_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mlflow.entities.model_registry import ModelVersion

DEFAULT_ALIAS = "champion"

ROLLED_BACK_AT, ROLLED_BACK_TO = "heats.rolled_back_at", "heats.rolled_back_to"
PROMOTED_VERSION = "heats.promoted_version"
PARENT_RUN = "mlflow.parentRunId"

_MODEL_NAME = re.compile(r"\w[\w .\-]{0,199}")
_ALIAS = re.compile(r"(?!(?:latest|v\d+)$)[\w\-]{1,255}", re.IGNORECASE)
_SQLITE = "sqlite:///"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    """A finished rollback: `restored` holds the alias now, `removed` held it before."""

    model: str
    alias: str
    removed: str
    restored: str
    tracking_uri: str


def rollback(model: str, *, tracking_uri: str, alias: str = DEFAULT_ALIAS) -> Rollback:
    """Give the alias back to the version that held it before.

    Args:
        model: Name of the registered model.
        tracking_uri: Where MLflow is.
        alias: The alias to move.

    Raises:
        ConfigError: There is no such model or alias.
        PromotionRefusedError: The version that holds the alias has no predecessor to go back to.
        TrackingError: MLflow refused or did not answer; the same command goes on.
    """
    check_model_name(model, "MODEL")
    check_alias(alias)
    with connection(tracking_uri) as client:
        held = holder(client, model, alias)
        if held is None:
            known = {found.name for found in client.search_registered_models()}
            if model not in known:
                raise unknown_name("registered model", model, known)  # noqa: EM101
            aliases = client.get_registered_model(model).aliases
            raise unknown_name(f"alias of {model}", alias, aliases)  # noqa: EM102
        restored = _predecessor(client, held, alias)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        client.set_model_version_tag(model, held.version, ROLLED_BACK_AT, now)
        client.set_model_version_tag(model, held.version, ROLLED_BACK_TO, restored.version)
        client.set_registered_model_alias(model, alias, restored.version)
        _untell_sweep(client, held)
        tell_sweep(client, restored)
    return Rollback(
        model=model,
        alias=alias,
        removed=str(held.version),
        restored=str(restored.version),
        tracking_uri=tracking_uri,
    )


def previous_tag(alias: str) -> str:
    """The tag of a version that names the one that held the alias before it."""
    return f"heats.previous_{alias}"


def _predecessor(client: MlflowClient, held: ModelVersion, alias: str) -> ModelVersion:
    number = held.tags.get(previous_tag(alias))
    where = f"{held.name}@{alias} is version {held.version}"
    if number is None:
        msg = f"{where}, and no version held the alias before it, so there is none to go back to."
        raise PromotionRefusedError(msg)
    try:
        previous = client.get_model_version(held.name, number)
    except MlflowException as exc:
        msg = f"{where}; the one before it, version {number}, is gone. Promote another trial."
        raise PromotionRefusedError(msg) from exc
    if ROLLED_BACK_AT in previous.tags:
        msg = (
            f"{where}; the one before it, version {number}, was itself rolled back on "
            f"{previous.tags[ROLLED_BACK_AT]}. Promote the trial that you want."
        )
        raise PromotionRefusedError(msg)
    return previous


@contextlib.contextmanager
def connection(tracking_uri: str) -> Iterator[MlflowClient]:
    """A client of MLflow, whose functions without a client go to the same place for the while.

    Raises:
        TrackingError: There is no such store, or a call inside was refused or not answered.
    """
    if tracking_uri.startswith(_SQLITE):
        path = Path(tracking_uri.removeprefix(_SQLITE))
        if not path.exists():  # MLflow would make an empty one.
            msg = f"There is no MLflow store at {path}. Name its folder with --root."
            raise TrackingError(msg)
    is_set = mlflow.is_tracking_uri_set()  # type: ignore[no-untyped-call]
    previous = mlflow.get_tracking_uri() if is_set else None
    mlflow.set_tracking_uri(tracking_uri)
    try:
        yield MlflowClient(tracking_uri, registry_uri=tracking_uri)
    except MlflowException as exc:
        reason = redact_url(last_line(exc.message))
        what = "does not answer" if "Max retries exceeded" in reason else f"refused: {reason}"
        shown = redact_url(tracking_uri)
        msg = f"MLflow at {shown} {what.rstrip('.')}. The same command goes on from here."
        raise TrackingError(msg) from exc
    finally:
        mlflow.set_tracking_uri(previous)  # type: ignore[arg-type]  # None: as it was


def holder(client: MlflowClient, model: str, alias: str) -> ModelVersion | None:
    """The version that holds the alias; None where there is no such model or alias."""
    try:
        version = client.get_registered_model(model).aliases.get(alias)
    except MlflowException as exc:
        if exc.error_code == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise
    return None if version is None else client.get_model_version(model, version)


def tell_sweep(client: MlflowClient, version: ModelVersion) -> None:
    """Name the version in the parent run of the sweep that it comes from."""
    if parent := _parent_run_id(client, version):
        client.set_tag(parent, PROMOTED_VERSION, _model_uri(version))


def _untell_sweep(client: MlflowClient, version: ModelVersion) -> None:
    if parent := _parent_run_id(client, version):
        if client.get_run(parent).data.tags.get(PROMOTED_VERSION) == _model_uri(version):
            client.delete_tag(parent, PROMOTED_VERSION)


def _parent_run_id(client: MlflowClient, version: ModelVersion) -> str | None:
    """The parent run; None where there is none, or the trial's run is gone."""
    if not version.run_id:
        return None
    try:
        parent: str | None = client.get_run(version.run_id).data.tags.get(PARENT_RUN)
    except MlflowException:
        return None
    return parent


def _model_uri(version: ModelVersion) -> str:
    return f"models:/{version.name}/{version.version}"


def check_model_name(name: str, key: str) -> None:
    """Refuse a name that MLflow, a URI or a path would take for something else.

    Raises:
        ConfigError: The message names `key`, where the name came from.
    """
    if not _MODEL_NAME.fullmatch(name):
        msg = (
            f"{key}={name!r:.80} is not valid as the name of a registered model: use letters, "
            "digits, `_`, `-`, `.` and spaces, at most 200, beginning with a letter or digit."
        )
        raise ConfigError(msg)


def check_alias(alias: str) -> None:
    """Refuse an alias that MLflow refuses.

    Raises:
        ConfigError: The message says what an alias may be.
    """
    if not _ALIAS.fullmatch(alias):
        msg = (
            f"--alias={alias!r:.80} is not valid: use letters, digits, `_` and `-`; `latest` and "
            "`v1` are MLflow's own."
        )
        raise ConfigError(msg)
