"""`heats new`: a small project to start from.

Nothing heavy is imported before a command runs.
"""

from __future__ import annotations

import keyword
import re
import shlex
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from heats.errors import ConfigError, HeatsError, unknown_name
from heats.wording import program

# One folder for each framework. All files end in .j2, so that no tool takes them for this
# package's own (.gitignore, pyproject.toml, tests).
_TEMPLATES = Path(__file__).with_name("templates")
_SUFFIX = ".j2"
_MAX_NAME_CHARS = 64


def register(app: typer.Typer) -> None:
    """Add the command to the `heats` command."""
    app.command()(new)


def new(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the project, and of its folder.")
    ],
    framework: Annotated[
        str, typer.Option(help="What its training loop is written with.")
    ] = "pytorch",
    into: Annotated[
        Path, typer.Option(metavar="DIR", help="Where to make its folder.", show_default=False)
    ] = Path(),
) -> None:
    """Write a small project that trains, sweeps and can be promoted, to make your own of."""
    _check_name(name)
    known = frameworks()
    if framework not in known:
        raise unknown_name("framework", framework, known)  # noqa: EM101
    files = rendered(framework, name)
    target = into / name
    try:
        _write(files, target)
    except OSError as exc:
        msg = f"{target} cannot be written: {exc.strerror or exc}. Give a folder that can: --into."
        raise HeatsError(msg) from exc
    typer.echo(_made_text(target, files))


def frameworks() -> list[str]:
    """Those that there is a template for."""
    return sorted(path.name for path in _TEMPLATES.iterdir() if path.is_dir())


def rendered(framework: str, name: str) -> dict[str, str]:
    """Text of each file of the project, by its path."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    folder = _TEMPLATES / framework
    environment = Environment(
        loader=FileSystemLoader(folder, encoding="utf-8"),
        autoescape=False,  # Python and YAML, no HTML.
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    return {
        template.removesuffix(_SUFFIX): environment.get_template(template).render(name=name)
        for template in sorted(environment.list_templates())
        if template.endswith(_SUFFIX)
    }


def _check_name(name: str) -> None:
    problem = None
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name, flags=re.ASCII):
        problem = "it is no name for both a folder and a model"
    elif keyword.iskeyword(name):
        problem = "it is a word of Python's"
    elif len(name) > _MAX_NAME_CHARS:
        problem = f"it is longer than {_MAX_NAME_CHARS} characters"
    if problem:
        msg = (
            f"NAME={name!r:.80} is not valid: {problem}. Use letters, digits, `-` and `_`, "
            "beginning with a letter; say where to put it with --into."
        )
        raise ConfigError(msg)


def _write(files: dict[str, str], target: Path) -> None:
    """Make the project's folder with all its files, or nothing."""
    into = target.parent
    if not into.is_dir():
        msg = f"There is no folder {into}. Make it, or give another --into."
        raise ConfigError(msg)
    if target.is_symlink() or (target.exists() and not _is_empty_folder(target)):
        msg = f"{target} exists already, and nothing is overwritten. Give another NAME or --into."
        raise ConfigError(msg)
    with tempfile.TemporaryDirectory(dir=into, prefix=f".{target.name}-") as folder:
        project = Path(folder, target.name)
        for path, text in files.items():
            (project / path).parent.mkdir(parents=True, exist_ok=True)
            (project / path).write_text(text, encoding="utf-8")
        project.rename(target)  # At once; an empty folder is replaced, a full one is not.


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and next(path.iterdir(), None) is None


def _made_text(target: Path, files: dict[str, str]) -> str:
    """What was made, and what to do next."""
    heats = program()
    commands = {
        f"cd {shlex.quote(str(target))}": "",
        'python -m pytest -m "not sweep"': "its tests; without -m also a tiny sweep",
        "python train.py": "one run",
        "python train.py -m lr=1e-3,1e-2": "a sweep over what you type",
        "python train.py sweeps=asha": "the sweep of conf/sweeps/asha.yaml",
        f"{heats} report": "charts in one HTML file",
        f"{heats} promote latest": "register the best checkpoint",
    }
    width = max(map(len, list(commands)[1:]))
    lines = [f"{target} has", *(f"  {path}" for path in files), "next"]
    lines += [f"  {command:<{width}}  {what}".rstrip() for command, what in commands.items()]
    return "\n".join(lines)
