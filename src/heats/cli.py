"""The `heats` command: what a sweep's own command line cannot say.

Only typer is imported at the top, so that `heats --help` answers at once.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from heats.cli_new import register as register_new
from heats.cli_promote import register as register_promotion
from heats.cli_up import register as register_up
from heats.errors import ConfigError, ExitCode, HeatsError, LedgerError
from heats.tracking.root import find_root, store_uri

if TYPE_CHECKING:
    from heats.record import SweepRecord

_FIRST_PORT = 5000
_SYNC_TIMEOUT_S = 600.0


class _Commands(TyperGroup):
    """Commands whose HeatsError is a message and exit code 2, not a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was typed."""
        try:
            return super().invoke(ctx)
        except HeatsError as exc:
            typer.echo(f"heats: {exc}", err=True)
            raise typer.Exit(ExitCode.BAD_INPUT) from exc


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Look at sweeps, go on with them, promote what they found; start a project.",
)

RootOption = Annotated[
    Path | None,
    typer.Option(
        "--root",
        help="Tracking root. By default mlruns, here or in the nearest folder above.",
        show_default=False,
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print stable JSON and nothing else to standard output.")
]
SweepArgument = Annotated[
    str, typer.Argument(help="Name of the sweep, the beginning of just one, or latest.")
]


def main() -> None:
    """The console script."""
    logging.basicConfig(level=logging.WARNING, format="heats: %(message)s", stream=sys.stderr)
    app()


def _open_sweep(root: Path | None, name: str) -> tuple[Path, SweepRecord, str]:
    """Folder, record and state of the sweep that a name means."""
    from heats.tracking.ledger import find_sweep

    sweep_dir = find_sweep(find_root(root), name)
    record, state = _read_sweep(sweep_dir)
    return sweep_dir, record, state


def _read_sweep(sweep_dir: Path) -> tuple[SweepRecord, str]:
    from heats.analysis.tables import sweep_state
    from heats.tracking.ledger import is_running, read_sweep

    # The lock first: a driver that ends in between has then written all that is read.
    runs = is_running(sweep_dir)
    record = read_sweep(sweep_dir)
    return record, sweep_state(record, is_running=runs)


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, allow_nan=False))


@app.command("ls")
def list_all(root: RootOption = None, as_json: JsonOption = False) -> None:
    """List all sweeps, the newest first."""
    from heats.analysis.console import output_console, sweeps_table
    from heats.analysis.tables import sweep_json
    from heats.tracking.ledger import list_sweeps

    tracking_root = find_root(root)
    sweeps: list[tuple[str, str, SweepRecord | None]] = []
    forms: list[dict[str, Any]] = []
    for sweep_dir in list_sweeps(tracking_root):
        try:
            record, state = _read_sweep(sweep_dir)
        except LedgerError as exc:
            sweeps.append((sweep_dir.name, "damaged", None))
            forms.append({"name": sweep_dir.name, "state": "damaged", "reason": str(exc)})
            typer.echo(f"heats: {exc}", err=True)
            continue
        sweeps.append((record.start.study_name, state, record))
        forms.append(sweep_json(record, state=state))
    if as_json:
        _print_json(forms)
    elif sweeps:
        output_console().print(sweeps_table(sweeps))
    else:
        typer.echo(f"There is no sweep in {tracking_root} yet.")


@app.command()
def status(
    sweep: SweepArgument = "latest",
    root: RootOption = None,
    as_json: JsonOption = False,
    num_trials: Annotated[
        int, typer.Option("--top", min=1, help="How many of the best trials to list.")
    ] = 10,
) -> None:
    """Show counts, the best trials, what runs, and why trials ended."""
    from heats.analysis.console import output_console, status_view
    from heats.analysis.tables import sweep_json, trials_json

    _, record, state = _open_sweep(root, sweep)
    if as_json:
        _print_json({**sweep_json(record, state=state), "trials": trials_json(record)})
    else:
        console = output_console()
        console.print(status_view(record, state, num_trials=num_trials, width=console.width))


@app.command()
def report(
    sweep: SweepArgument = "latest",
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="File to write. By default report.html in the sweep's folder."
        ),
    ] = None,
    opens: Annotated[bool, typer.Option("--open", help="Open it in the web browser.")] = False,
    logs: Annotated[
        bool, typer.Option("--log/--no-log", help="Also store it at the MLflow parent run.")
    ] = True,
    root: RootOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write charts and tables into one HTML file that works offline."""
    from heats.analysis.report import log_report, write_report
    from heats.tracking.provenance import Provenance

    sweep_dir, record, state = _open_sweep(root, sweep)
    path = (output or sweep_dir / "report.html").absolute()
    try:
        origin = Provenance.load(sweep_dir / "provenance.json")
        write_report(record, path, state=state, origin=origin)
    except OSError as exc:
        msg = f"The report cannot be written to {path}: {exc.strerror}. Give another --output."
        raise HeatsError(msg) from exc
    is_logged = logs and log_report(record, path, root=sweep_dir.parent.parent)
    if as_json:
        _print_json({"path": str(path), "logged": is_logged})
    else:
        typer.echo(str(path))
    if opens:
        import webbrowser

        webbrowser.open(path.as_uri())


