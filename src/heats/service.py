"""What `heats up` keeps, told in a folder that only its user can read: is it there, and for whom.

There is one for each user, machine and Python environment.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from heats.errors import HeatsError
from heats.locks import is_locked

SOCKET, LOCK, BUSY, LOG, LANES = "socket", "lock", "busy", "log", "lanes"
"""Names in the folder: where drivers are asked for, what the service and a driver at work hold,
what the service says, and what Ray Train keeps of lanes."""

_STATE = "up.json"

_OF_A_SHELL = frozenset(
    "_ COLORTERM COLUMNS DISPLAY FORCE_COLOR HISTFILE HYDRA_FULL_ERROR INVOCATION_ID LESS LINES"
    " LS_COLORS MAKEFLAGS MAKELEVEL MAKEOVERRIDES MFLAGS NO_COLOR OLDPWD PAGER PS1 PWD SHLVL STY"
    " TERM TERM_PROGRAM TERM_PROGRAM_VERSION TMUX TMUX_PANE VIRTUAL_ENV VIRTUAL_ENV_PROMPT"
    " WINDOWID".split()
)
_PREFIXES_OF_A_SHELL = ("DBUS_", "PYENV_", "SSH_", "SYSTEMD_", "VSCODE_", "XDG_SESSION_")


@dataclass(frozen=True, slots=True)
class Up:
    """A service that runs: its process, Ray cluster and environment.

    `environ` has a digest of each part of the environment; `started_s` is the time since the epoch,
    and `created_s` what the system says of the process, to tell it from another of its number.
    """

    pid: int
    created_s: float
    started_s: float
    address: str
    num_cpus: int
    num_gpus: int
    idle_timeout_s: float
    max_memory_gib: float
    environ: dict[str, str]

    @classmethod
    def read(cls) -> Up | None:
        """The service of this environment; None where none runs."""
        try:
            own = folder()
            if not is_locked(own / LOCK):
                return None
            return cls(**json.loads((own / _STATE).read_text(encoding="utf-8")))
        except (HeatsError, OSError, ValueError, TypeError):
            return None  # Somebody else's folder; or it only starts, or is another version's.

    @staticmethod
    def forget() -> None:
        """Nothing is told any more of the one before."""
        (folder() / _STATE).unlink(missing_ok=True)

    def save(self) -> None:
        """Tell of it, all at once."""
        path = folder() / _STATE
        new = path.with_name(f"{_STATE}.new")
        new.write_text(json.dumps(asdict(self)), encoding="utf-8")
        new.replace(path)

    def refusal(self) -> str | None:
        """Why a sweep of this process cannot run there; None where it can."""
        own = environ_digests()
        names = {*own, *self.environ}
        if different := sorted(name for name in names if own.get(name) != self.environ.get(name)):
            listed = ", ".join(different[:5]) + (", ..." if len(different) > 5 else "")
            return f"the environment is another one than there: {listed}"
        if self._has_new_packages():
            return "packages have changed since it started"
        return None

    def _has_new_packages(self) -> bool:
        packages = [Path(entry) for entry in sys.path if entry.endswith("-packages")]
        own = Path(__file__).parent.rglob("*.py")
        return any(_changed_s(path) > self.started_s for path in (*packages, *own))


def folder() -> Path:
    """The folder of this user and Python environment, made where it does not exist.

    Raises:
        HeatsError: Somebody else owns it, or may write to it.
    """
    base = Path(tempfile.gettempdir(), f"heats-{os.getuid()}")
    base.mkdir(mode=0o700, exist_ok=True)
    status = base.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077 or base.is_symlink():
        msg = f"{base} belongs to somebody else, or others may use it: remove it."
        raise HeatsError(msg)
    own = base / hashlib.sha256(sys.prefix.encode()).hexdigest()[:12]
    own.mkdir(mode=0o700, exist_ok=True)
    return own


def environ_digests() -> dict[str, str]:
    """The environment that this process was started with, its limits included; as digests.

    What only a shell or a terminal reads is not in it, nor what the program itself has set since:
    it would set that again. Nor does it matter whether the virtual environment was activated.
    """
    found = {name: text for name, text in first_environ().items() if not is_of_a_shell(name)}
    found["PATH"] = path_with_own(found.get("PATH", ""))
    return {
        name: hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]
        for name, text in (found | _limits()).items()
    }


def path_with_own(path: str) -> str:
    """The `PATH` with the programs of this Python environment first, as activation has it."""
    own = str(Path(sys.prefix, "bin"))
    return os.pathsep.join([own, *(each for each in path.split(os.pathsep) if each != own)])


def shell_environ() -> dict[str, str]:
    """What a shell or a terminal reads of the environment that this process was started with."""
    return {name: text for name, text in first_environ().items() if is_of_a_shell(name)}


def _limits() -> dict[str, str]:
    mask = os.umask(0o077)
    os.umask(mask)
    limits = {
        "(umask)": oct(mask),
        "(niceness)": str(os.getpriority(os.PRIO_PROCESS, 0)),
        "(open files)": str(resource.getrlimit(resource.RLIMIT_NOFILE)[1]),
        "(memory)": str(resource.getrlimit(resource.RLIMIT_AS)),
    }
    if hasattr(os, "sched_getaffinity"):
        limits["(CPUs)"] = str(sorted(os.sched_getaffinity(0)))
    return limits


def _changed_s(path: Path) -> float:
    try:
        return path.stat().st_ctime
    except OSError:
        return 0.0


def first_environ() -> dict[str, str]:
    """The environment that this process was started with."""
    try:
        entries = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:  # Not Linux: what it is now is as near as one gets.
        return dict(os.environ)
    pairs = (os.fsdecode(entry).partition("=") for entry in entries if entry)
    return {name: value for name, _, value in pairs}


def is_of_a_shell(name: str) -> bool:
    """Whether only a shell or a terminal reads this environment variable."""
    return name in _OF_A_SHELL or name.startswith(_PREFIXES_OF_A_SHELL)


class NotHereError(BaseException):
    """A sweep cannot run in what `heats up` keeps, and nothing of it has begun: the reason.

    A `BaseException`, so that nothing on its way to the driver swallows it.
    """


@dataclass(slots=True)
class _Process:
    up: Up | None = None


_process = _Process()


def serve(up: Up) -> None:
    """Say that this process is one that the service keeps for the next sweep."""
    _process.up = up


def current() -> Up | None:
    """The service that this process is a driver of; None in any other process."""
    return _process.up
