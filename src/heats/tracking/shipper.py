"""MLflow fed from the ledger file alone.

Live tracking, catching up after an outage or a crash, and `heats sync` are one path: read the
ledger from where MLflow's knowledge ends, send, write down how far it got. What is sent twice is
stored once (times are the events' own, runs are known by their tags), so a crash between sending
and writing down costs nothing.
"""

from __future__ import annotations

import json
import logging
import random
import threading
from typing import TYPE_CHECKING, Any

from heats.locks import FileLock, LockHeldError
from heats.tracking.batches import batches
from heats.tracking.ledger import LEDGER, read_events
from heats.tracking.translate import RunWrites, Translator, Writes
from heats.trial import RunCreated

if TYPE_CHECKING:
    from pathlib import Path

    from heats.tracking.runs import Runs

logger = logging.getLogger(__name__)

CURSOR = "shipped.json"
LOCK = "shipper.lock"

# How often it looks whether the ledger has grown: fewer, larger batches cost less.
_GATHER_S = 1.0
_MAX_EVENTS = 2000
_BACK_OFF_S = 0.5
_MAX_BACK_OFF_S = 30.0
_URGENT_BACK_OFF_S = 0.3
# MLflow will say the same however often it is asked.
_FINAL_REFUSALS = frozenset(
    {
        "BAD_REQUEST",
        "INVALID_PARAMETER_VALUE",
        "INVALID_STATE",
        "MALFORMED_REQUEST",
        "RESOURCE_DOES_NOT_EXIST",
    }
)


