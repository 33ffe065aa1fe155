"""Downloads what the offline settings of the recipes read, and checks it."""

from __future__ import annotations

import subprocess
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from heats.recipes.offline.packages import PACKAGES

MIB = 1024**2


def _known() -> str:
    rows = (f"{each.name}: {each.holds} ({each.size / MIB:.1f} MiB)" for each in PACKAGES.values())
    return "\n\n".join(rows)


def download(
    names: Annotated[
        list[str] | None, typer.Argument(help=f"Nothing: all of them.\n\n{_known()}")
    ] = None,
    to: Annotated[str, typer.Option(help="Folder; recipes call it data_dir.")] = ".cache/data",
) -> None:
    """Download what the offline settings of the recipes read, unless it is there, and check it."""
    console = Console(stderr=True, highlight=False)
    if unknown := set(names or ()) - PACKAGES.keys():
        console.print(f"Unknown: {', '.join(sorted(unknown))}. Known: {', '.join(PACKAGES)}.")
        raise typer.Exit(2)
    is_missing = False
    for package in (PACKAGES[name] for name in names or PACKAGES):
        try:
            with console.status(f"{package.name}: {package.size / MIB:.1f} MiB"):
                path = package.download(to)
        except (OSError, ValueError, subprocess.CalledProcessError) as error:
            console.print(f"{package.name}: {escape(str(error))}", soft_wrap=True)
            is_missing = True
            continue
        console.print(escape(f"{package.name}  {path}  ({package.licence})"), soft_wrap=True)
    if is_missing:
        raise typer.Exit(1)


typer.run(download)
