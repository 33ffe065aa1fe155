"""`heats promote` and `heats rollback`.

Nothing heavy is imported before a command runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heats.errors import ExitCode, PromotionRefusedError, TrackingError
from heats.tracking.root import find_root, store_uri
from heats.wording import program

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from heats.tracking.models import Promotion

_SERVE_PORT = 5001

_SweepArgument = Annotated[
    str, typer.Argument(help="Name of the sweep, the beginning of just one, or latest.")
]
_AliasOption = Annotated[str, typer.Option(help="The alias to move.")]
_RootOption = Annotated[
    Path | None,
    typer.Option(
        "--root",
        help="Tracking root. By default mlruns, here or in the nearest folder above.",
        show_default=False,
    ),
]
_JsonOption = Annotated[
    bool, typer.Option("--json", help="Print stable JSON and nothing else to standard output.")
]


def register(app: typer.Typer) -> None:
    """Add the commands to the `heats` command."""
    app.command()(promote)
    app.command()(rollback)


def promote(
    sweep: _SweepArgument,
    trial: Annotated[
        int | None, typer.Option(min=0, help="Number of the trial. By default the best one.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Name of the registered model. By default promotion.model."),
    ] = None,
    alias: _AliasOption = "champion",
    is_forced: Annotated[
        bool, typer.Option("--force", help="Promote what is refused, and record that.")
    ] = False,
    evaluate: Annotated[
        str | None, typer.Option(metavar="DOTTED.PATH", help="Instead of promotion.evaluate.")
    ] = None,
    predictor: Annotated[
        str | None, typer.Option(metavar="DOTTED.PATH", help="Instead of promotion.predictor.")
    ] = None,
    example: Annotated[
        str | None, typer.Option(metavar="DOTTED.PATH", help="Instead of promotion.example.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The trial's config.yaml, if it is not in the sweep."),
    ] = None,
    root: _RootOption = None,
    as_json: _JsonOption = False,
) -> None:
    """Register the best checkpoint, if it reproduces its value and beats the champion.

    Exit code 1 and both values if it is refused.
    """
    from heats.tracking.ledger import find_sweep

    sweep_dir = find_sweep(find_root(root), sweep)
    with _refusals(as_json=as_json), _progress(is_shown=not as_json) as on_step:
        on_step("Opening MLflow")
        from heats.tracking.choices import Choices
        from heats.tracking.models import promote as promote_model

        _quiet_mlflow()
        choices = Choices(
            trial=trial,
            model=model,
            alias=alias,
            is_forced=is_forced,
            evaluate=evaluate,
            predictor=predictor,
            example=example,
            config=config,
        )
        promotion = promote_model(sweep_dir, choices, on_step=on_step)
    if as_json:
        _print_json({**dataclasses.asdict(promotion), **_shown_uri(promotion.tracking_uri)})
    else:
        typer.echo(_promotion_text(promotion))


def rollback(
    model: Annotated[str, typer.Argument(help="Name of the registered model.")],
    alias: _AliasOption = "champion",
    tracking_uri: Annotated[
        str | None,
        typer.Option(metavar="URI", help="Where MLflow is. By default as in the newest sweep."),
    ] = None,
    root: _RootOption = None,
    as_json: _JsonOption = False,
) -> None:
    """Give the alias back to the version that held it before."""
    uri = tracking_uri or store_uri(find_root(root))
    with _refusals(as_json=as_json), _progress(is_shown=not as_json) as on_step:
        on_step("Opening MLflow")
        from heats.tracking.registry import rollback as roll_back

        _quiet_mlflow()
        done = roll_back(model, tracking_uri=uri, alias=alias)
    if as_json:
        _print_json({**dataclasses.asdict(done), **_shown_uri(uri)})
    else:
        typer.echo(
            f"{done.model}@{done.alias} is version {done.restored} again; "
            f"version {done.removed} is marked as rolled back."
        )


def _promotion_text(promotion: Promotion) -> str:
    """What was promoted, what the gates found, and what to do next."""
    name = f"{promotion.model}@{promotion.alias}"
    what = (
        f"trial {promotion.trial} of {promotion.study} "
        f"({promotion.objective} {promotion.value:.6g}, run {promotion.run_id})"
    )
    if not promotion.is_new:
        lines = [f"{name} is {what} already: version {promotion.version}. Nothing was changed."]
    else:
        before = f"; it was version {promotion.previous}" if promotion.previous else ""
        lines = [f"{name} is version {promotion.version} now{before}: {what}."]
    for gate in promotion.gates:
        word = "passed" if gate.passed else "FORCED"
        lines.append(f"  {word}  {gate.name:<10}  {gate.detail}")
    return "\n".join([*lines, "", *_next_steps(promotion)])


def _next_steps(promotion: Promotion) -> list[str]:
    from heats.tracking.provenance import redact_url

    model_uri = f"models:/{promotion.model}@{promotion.alias}"
    uri = redact_url(promotion.tracking_uri)
    lines = [
        "Serve it:",
        *_path_lines(),
        f"  export MLFLOW_TRACKING_URI={shlex.quote(uri)}",
        f"  mlflow models serve -m {shlex.quote(model_uri)} --env-manager local -p {_SERVE_PORT}",
    ]
    if promotion.request is not None:
        lines += [
            f"  curl http://127.0.0.1:{_SERVE_PORT}/invocations "
            f"-H 'Content-Type: application/json' -d {shlex.quote(promotion.request)}",
        ]
    lines += [
        "Use it:",
        "  import mlflow",
        f"  mlflow.set_tracking_uri({uri!r})",
        f"  model = mlflow.pyfunc.load_model({model_uri!r})",
        "  model.predict(model.input_example)",
    ]
    if promotion.previous:
        alias = "" if promotion.alias == "champion" else f" --alias {promotion.alias}"
        lines += ["Undo it:", f"  {program()} rollback {shlex.quote(promotion.model)}{alias}"]
    return lines


def _path_lines() -> list[str]:
    """What lets a shell find `mlflow`, and `mlflow` its own server, where they are not on PATH."""
    if shutil.which("mlflow") is not None:
        return []
    return [f"  export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH"]


def _shown_uri(uri: str) -> dict[str, str]:
    from heats.tracking.provenance import redact_url

    return {"tracking_uri": redact_url(uri)}


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))


@contextlib.contextmanager
def _refusals(*, as_json: bool) -> Iterator[None]:
    """A refusal is a message and exit code 1; bad input is left to the `heats` command."""
    try:
        yield
    except (PromotionRefusedError, TrackingError) as exc:
        typer.echo(f"heats: {exc}", err=True)
        if as_json:
            _print_json({"error": type(exc).__name__, "message": str(exc)})
        raise typer.Exit(ExitCode.NOT_DONE) from exc


@contextlib.contextmanager
def _progress(*, is_shown: bool) -> Iterator[Callable[[str], None]]:
    """Tells on standard error what is being done; in a terminal in one line that goes away."""
    if not is_shown:
        yield lambda _: None
        return
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: typer.echo(f"{text} ...", err=True)
        return
    with console.status("") as line:
        yield lambda text: line.update(f"{text} ...")


def _quiet_mlflow() -> None:
    """Only its errors are shown, and a server that is down is given up on within seconds."""
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    for name in ("mlflow", "alembic", "urllib3"):
        logging.getLogger(name).setLevel(logging.ERROR)
