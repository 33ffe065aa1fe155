"""docs/tutorial.md as a program sees it: files that it has its reader write, and commands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

TUTORIAL = Path(__file__).parents[1] / "docs" / "tutorial.md"

_FILE = re.compile(r"^```(?:python|yaml)\n# (?P<path>\S+)\n(?P<text>.*?)^```$", re.M | re.S)
_COMMAND = re.compile(r"^    ((?:python|heats) .+)$", re.M)


class Step(NamedTuple):
    """A section: its heading, its files (path and text, in order), and its commands."""

    heading: str
    files: dict[str, str]
    commands: list[str]


def steps() -> list[Step]:
    """The sections of the tutorial, in order."""
    sections = re.split(r"^## ", TUTORIAL.read_text(encoding="utf-8"), flags=re.M)[1:]
    return [
        Step(
            section.partition("\n")[0],
            {found["path"]: found["text"] for found in _FILE.finditer(section)},
            _COMMAND.findall(re.sub(r"^```.*?^```$", "", section, flags=re.M | re.S)),
        )
        for section in sections
    ]


def write(files: dict[str, str], folder: Path) -> None:
    """Write files of a step."""
    for path, text in files.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
