"""The durable truth of a sweep: `<root>/sweeps/<study name>/ledger.jsonl`, only ever appended to.

One process writes it, under a lock that dies with it; anyone may read it at any time. A line counts
once it is whole: a torn last line is what a power cut or `kill -9` leaves, and is cut when the
sweep is resumed.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import unicodedata
from typing import TYPE_CHECKING, Self

from heats.errors import (
    ConfigError,
    LedgerError,
    SweepLockedError,
    SweepNotFoundError,
    unknown_name,
)
from heats.locks import FileLock, LockHeldError, is_locked, read_owner
from heats.record import SweepRecord
from heats.tracking.codec import decode_line, encode_event
from heats.tracking.provenance import redact_text
from heats.trial import SweepStarted

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from heats.trial import Event

logger = logging.getLogger(__name__)

LEDGER = "ledger.jsonl"
LOCK = "ledger.lock"
_NEWEST = ("latest", "last")
_MAX_NAME_BYTES = 200


class Ledger:
    """The one writer of a sweep's ledger; it holds the sweep's lock until `close`."""

    def __init__(self, path: Path, lock: FileLock, size: int, mode: int = 0o644) -> None:
        """Continue `path` at `size` bytes; use `create` or `open` instead."""
        self._path = path
        self._lock = lock
        self._mutex = threading.Lock()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._fd = os.open(path, flags, mode)
        self._size = size

    @property
    def path(self) -> Path:
        """The ledger file."""
        return self._path

    @classmethod
    def create(cls, sweep_dir: Path, start: SweepStarted) -> Self:
        """A new ledger in `sweep_dir` (made where it does not exist) that begins with `start`.

        A resume needs the command line as it was given, so where that holds a secret nobody but
        the user may read the file.

        Raises:
            LedgerError: There is a sweep already, or the folder cannot be written.
            SweepLockedError: Another living process writes this sweep.
        """
        path = sweep_dir / LEDGER
        try:
            sweep_dir.mkdir(parents=True, exist_ok=True)
            lock = _lock(sweep_dir)
        except OSError as exc:
            msg = f"{sweep_dir} cannot be written: {exc.strerror}. Set tracking.root elsewhere."
            raise LedgerError(msg) from exc
        ledger: Self | None = None
        try:
            if path.exists() and b"\n" in path.read_bytes():
                name = sweep_dir.name
                msg = (
                    f"The sweep {name!r} exists already, in {sweep_dir}. Go on with it by "
                    f"`heats resume {name}`, or give another study_name."
                )
                raise LedgerError(msg)
            path.unlink(missing_ok=True)
            ledger = cls(path, lock, 0, 0o600 if _holds_secrets(start) else 0o644)
            ledger.append(start, durable=True)
            _sync_folder(sweep_dir)
        except BaseException:
            (ledger.close if ledger else lock.release)()
            raise
        return ledger

    @classmethod
    def open(cls, sweep_dir: Path) -> tuple[Self, SweepRecord]:
        """The ledger of an existing sweep, to go on with it, and all that it says.

        A torn last line is cut, and a warning names how many bytes were lost.

        Raises:
            LedgerError: There is no ledger, or a line before the last one is damaged.
            SweepLockedError: Another living process writes this sweep.
        """
        path = sweep_dir / LEDGER
        if not path.exists():
            msg = f"There is no ledger at {path}. `heats ls` shows the sweeps there are."
            raise LedgerError(msg)
        lock = _lock(sweep_dir)
        try:
            record, size = _replay(path)
            if (torn := path.stat().st_size - size) > 0:
                os.truncate(path, size)
                logger.warning(
                    "Cut a torn last line of %d bytes from %s: its writer died in the middle of "
                    "it. What it said is done again.",
                    torn,
                    path,
                )
            return cls(path, lock, size), record
        except BaseException:
            lock.release()
            raise

    def append(self, event: Event, *, durable: bool = False) -> None:
        """Write one event; readers see it when this returns.

        Args:
            event: What happened.
            durable: Return only once it is on the disk, so that it outlives a power cut.

        Raises:
            LedgerError: The disk is full or gone; nothing of the event was kept.
        """
        line = encode_event(event)
        with self._mutex:
            if self._fd < 0:
                msg = f"{self._path} is closed; no event can be added."
                raise LedgerError(msg)
            try:
                written = os.write(self._fd, line)
                while written < len(line):  # a nearly full disk takes a part, then refuses
                    written += os.write(self._fd, line[written:])
                if durable:
                    os.fsync(self._fd)
            except OSError as exc:
                os.ftruncate(self._fd, self._size)
                msg = (
                    f"{self._path} cannot be written: {exc.strerror}. Make room there, then "
                    f"`heats resume {self._path.parent.name}`."
                )
                raise LedgerError(msg) from exc
            self._size += len(line)

    def close(self) -> None:
        """Give the file and the sweep's lock back; a second call does nothing."""
        with self._mutex:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
                self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


def read_events(path: Path, *, offset: int = 0) -> Iterator[tuple[Event, int]]:
    """Each event from byte `offset` on, with the offset after its line.

    Ends before a last line that is not whole, so a reader may go on later where it stopped.

    Args:
        path: A ledger file.
        offset: 0, or an offset that this gave before.

    Raises:
        LedgerError: A line that others follow is damaged; the message names its number and says how
            to go on without it and what follows.
    """
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            end = offset + len(line)
            if not line.endswith(b"\n"):
                return
            try:
                event = decode_line(line)
            except (LedgerError, ValueError, KeyError, TypeError) as exc:
                if not file.read(1):
                    return
                with path.open("rb") as whole:
                    number = whole.read(offset).count(b"\n") + 1
                msg = (
                    f"Line {number} of {path} is damaged: {exc}. To go on with what stands before "
                    f"it: `cp {path} {path}.damaged && truncate -s {offset} {path}`."
                )
                raise LedgerError(msg) from exc
            yield event, end
            offset = end


