"""List the benchmarks and run them: `python -m benchmarks [NAME [OPTIONS]]`."""

from __future__ import annotations

import importlib
import sys

from rich.console import Console

BENCHMARKS: tuple[str, ...] = ("overhead", "startup", "throughput", "gpt2", "turns", "faults")
"""Modules of this package: the docstring says what is measured, `main(arguments)` does it."""


def main(arguments: list[str]) -> None:
    """Run the named benchmark with its options, or without a name all of them."""
    console = Console()
    if arguments[:1] in (["-h"], ["--help"], ["--list"]):
        console.print("python -m benchmarks [NAME [OPTIONS]] runs one of these, or all of them:")
        for name in BENCHMARKS:
            summary = (importlib.import_module(f"benchmarks.{name}").__doc__ or "").splitlines()[0]
            console.print(f"  {name:12} {summary}", highlight=False)
        console.print("python -m benchmarks NAME --help tells the options.", highlight=False)
        return
    names = BENCHMARKS
    if arguments and not arguments[0].startswith("-"):
        name, *arguments = arguments
        if name not in BENCHMARKS:
            console.print(f"Unknown benchmark {name!r}. Known: {', '.join(BENCHMARKS)}.")
            sys.exit(2)
        names = (name,)
    for name in names:
        importlib.import_module(f"benchmarks.{name}").main(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
