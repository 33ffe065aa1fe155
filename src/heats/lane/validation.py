"""Validation of checkpoints: what a rank asks for, and the Ray task that does it.

As in Ray Train the function runs beside the training, in a task of its own, and its metrics join
those of the report. Ray Train has its controller start the task, and that knows nothing of turns;
here a lane does.
"""

from __future__ import annotations

import math
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import ray
from ray import cloudpickle
from ray.train import Checkpoint

from heats.errors import ConfigError
from heats.lane.output import output_to
from heats.trial import clean_metrics

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from ray.train import ValidationTaskConfig

    from heats.config import ValidationConf

_LOOK_EVERY_S = 0.2

VALIDATED, TIMEOUT, FAILED = "VALIDATED", "VALIDATION_TIMEOUT", "VALIDATION_FAILED"
"""How a validation ends, in the names of Ray's `ReportedCheckpointStatus`."""


@dataclass(frozen=True, slots=True)
class ValidationTask:
    """One call of the validation function, as it travels.

    `call` are the function and its keyword arguments, `path` the `sys.path` that they need; output
    goes to the file `log`.
    """

    call: bytes = field(repr=False)
    path: tuple[str, ...]
    timeout_s: float | None
    options: dict[str, Any]
    log: str


@dataclass(frozen=True, slots=True)
class Validated:
    """The end of a validation; of one that was VALIDATED with its metrics, cleaned and as given."""

    status: str
    metrics: dict[str, float] = field(default_factory=dict)
    pickled: bytes | None = None


class Validate(Protocol):
    """Runs one validation; `is_cancelled` may end it."""

    def __call__(self, task: ValidationTask, uri: str, is_cancelled: threading.Event) -> Validated:
        """Wait for its end."""
        ...


def validation_call(
    conf: ValidationConf, asked: bool | ValidationTaskConfig
) -> tuple[Callable[..., Any], dict[str, Any], float | None]:
    """The function, its keyword arguments and its time limit in s, for a report that asks for it.

    Raises:
        ConfigError: There is nothing at `validation.fn`.
    """
    from hydra.utils import get_method

    try:
        function = get_method(str(conf.fn))
    except Exception as exc:
        msg = f"validation.fn={conf.fn!r:.80} cannot be used: {exc}"
        raise ConfigError(msg) from exc
    kwargs = dict(conf.fn_kwargs or {})
    if isinstance(asked, bool):
        return function, kwargs, conf.timeout_s
    return function, kwargs | asked.fn_kwargs, asked.timeout_s


def validation_task(
    conf: ValidationConf, asked: bool | ValidationTaskConfig, job_dir: str
) -> ValidationTask:
    """What a rank sends to its lane for a report that asks for validation.

    Raises:
        ConfigError: There is nothing at `validation.fn`.
    """
    function, kwargs, timeout_s = validation_call(conf, asked)
    return ValidationTask(
        call=cloudpickle.dumps((function, kwargs)),
        path=tuple(sys.path),
        timeout_s=timeout_s,
        options=dict(conf.ray_remote_kwargs or {}),
        log=str(Path(job_dir, "validation.log")),
    )


def checked(metrics: object) -> dict[str, Any]:
    """What a validation function returned, where it is a dict.

    Raises:
        ValueError: It is none; Ray Train raises the same.
    """
    if not isinstance(metrics, dict):
        msg = (
            "The validation function must return a dictionary of metrics. "
            f"Got {type(metrics)} instead."
        )
        raise ValueError(msg)  # noqa: TRY004 - as Ray Train does
    return metrics


def validate_in_task(task: ValidationTask, uri: str, is_cancelled: threading.Event) -> Validated:
    """Validate a checkpoint in a Ray task: `Validate` for lanes."""
    began_s = time.monotonic()
    # Not inside of what the lane's own process has reserved, which is next to nothing.
    options = {"scheduling_strategy": "DEFAULT"} | task.options
    try:
        running = _validation.options(**options).remote(task.call, task.path, uri, task.log)
        while not ray.wait([running], timeout=_LOOK_EVERY_S)[0]:
            is_late = time.monotonic() - began_s >= (task.timeout_s or math.inf)
            if is_late or is_cancelled.is_set():
                ray.cancel(running, force=True)
                return Validated(TIMEOUT)
        metrics, pickled = ray.get(running)
    except ray.exceptions.RayTaskError:
        return Validated(FAILED)  # It wrote down what was wrong.
    except Exception as exc:  # noqa: BLE001 - Ray raises anything; training goes on without
        with Path(task.log).open("a", encoding="utf-8") as log:
            log.write(f"{uri} was not validated: {exc}\n")
        return Validated(FAILED)
    return Validated(VALIDATED, metrics, pickled)


def _validate(
    call: bytes, path: tuple[str, ...], uri: str, log: str
) -> tuple[dict[str, float], bytes]:
    known = set(sys.path)
    sys.path[:0] = [entry for entry in path if entry not in known]
    with output_to(Path(log)):
        try:
            function, kwargs = cloudpickle.loads(call)
            metrics = checked(function(Checkpoint(uri), **kwargs))
        except BaseException:
            traceback.print_exc()
            raise
    return clean_metrics(metrics), cloudpickle.dumps(metrics)


_validation: Any = ray.remote(_validate)