def read_sweep(sweep_dir: Path) -> SweepRecord:
    """All that the ledger of a sweep says so far; the sweep may be running.

    Raises:
        LedgerError: There is no ledger, or it is damaged.
    """
    path = sweep_dir / LEDGER
    if not path.exists():
        msg = f"There is no ledger at {path}. `heats ls` shows the sweeps there are."
        raise LedgerError(msg)
    return _replay(path)[0]


def is_running(sweep_dir: Path) -> bool:
    """Whether a living process writes this sweep."""
    return is_locked(sweep_dir / LOCK)


def writer_pid(sweep_dir: Path) -> int | None:
    """Process id of the driver that writes this sweep; None where none does on this machine."""
    if not is_running(sweep_dir):
        return None
    owner = read_owner(sweep_dir / LOCK)
    return owner.pid if owner is not None and owner.host == socket.gethostname() else None


def list_sweeps(root: Path) -> list[Path]:
    """The folders of all sweeps under the tracking root, the one started last first."""
    sweeps = [path.parent for path in (root / "sweeps").glob(f"*/{LEDGER}")]
    return sorted(sweeps, key=_started_s, reverse=True)


def find_sweep(root: Path, name: str) -> Path:
    """The folder of the sweep that `name` means.

    Args:
        root: The tracking root.
        name: A study name, the beginning of just one, or `latest` (`last`).

    Raises:
        ConfigError: The name can be no study name.
        SweepNotFoundError: No sweep, or more than one, is meant; the message lists those known.
    """
    if name in _NEWEST:
        if newest := list_sweeps(root)[:1]:
            return newest[0]
        msg = f"There is no sweep in {root} yet. Start one with `python sweep.py -m lr=...`."
        raise SweepNotFoundError(msg)
    check_study_name(name)
    sweeps = {path.name: path for path in list_sweeps(root)}
    if name in sweeps:
        return sweeps[name]
    meant = [other for other in sweeps if other.startswith(name)]
    if len(meant) == 1:
        return sweeps[meant[0]]
    if meant:
        msg = f"{name!r} begins the names of {len(meant)} sweeps; give more of one of: "
        raise SweepNotFoundError(msg + ", ".join(meant) + ".")
    msg = f"{unknown_name('sweep', name, sweeps)} They are in {root / 'sweeps'}."
    raise SweepNotFoundError(msg)


def check_study_name(name: str) -> None:
    """Refuse a study name that cannot safely be the name of a folder.

    Raises:
        ConfigError: The message says what is wrong with it.
    """
    problem = None
    odd = [char for char in name if unicodedata.category(char) in {"Cc", "Cf", "Cs", "Zl", "Zp"}]
    if not name or name != name.strip():
        problem = "it is empty, or begins or ends with a space"
    elif odd:
        problem = f"it contains the unprintable character U+{ord(odd[0]):04X}"
    elif "/" in name or "\\" in name or ".." in name:
        problem = "it contains a slash, a backslash or `..`"
    elif name[0] in ".-~":
        problem = f"it begins with {name[0]!r}"
    elif name in _NEWEST:
        problem = "it is the word for the newest sweep"
    elif len(name.encode()) > _MAX_NAME_BYTES:
        problem = f"it is longer than {_MAX_NAME_BYTES} bytes"
    if problem:
        msg = (
            f"study_name={name!r:.80} is not valid: {problem}. Use letters, digits, `-`, `_` and "
            "`.`, beginning with a letter or digit."
        )
        raise ConfigError(msg)


def _holds_secrets(start: SweepStarted) -> bool:
    told = [*start.argv, encode_event(start).decode()]
    return any(redact_text(text) != text for text in told)


def _lock(sweep_dir: Path) -> FileLock:
    try:
        return FileLock(sweep_dir / LOCK)
    except LockHeldError as exc:
        name = sweep_dir.name
        msg = (
            f"{exc.owner} already writes the sweep {name!r}. Watch it with "
            f"`heats status {name}`; Ctrl-C where it runs, or SIGTERM, ends it."
        )
        raise SweepLockedError(msg) from exc


def _replay(path: Path) -> tuple[SweepRecord, int]:
    events = read_events(path)
    start, size = next(events, (None, 0))
    if not isinstance(start, SweepStarted):
        msg = f"{path} does not begin with the start of a sweep; nothing in it can be used."
        raise LedgerError(msg)
    record = SweepRecord(start=start, last_time_s=start.time_s)
    for event, end in events:
        try:
            record.apply(event)
        except KeyError as exc:
            msg = f"{path}, byte {size}: {type(event).__name__} of trial {exc}, never asked."
            raise LedgerError(msg) from exc
        size = end
    return record, size


def _started_s(sweep_dir: Path) -> float:
    try:
        start, _ = next(read_events(sweep_dir / LEDGER), (None, 0))
    except LedgerError:
        start = None
    return start.time_s if start else (sweep_dir / LEDGER).stat().st_mtime


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