class Shipper:
    """A thread that sends what the ledger of `sweep_dir` says to MLflow; it never raises."""

    def __init__(self, sweep_dir: Path, runs: Runs) -> None:
        """A shipper at rest; `start`, `flush` or `close` sets it going.

        Args:
            sweep_dir: Holds the ledger; `shipped.json` beside it tells how far MLflow got.
            runs: Of the same sweep; the driver may share it.
        """
        self._path = sweep_dir / LEDGER
        self._cursor_path = sweep_dir / CURSOR
        self._lock_path = sweep_dir / LOCK
        self._runs = runs
        self._thread: threading.Thread | None = None
        self._urgent = threading.Event()
        self._stop = threading.Event()
        self._moved = threading.Condition()
        self._translator = Translator(sweep_dir)
        self._offset = int(self._load().get("offset", 0))
        self._drained_at = 0
        self._is_ready = False
        self._trusts_ledger = not runs.is_elsewhere
        self._unsent: Writes = {}
        self._unsent_end = 0
        self._refused: set[int | None] = set()
        self._failures = 0
        self.last_error: str | None = None

    def start(self) -> None:
        """Begin to send, in a daemon thread; a second call does nothing."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="heats-shipper", daemon=True)
            self._thread.start()

    def pending(self) -> int:
        """Bytes of the ledger that MLflow has not got yet."""
        size = self._size()
        return 0 if self._drained_at >= size else size - self._offset

    def flush(self, timeout_s: float) -> bool:
        """Wait until MLflow has all that the ledger says now.

        Returns:
            Whether it has; False when that took longer than `timeout_s`.
        """
        self.start()
        goal = self._size()
        self._urgent.set()
        with self._moved:
            is_done = self._moved.wait_for(lambda: self._drained_at >= goal, timeout_s)
        if not self._stop.is_set():
            self._urgent.clear()
        return is_done

    def close(self, timeout_s: float) -> bool:
        """`flush`, then end the thread; what is left is sent by the next shipper of this sweep."""
        is_done = self.flush(timeout_s)
        self._stop.set()
        self._urgent.set()
        if self._thread is not None:
            self._thread.join(timeout=1.0)
        self._runs.settle()
        return is_done

    # --- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        lock = self._take_turn()
        if lock is None:
            return
        with lock:
            while not self._stop.is_set():
                self._urgent.wait(_GATHER_S)
                if self._stop.is_set():
                    return
                if self._drained_at < self._size() and not self._ship():
                    self._back_off()

    def _take_turn(self) -> FileLock | None:
        """Wait until no other process ships this sweep."""
        while not self._stop.is_set():
            try:
                return FileLock(self._lock_path)
            except LockHeldError as exc:
                self._note(f"{exc.owner} sends this sweep to MLflow already")
            except OSError as exc:
                self._note(str(exc))
            self._back_off()
        return None

    def _back_off(self) -> None:
        self._failures += 1
        longest = min(_BACK_OFF_S * 2 ** min(self._failures, 10), _MAX_BACK_OFF_S)
        delay = random.uniform(longest / 2, longest)  # Many drivers may wait for one server.
        if self._urgent.is_set():
            self._stop.wait(min(delay, _URGENT_BACK_OFF_S))
        else:
            self._urgent.wait(delay)

    def _ship(self) -> bool:
        """Send all there is; whether MLflow took it."""
        try:
            self._runs.check()
            if not self._is_ready:
                self._make_ready()
            while not self._stop.is_set():
                size = self._size()
                if not self._fill():
                    # What is left, if anything, is the torn line of a writer that died.
                    self._move(drained_at=size)
                    break
                self._send_all()
                self._save()
        except Exception as exc:  # noqa: BLE001 - MLflow raises anything; the ledger has it all
            self._note(str(exc))
            return False
        if self._failures:
            logger.info("MLflow at %s answers again.", self._runs.shown_uri)
        self._failures = 0
        self.last_error = None
        return True

    def _note(self, problem: str) -> None:
        if self.last_error is None:
            logger.warning(
                "MLflow at %s gets nothing now: %s. Nothing is lost: the ledger keeps it, and it "
                "is sent later.",
                self._runs.shown_uri,
                problem.rstrip("."),
            )
        self.last_error = problem

    # --- how far it got -------------------------------------------------------------------------

    def _load(self) -> dict[str, Any]:
        try:
            cursor: dict[str, Any] = json.loads(self._cursor_path.read_text())
            is_valid = cursor["uri"] == self._runs.shown_uri
            is_valid &= int(cursor["offset"]) <= self._path.stat().st_size
        except (OSError, ValueError, KeyError, TypeError):
            return {}
        return cursor if is_valid else {}

    def _save(self) -> None:
        """Write down that everything up to here is sent."""
        cursor = {
            "uri": self._runs.shown_uri,
            "offset": self._unsent_end,
            "parent": self._runs.ensure_parent().run_id,
        }
        part = self._cursor_path.with_suffix(".part")
        part.write_text(json.dumps(cursor))
        part.replace(self._cursor_path)
        self._offset = self._unsent_end

    def _move(self, drained_at: int) -> None:
        with self._moved:
            self._drained_at = drained_at
            self._moved.notify_all()

    def _size(self) -> int:
        try:
            return self._path.stat().st_size
        except FileNotFoundError:
            return 0

    def _make_ready(self) -> None:
        """Learn what was sent before, and whether MLflow still has it."""
        cursor = self._load()
        parent = cursor.get("parent")
        told = {
            event.trial: event
            for event, _ in read_events(self._path)
            if isinstance(event, RunCreated)
        }
        if parent is not None and None in told and told[None].run_id != parent:
            self._trusts_ledger = False  # The runs of the ledger were lost once, and made anew.
        if parent is None and self._trusts_ledger and None in told:
            parent = told[None].run_id
        if parent is not None and self._is_lost(parent):
            logger.warning(
                "MLflow at %s does not know the runs of this sweep any more; they are made anew.",
                self._runs.shown_uri,
            )
            self._runs.forget()
            self._trusts_ledger, cursor, parent = False, {}, None
        if self._trusts_ledger:
            for created in told.values():
                self._runs.remember(created)
        if parent is not None:
            self._runs.remember_parent(parent)
        offset = int(cursor.get("offset", 0))
        ignored: Writes = {}
        for event, end in read_events(self._path):
            if end > offset:
                break
            self._translator.take(event, ignored)
            ignored.clear()
        self._offset = self._unsent_end = offset
        self._is_ready = True

    def _is_lost(self, run_id: str) -> bool:
        from mlflow.exceptions import MlflowException

        try:
            self._runs.client().get_run(run_id)
        except MlflowException as exc:
            if exc.error_code == "RESOURCE_DOES_NOT_EXIST":
                return True
            raise
        return False

    # --- sending --------------------------------------------------------------------------------

    def _fill(self) -> bool:
        """Take the next events where nothing waits to be sent; whether there is anything."""
        if self._unsent_end > self._offset:
            return True
        count = 0
        for event, end in read_events(self._path, offset=self._offset):
            if isinstance(event, RunCreated) and self._trusts_ledger:
                self._runs.remember(event)
            self._translator.take(event, self._unsent)
            self._unsent_end = end
            count += 1
            if count >= _MAX_EVENTS:
                break
        return count > 0

    def _send_all(self) -> None:
        """Send to the trials' runs, then to the parent, which then ends after its children."""
        self._ensure(None)
        for trial in sorted(self._unsent, key=lambda trial: (trial is None, trial)):
            self._send(trial, self._unsent[trial])
            del self._unsent[trial]

    def _ensure(self, trial: int | None) -> str:
        if trial is None:
            return self._runs.ensure_parent().run_id
        return self._runs.ensure_trial(trial, self._translator.asked_s(trial)).run_id

    def _send(self, trial: int | None, writes: RunWrites) -> None:
        run_id = self._ensure(trial)
        if writes.best_trial is not None:
            writes.tags["heats.best_run_id"] = self._ensure(writes.best_trial)
        for metrics, params, tags in batches(writes):
            self._log(trial, run_id, metrics, params, tags)
        for name, text in writes.texts.items():
            try:
                self._runs.log_text(trial, name, text)
            except Exception as exc:  # noqa: BLE001 - any store, any error; told apart below
                self._runs.check()  # Where the server is gone, all of it is tried again.
                self._refuse(trial, f"{name}: {exc}")
        if writes.status is not None:
            self._set_status(trial, run_id, writes.status, writes.ended_ms)

    def _log(
        self,
        trial: int | None,
        run_id: str,
        metrics: list[Any],
        params: list[Any],
        tags: list[Any],
    ) -> None:
        from mlflow.exceptions import MlflowException

        client = self._runs.client()
        try:
            client.log_batch(run_id, metrics, params, tags, synchronous=True)
        except MlflowException as exc:
            if exc.error_code not in _FINAL_REFUSALS:
                raise
            if sum(map(bool, (metrics, params, tags))) > 1:
                self._log(trial, run_id, metrics, [], [])
                self._log(trial, run_id, [], params, [])
                self._log(trial, run_id, [], [], tags)
            else:
                self._refuse(trial, str(exc))

    def _set_status(
        self, trial: int | None, run_id: str, status: str, ended_ms: int | None
    ) -> None:
        from mlflow.exceptions import MlflowException

        client = self._runs.client()
        try:
            if ended_ms is None:
                client.update_run(run_id, status)
            else:
                client.set_terminated(run_id, status, ended_ms)
        except MlflowException as exc:
            if exc.error_code not in _FINAL_REFUSALS:
                raise
            self._refuse(trial, str(exc))

    def _refuse(self, trial: int | None, problem: str) -> None:
        if trial not in self._refused:
            self._refused.add(trial)
            logger.warning(
                "MLflow at %s refused a part of %s for good: %s. The ledger still has it.",
                self._runs.shown_uri,
                "the parent run" if trial is None else f"trial {trial}",
                problem[:500].rstrip("."),
            )
