"""Where a sweep came from: the code, the packages and the machine; and secrets kept out of it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import platform
import re
import subprocess
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

REDACTED = "***"

MAX_DIFF_BYTES = 1_000_000
_GIT_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """The state of code and machine when a sweep started.

    `commit`, `branch` and `is_dirty` are None outside a git repository. `diff` is what the working
    tree had changed since `commit`, secrets redacted, cut at 1 MB; untracked files are not in it.
    """

    commit: str | None
    branch: str | None
    is_dirty: bool | None
    diff: str
    python: str
    platform: str
    packages: dict[str, str]

    def save(self, path: Path) -> None:
        """Write it to `path` in one step."""
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps(dataclasses.asdict(self), indent=1))
        part.replace(path)

    @classmethod
    def load(cls, path: Path) -> Provenance | None:
        """What `save` wrote, or None where there is no such file."""
        try:
            return cls(**json.loads(path.read_text()))
        except FileNotFoundError:
            return None


def provenance(cwd: Path, script: str | None) -> Provenance:
    """The provenance of a program that starts now.

    Args:
        cwd: Its current directory.
        script: Its file, absolute or relative to `cwd`; the repository it lies in is the one that
            counts. None: the repository of `cwd`.
    """
    folder = (cwd / script).parent if script else cwd
    folder = folder if folder.is_dir() else cwd
    commit = _git(folder, "rev-parse", "HEAD") or None
    branch = status = None
    diff = ""
    if commit:
        branch = _git(folder, "rev-parse", "--abbrev-ref", "HEAD")
        status = _git(folder, "status", "--porcelain")
        if status:
            diff = _git(folder, "diff", "--no-ext-diff", "--no-textconv", "HEAD") or ""
    return Provenance(
        commit=commit,
        branch=branch,
        is_dirty=None if status is None else bool(status),
        diff=redact_text(diff),
        python=platform.python_version(),
        platform=platform.platform(),
        packages=installed_packages(),
    )


@cache
def installed_packages() -> dict[str, str]:
    """Version of each installed distribution, by name."""
    # Each look at `metadata` parses the whole file.
    told = (dist.metadata for dist in metadata.distributions())
    found = {each["Name"]: each["Version"] for each in told if each["Name"]}
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def _git(folder: Path, *arguments: str) -> str | None:
    """What git prints, at most 1 MB of it; None where it fails or is not there."""
    # No file watcher and no pager may start because a repository's own configuration says so.
    command = ["git", "-c", "core.fsmonitor=false", "--no-pager", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_GIT_TIMEOUT_S,
            check=True,
            env=os.environ | {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    text = done.stdout[:MAX_DIFF_BYTES].decode(errors="replace").strip()
    if len(done.stdout) > MAX_DIFF_BYTES:
        text += f"\n... cut at {MAX_DIFF_BYTES} bytes"
    return text


# --- secrets ------------------------------------------------------------------------------------

_SECRET_WORDS = frozenset(
    {"password", "passwd", "passphrase", "pwd", "secret", "secrets", "credential", "credentials"}
)
_SECRET_PAIRS = frozenset(
    {("api", "key"), ("access", "key"), ("private", "key"), ("secret", "key"), ("auth", "key")}
)
# A token is a secret unless the word before says that it is text for a model.
_TEXT_TOKENS = frozenset(
    "pad eos bos unk mask sep cls image audio video special start end stop new next first last "
    "per max min num decoder prompt".split()
)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
# `key: value`, `key=value`, `"key": "value"`, wherever they stand in a line.
_HEAD = re.compile(r"""(?P<key>[A-Za-z_][\w.\-]*)["']?[ \t]*(?:=(?!=)|:(?![:/]))[ \t]*""")
_VALUE = re.compile(r"""(?P<text>"(?:[^"\\\n]|\\.)*"|'[^'\n]*'|[^\n]*)""")
_KNOWN_SHAPES = re.compile(
    r"\b(?:gh[pousr]_|github_pat_|glpat-|hf_|sk-|xox[abpr]-|AKIA)[A-Za-z0-9_\-]{16,}"
)
_URL_PASSWORD = re.compile(r"(?<=://)([^\s/@:]*):[^\s/@]+(?=@)")


def is_secret_key(key: str) -> bool:
    """Whether a setting of this name (dotted or not) holds a secret."""
    words = [word.lower() for word in _WORD.findall(key)]
    if not words:
        return False
    if _SECRET_WORDS.intersection(words) or words[-1] == "apikey":
        return True
    if any(pair in _SECRET_PAIRS for pair in itertools.pairwise(words)):
        return True
    return words[-1] == "token" and (len(words) == 1 or words[-2] not in _TEXT_TOKENS)


def redact_value(key: str, value: str) -> str:
    """The value of a setting as it may be logged."""
    return REDACTED if is_secret_key(key) else redact_url(value)


def redact_url(text: str) -> str:
    """The text with the password of every URL in it replaced by `***`."""
    return _URL_PASSWORD.sub(rf"\1:{REDACTED}", text)


def redact_text(text: str) -> str:
    """YAML, override lines, code or a diff, with every secret in it replaced by `***`.

    A secret is the value of a key that `is_secret_key` knows (an unquoted one reaches to the end of
    its line, a block to the end of its indentation), a URL's password, or a text of the shape of a
    well-known service's keys.
    """
    kept: list[str] = []
    at = 0
    while head := _HEAD.search(text, at):
        kept.append(text[at : head.end()])
        at = head.end()
        if is_secret_key(head["key"]):
            value = _VALUE.match(text, at)
            assert value is not None  # noqa: S101 - it matches the empty text too
            at = value.end()
            if value["text"].strip()[:1] in ("", "|", ">"):
                at = _end_of_block(text, head.start(), at)
            kept.append(REDACTED)
    kept.append(text[at:])
    return _KNOWN_SHAPES.sub(REDACTED, redact_url("".join(kept)))


def _end_of_block(text: str, key_at: int, at: int) -> int:
    """Where the lines after `at` that are indented deeper than the key's line end."""
    line_at = text.rfind("\n", 0, key_at) + 1
    indent = re.compile(r"[+\- ]*")
    depth = len(_matched(indent, text, line_at))
    while at < len(text):
        end = text.find("\n", at + 1)
        end = len(text) if end < 0 else end
        if text[at + 1 : end].strip() and len(_matched(indent, text, at + 1)) <= depth:
            break
        at = end
    return at


def _matched(pattern: re.Pattern[str], text: str, at: int) -> str:
    match = pattern.match(text, at)
    return match[0] if match else ""
