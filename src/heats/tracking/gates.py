"""The three gates before a registered model: each looks for evidence, and says what it found.

`reproduced`: the checkpoint still gives the value that was logged. `better`: that value beats the
model that holds the alias now. `answers`: the model that would be served loads and predicts where
nothing of heats was imported.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heats.config import Direction
from heats.tracking.candidate import CHECKPOINT, DIRECTION, OBJECTIVE, RUN_ID, VALUE
from heats.wording import last_line

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mlflow.entities.model_registry import ModelVersion

    from heats.tracking.candidate import Candidate

# A value of zero has no relative difference; this much is rounding, whatever the tolerance.
_ABSOLUTE_TOLERANCE = 1e-9
_LOAD_TIMEOUT_S = 600.0
_MAX_REQUEST_CHARS = 1000
_MAX_DETAIL_CHARS = 500

# Runs where the model is served from: no heats, no current directory, only what it logged.
_ASK_MODEL = """
import json, sys, time
import mlflow
started_s = time.perf_counter()
model = mlflow.pyfunc.load_model(sys.argv[1])
load_s = time.perf_counter() - started_s
started_s = time.perf_counter()
answer = model.predict(model.input_example)
predict_s = time.perf_counter() - started_s
request = mlflow.models.convert_input_example_to_serving_input(model.input_example)
with open(sys.argv[2], "w", encoding="utf-8") as file:
    json.dump(
        {
            "answer": None if answer is None else " ".join(repr(answer).split())[:120],
            "has_signature": model.metadata.signature is not None,
            "load_s": load_s,
            "predict_s": predict_s,
            "request": request,
        },
        file,
    )
"""


@dataclass(frozen=True, slots=True)
class Gate:
    """What one gate found; `detail` is a sentence with the values it compared."""

    name: str
    passed: bool
    detail: str


def reproduced(
    candidate: Candidate,
    evaluate: Callable[..., Any],
    config: dict[str, Any],
    directory: Path,
    *,
    tolerance: float,
) -> Gate:
    """Whether the checkpoint, evaluated anew, gives the logged value.

    Args:
        candidate: The checkpoint and its logged value.
        evaluate: `evaluate(config, checkpoint_dir) -> metrics`, the user's.
        config: The trial's config, for `evaluate`.
        directory: The checkpoint's files, on this machine.
        tolerance: Relative difference that is allowed.
    """
    name = candidate.objective.name
    try:
        metrics: Mapping[str, Any] = evaluate(config, str(directory))
        value = float(metrics[name])
    except KeyError as exc:
        if exc.args != (name,):
            return Gate("reproduced", False, _raised("promotion.evaluate", exc))
        known = ", ".join(sorted(metrics)) or "nothing"
        detail = f"promotion.evaluate does not return the objective {name}; it returns {known}"
        return Gate("reproduced", False, detail)
    except Exception as exc:  # noqa: BLE001 - user code, on files that may be damaged
        return Gate("reproduced", False, _raised("promotion.evaluate", exc))
    is_close = math.isclose(value, candidate.value, rel_tol=tolerance, abs_tol=_ABSOLUTE_TOLERANCE)
    detail = f"{name} is {value!r} when evaluated anew, and was logged as {candidate.value!r}"
    if not is_close:
        detail += f" (promotion.tolerance: {tolerance:g})"
    return Gate("reproduced", is_close, detail)


def better(candidate: Candidate, champion: ModelVersion | None, alias: str) -> Gate:
    """Whether the candidate beats the version that holds the alias; where none does, it passes."""
    if champion is None:
        return Gate("better", True, f"no version holds the alias {alias} yet")
    tags, objective = champion.tags, candidate.objective
    held = f"version {champion.version}, the present {alias}"
    if VALUE not in tags:
        return Gate("better", False, f"{held}, has no tag {VALUE} to compare with")
    if is_from(champion, candidate):
        return Gate("better", True, f"{held}, is the same checkpoint with other predictor code")
    theirs = f"{tags.get(OBJECTIVE)} ({tags.get(DIRECTION)})"
    ours = f"{objective.name} ({objective.direction.value})"
    if theirs != ours:
        detail = (
            f"not comparable: the value of trial {candidate.trial} is {ours} {candidate.value!r}, "
            f"that of {held}, is {theirs} {tags[VALUE]}"
        )
        return Gate("better", False, detail)
    is_better = objective.is_better(candidate.value, float(tags[VALUE]))
    word = "higher" if objective.direction is Direction.maximize else "lower"
    detail = (
        f"{objective.name} {candidate.value!r} of trial {candidate.trial} is "
        f"{'' if is_better else 'not '}{word} than {tags[VALUE]} of {held}"
    )
    return Gate("better", is_better, detail)


def is_from(version: ModelVersion, candidate: Candidate) -> bool:
    """Whether the version holds the candidate's checkpoint."""
    tags = version.tags
    return (tags.get(RUN_ID), tags.get(CHECKPOINT)) == (candidate.run_id, candidate.checkpoint)


def answers(model_uri: str, tracking_uri: str, scratch: Path) -> tuple[Gate, str | None]:
    """Whether the model loads and predicts on its example in a process of its own.

    Args:
        model_uri: The model, as MLflow names it.
        tracking_uri: Where MLflow is.
        scratch: An empty folder, the current directory of that process.

    Returns:
        The gate, and the body of a request to a server of the model, if it is short.
    """
    result = scratch / "answer.json"
    # -P: the served model finds no module in the directory it happens to be started from.
    command = [sys.executable, "-P", "-c", _ASK_MODEL, model_uri, str(result)]
    env = {**os.environ, "MLFLOW_TRACKING_URI": tracking_uri}
    env.pop("MLFLOW_REGISTRY_URI", None)
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LOAD_TIMEOUT_S,
            cwd=scratch,
            env=env,
            check=False,
        )
    except subprocess.TimeoutExpired:
        detail = f"the model did not load and predict within {_LOAD_TIMEOUT_S:.0f} s"
        return Gate("answers", False, detail), None
    if done.returncode or not result.exists():
        reason = last_line(done.stderr) or f"exit status {done.returncode}"
        detail = f"the model does not load and predict in a fresh process: {reason}"
        return Gate("answers", False, _short(detail)), None
    found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    if found["answer"] is None:
        return Gate("answers", False, "the model predicts None on its example"), None
    if not found["has_signature"]:
        detail = "no signature can be inferred: the predictor fails where MLflow calls it"
        return Gate("answers", False, detail), None
    detail = (
        f"in a fresh process the model loads in {found['load_s']:.1f} s and predicts its example "
        f"in {found['predict_s'] * 1000:.0f} ms: {found['answer']}"
    )
    return Gate("answers", True, _short(detail)), _short_request(found["request"])


def _short_request(body: str | None) -> str | None:
    """A request for one row of the example; None where even that is long."""
    if body is None:
        return None
    request = json.loads(body)
    match request:
        case {"inputs": list() as rows}:
            request["inputs"] = rows[:1]
        case {"dataframe_split": {"data": list() as rows}}:
            request["dataframe_split"]["data"] = rows[:1]
            request["dataframe_split"].pop("index", None)
    text = json.dumps(request, separators=(",", ":"))
    return text if len(text) <= _MAX_REQUEST_CHARS else None


def _raised(what: str, exc: Exception) -> str:
    frames = traceback.extract_tb(exc.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    text = next(iter(str(exc).splitlines()), "")
    return _short(f"{what} raised {type(exc).__name__}: {text}{where}")


def _short(text: str) -> str:
    return text if len(text) <= _MAX_DETAIL_CHARS else text[: _MAX_DETAIL_CHARS - 3] + "..."