@app.command()
def ui(
    root: RootOption = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=1, max=65535, help="Port to serve on. By default 5000, or the next free one."
        ),
    ] = None,
) -> None:
    """Serve the MLflow pages of this tracking root on localhost."""
    tracking_root = find_root(root)
    uri = store_uri(tracking_root)
    if uri.startswith(("http://", "https://")):
        from heats.tracking.provenance import redact_url

        typer.echo(f"MLflow runs at {redact_url(uri)}")
        return
    if port is None:
        port = _free_port()
    elif not _is_free(port):
        msg = f"Port {port} is taken. Give another --port, or none for the next free one."
        raise ConfigError(msg)
    typer.echo(
        f"MLflow starts at http://127.0.0.1:{port} and answers in some 10 seconds. Ctrl-C ends it."
    )
    sys.stdout.flush()
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--workers", "1", "--artifacts-destination", str(tracking_root / "artifacts")]
    # Not as an argument, because a database URI may hold a password. Jobs are eight more processes
    # for features that sweeps do not use.
    settings = {"MLFLOW_BACKEND_STORE_URI": uri, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    os.execve(sys.executable, command, {**os.environ, **settings})


def _free_port() -> int:
    for port in range(_FIRST_PORT, _FIRST_PORT + 100):
        if _is_free(port):
            return port
    msg = f"Ports {_FIRST_PORT} to {_FIRST_PORT + 99} are all taken. Give a --port."
    raise ConfigError(msg)


def _is_free(port: int) -> bool:
    import socket

    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


@app.command()
def resume(
    sweep: SweepArgument,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="More overrides, such as n_trials=80 to extend the sweep."),
    ] = None,
    root: RootOption = None,
) -> None:
    """Go on with a sweep that was interrupted, or extend one that is finished."""
    from heats.plan import resume_command
    from heats.tracking.ledger import find_sweep

    sweep_dir = find_sweep(find_root(root), sweep)
    command, folder = resume_command(sweep_dir, overrides or [])
    try:
        os.chdir(folder)
    except OSError as exc:
        msg = f"The folder in which the sweep was started is not there any more: {folder}."
        raise HeatsError(msg) from exc
    sys.stdout.flush()
    os.execv(command[0], command)


@app.command()
def doctor(
    recipe: Annotated[str, typer.Argument(help="A recipe of conf/recipe.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="More overrides, such as epochs=3.")
    ] = None,
    isolation: Annotated[
        bool,
        typer.Option("--isolation", help="Whether a used lane changes the trials it runs."),
    ] = False,
) -> None:
    """Run a trial fresh, second in a lane, and after a hostile one: are its curves identical?

    Exit code 1 if they are not. In an app of your own: python APP.py -m hydra/sweeper=heats
    hydra.sweeper.check=isolation
    """
    from heats.tracking.root import find_above

    if not isolation:
        msg = "Say what to look into: --isolation."
        raise ConfigError(msg)
    program = find_above("sweep.py")
    if program is None:
        msg = "There is no sweep.py here or in a folder above. Go to where your project is."
        raise ConfigError(msg)
    command = [sys.executable, str(program), f"recipe={recipe}", "hydra.sweeper.check=isolation"]
    sys.stdout.flush()
    os.execv(command[0], [*command, *(overrides or [])])


@app.command()
def sync(
    sweep: SweepArgument,
    root: RootOption = None,
    as_json: JsonOption = False,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=1.0, help="Seconds to go on trying.")
    ] = _SYNC_TIMEOUT_S,
) -> None:
    """Send to MLflow what it lacks; exit code 1 if that was not possible."""
    from heats.tracking.provenance import redact_url
    from heats.tracking.runs import Runs
    from heats.tracking.shipper import Shipper

    sweep_dir, record, state = _open_sweep(root, sweep)
    if state == "running":
        msg = f"{record.start.study_name} is running, and sends everything by itself."
        raise HeatsError(msg)
    shipper = Shipper(sweep_dir, Runs(record.start, root=sweep_dir.parent.parent))
    is_complete = shipper.close(timeout_s)
    error = None if is_complete else shipper.last_error
    uri = redact_url(record.start.tracking_uri)
    if as_json:
        _print_json({"name": record.start.study_name, "complete": is_complete, "error": error})
    elif is_complete:
        typer.echo(f"MLflow at {uri} has everything.")
    else:
        typer.echo(f"heats: MLflow at {uri} still lacks something: {error}.", err=True)
    if not is_complete:
        raise typer.Exit(ExitCode.NOT_DONE)


register_new(app)
register_promotion(app)
register_up(app)
