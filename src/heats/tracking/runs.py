"""MLflow runs of one sweep: a parent and one child a trial, each created once however often asked.

The driver asks without patience: where the tracker does not answer at once it gets None, and the
shipper, which has patience, creates the run later. A run is known again by its tags: a parent by
`heats.study` and `heats.started`, a child by its parent and `heats.trial`.
"""

from __future__ import annotations

import getpass
import logging
import os
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from heats.errors import TrackingError
from heats.locks import FileLock
from heats.tracking.provenance import redact_url
from heats.tracking.sqlite import fold, write_ahead
from heats.trial import RunCreated

if TYPE_CHECKING:
    from collections.abc import Callable

    from mlflow import MlflowClient
    from mlflow.entities import Run

    from heats.trial import SweepStarted

logger = logging.getLogger(__name__)

T = TypeVar("T")

TAG_STUDY = "heats.study"
TAG_ROLE = "heats.role"
TAG_TRIAL = "heats.trial"
TAG_STATE = "heats.state"
TAG_STARTED = "heats.started"

# How long the driver waits: for a server's first sign of life, for the first run (MLflow is
# imported, and a local store may have to be made), and for any other. After a silence it asks again
# after a pause that doubles.
_PROBE_S = 0.5
_SERVER_LIMIT_S = 10.0
_LOCAL_LIMIT_S = 120.0
_TRIAL_LIMIT_S = 2.0
_PAUSE_S = 2.0
_MAX_PAUSE_S = 60.0
_FIRST_USE_LIMIT_S = 120.0
_GATEWAY_ERRORS = frozenset({502, 503, 504})


class Runs:
    """Creates and finds the MLflow runs of one sweep; any thread may use it.

    MLflow is imported, and its store made, at the first use.
    """

    def __init__(self, start: SweepStarted, *, root: Path, uri: str | None = None) -> None:
        """Runs for the sweep that `start` describes.

        Args:
            start: First event of its ledger.
            root: The tracking root; artifacts go to its `artifacts` unless a server says where.
            uri: Track there instead of where the sweep itself was tracked.
        """
        self._start = start
        self._root = root.absolute()
        own_uri = start.tracking_uri or f"sqlite:///{self._root / 'mlflow.db'}"
        self.uri = uri or own_uri
        self.is_elsewhere = self.uri != own_uri
        self._is_server = urllib.parse.urlsplit(self.uri).scheme in ("http", "https")
        self._mutex = threading.RLock()
        self._mlflow: MlflowClient | None = None
        self._experiment: str | None = None
        self._known: dict[int | None, RunCreated] = {}
        self._has_all_children = False
        self._quiet_until_s = 0.0
        self._pause_s = _PAUSE_S

    @property
    def shown_uri(self) -> str:
        """The tracking URI as it may be logged."""
        return redact_url(self.uri)

    # --- without patience: the driver -----------------------------------------------------------

    def create_parent(self) -> RunCreated | None:
        """The sweep's own run; None where the tracker does not answer."""
        return self._soon(self.ensure_parent)

    def create_trial(self, number: int, asked_s: float) -> RunCreated | None:
        """The run of a trial that was asked at `asked_s`; None as above."""
        return self._soon(lambda: self.ensure_trial(number, asked_s))

    def _soon(self, call: Callable[[], RunCreated]) -> RunCreated | None:
        if time.monotonic() < self._quiet_until_s:
            return None
        limit_s = _TRIAL_LIMIT_S
        if self._mlflow is None:
            limit_s = _SERVER_LIMIT_S if self._is_server else _LOCAL_LIMIT_S
        try:
            if self._is_server:  # Before MLflow itself, which tries for four minutes.
                _within(2 * _PROBE_S, self.check)
            created = _within(limit_s, call)
        except Exception as exc:  # noqa: BLE001 - MLflow raises anything; the sweep goes on without
            self._quiet_until_s = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)
            # The shipper warns; it knows when the outage ends.
            logger.info("No MLflow run could be made now: %s", exc or f"no answer in {limit_s:g} s")
            return None
        self._pause_s = _PAUSE_S
        return created

    # --- with patience: the shipper -------------------------------------------------------------

    def check(self) -> None:
        """Return where the tracker shows any sign of life.

        Raises:
            TrackingError: A server does not answer within half a second.
        """
        if not self._is_server:
            return
        try:
            with urllib.request.urlopen(f"{self.uri.rstrip('/')}/health", timeout=_PROBE_S):
                return
        except urllib.error.HTTPError as exc:
            with exc:
                if exc.code not in _GATEWAY_ERRORS:
                    return  # A refusal is an answer; MLflow knows how to log in.
                reason: object = exc
        except urllib.error.URLError as exc:
            if "CERTIFICATE" in str(exc.reason).upper():
                return  # MLflow has its own settings for certificates.
            reason = exc.reason
        except (OSError, ValueError) as exc:
            reason = exc
        msg = f"The MLflow server at {self.shown_uri} does not answer: {reason}."
        raise TrackingError(msg)

    def client(self) -> MlflowClient:
        """The client, once the experiment exists."""
        with self._mutex:
            if self._mlflow is None:
                self._connect()
            assert self._mlflow is not None  # noqa: S101 - _connect sets it or raises
            return self._mlflow

    def ensure_parent(self) -> RunCreated:
        """The sweep's own run, created where it does not exist."""
        with self._mutex:
            if (known := self._known.get(None) or self._find_parent()) is not None:
                return known
            start = self._start
            source = start.script or start.module or ""
            run = self.client().create_run(
                self._experiment_id(),
                start_time=_ms(start.time_s),
                run_name=start.study_name,
                tags={
                    TAG_STUDY: start.study_name,
                    TAG_ROLE: "sweep",
                    TAG_STARTED: str(_ms(start.time_s)),
                    "mlflow.user": _user(),
                    "mlflow.source.name": source,
                    "mlflow.source.type": "LOCAL",
                },
            )
            self._has_all_children = True
            return self._remember_run(None, run)

    def ensure_trial(self, number: int, asked_s: float) -> RunCreated:
        """The run of a trial that was asked at `asked_s`, created where it does not exist."""
        with self._mutex:
            if (known := self._known.get(number)) is not None:
                return known
            parent = self.ensure_parent()
            self._learn_children(parent)
            if (known := self._known.get(number)) is not None:
                return known
            study = self._start.study_name
            run = self.client().create_run(
                self._experiment_id(),
                start_time=_ms(asked_s),
                run_name=f"trial-{number} {study}",  # The UI cuts long names at their end.
                tags={
                    TAG_STUDY: study,
                    TAG_ROLE: "trial",
                    TAG_TRIAL: str(number),
                    TAG_STATE: "running",
                    "mlflow.parentRunId": parent.run_id,
                    "mlflow.user": _user(),
                },
            )
            return self._remember_run(number, run)

    def find_trial_run(self, number: int) -> RunCreated | None:
        """The run of a trial, where the tracker has one."""
        with self._mutex:
            parent = self._known.get(None) or self._find_parent()
            if parent is None:
                return None
            self._learn_children(parent)
            return self._known.get(number)

    def remember(self, created: RunCreated) -> None:
        """Take a run as known that the ledger tells of."""
        with self._mutex:
            self._known.setdefault(created.trial, created)

    def remember_parent(self, run_id: str) -> None:
        """Take the sweep's own run as known by its id."""
        with self._mutex:
            if None not in self._known:
                self._remember_run(None, self.client().get_run(run_id))

    def forget(self) -> None:
        """Know no run any more: the tracker has lost them."""
        with self._mutex:
            self._known.clear()
            self._has_all_children = False

    def log_text(self, trial: int | None, name: str, text: str) -> None:
        """Write an artifact of a known run; `name` is its path below the run's artifacts."""
        run = self._known[trial]
        if not run.artifact_dir:
            self.client().log_text(run.run_id, text, name)
            return
        # What MLflow would do too, in a hundredth of the time.
        path = Path(run.artifact_dir, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        part.write_text(text, encoding="utf-8", errors="replace")
        part.replace(path)

    # --- the store ------------------------------------------------------------------------------

    def _connect(self) -> None:
        # Otherwise every end of a run prints two lines on the user's terminal.
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        from mlflow import MlflowClient

        # It tells of each step of making a database, and prints tracebacks of what heats handles.
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
        with self._first_use():
            client = MlflowClient(self.uri)
            self._experiment = self._make_experiment(client)
        self._mlflow = client

    def _first_use(self) -> AbstractContextManager[object]:
        """Held while a SQLite store may be made: two processes at once would break it."""
        database = self._database()
        if database is None:
            return nullcontext()
        database.parent.mkdir(parents=True, exist_ok=True)
        write_ahead(database)
        lock = database.with_name(database.name + ".lock")
        return FileLock(lock, wait_s=_FIRST_USE_LIMIT_S)

    def _database(self) -> Path | None:
        """The file of a SQLite store."""
        scheme, _, path = self.uri.partition(":///")
        return Path(path.partition("?")[0]) if scheme == "sqlite" and path else None

    def settle(self) -> None:
        """Leave the store as others expect it, once nothing more is sent."""
        database = self._database()
        if database is not None and self._mlflow is not None:
            fold(database)

    def _make_experiment(self, client: MlflowClient) -> str:
        from mlflow.exceptions import MlflowException

        name = self._start.experiment
        found = client.get_experiment_by_name(name)
        if found is None:
            place = None if self._is_server else (self._root / "artifacts").as_uri()
            try:
                return str(client.create_experiment(name, artifact_location=place))
            except MlflowException as exc:
                found = client.get_experiment_by_name(name)  # Another process was faster.
                if found is None:
                    raise TrackingError(str(exc)) from exc
        if found.lifecycle_stage != "active":
            msg = (
                f"The MLflow experiment {name!r} at {self.shown_uri} was deleted. Restore it with "
                f"`mlflow experiments restore -x {found.experiment_id}`, or set "
                "tracking.experiment to another name."
            )
            raise TrackingError(msg)
        return str(found.experiment_id)

    def _experiment_id(self) -> str:
        self.client()
        assert self._experiment is not None  # noqa: S101 - client() sets it or raises
        return self._experiment

    def _find_parent(self) -> RunCreated | None:
        for run in self._search(f"tags.`{TAG_STARTED}` = '{_ms(self._start.time_s)}'"):
            tags = run.data.tags
            if tags.get(TAG_STUDY) == self._start.study_name and tags.get(TAG_ROLE) == "sweep":
                return self._remember_run(None, run)
        return None

    def _learn_children(self, parent: RunCreated) -> None:
        if self._has_all_children:
            return
        for run in self._search(f"tags.`mlflow.parentRunId` = '{parent.run_id}'"):
            number = run.data.tags.get(TAG_TRIAL, "")
            if number.isdecimal() and int(number) not in self._known:
                self._remember_run(int(number), run)
        self._has_all_children = True

    def _search(self, condition: str) -> list[Run]:
        """Runs of the experiment, deleted ones too, the oldest first."""
        from mlflow.entities import ViewType

        found: list[Run] = []
        token: str | None = None
        while True:
            page = self.client().search_runs(
                [self._experiment_id()],
                condition,
                run_view_type=ViewType.ALL,
                max_results=1000,
                order_by=["attributes.start_time ASC"],
                page_token=token,
            )
            found.extend(page)
            token = page.token
            if not token:
                return found

    def _remember_run(self, trial: int | None, run: Run) -> RunCreated:
        created = RunCreated(
            time_s=time.time(),
            trial=trial,
            run_id=run.info.run_id,
            artifact_dir=_writable_dir(run.info.artifact_uri or ""),
        )
        self._known[trial] = created
        return created


def _within(limit_s: float, call: Callable[[], T]) -> T:
    """What `call` returns or raises; TimeoutError where that takes longer, and it goes on alone."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as exc:  # noqa: BLE001 - handed to the caller
            future.set_exception(exc)

    # Not an executor: its threads would hold up the end of the program.
    threading.Thread(target=run, name="heats-mlflow", daemon=True).start()
    return future.result(timeout=limit_s)


def _writable_dir(artifact_uri: str) -> str:
    """The folder that an artifact URI means on this machine; empty where it means none."""
    parts = urllib.parse.urlsplit(artifact_uri)
    if parts.scheme == "file":
        path = Path(urllib.request.url2pathname(parts.path))
    elif not parts.scheme and artifact_uri:
        path = Path(artifact_uri).absolute()
    else:
        return ""
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    return str(path) if os.access(existing, os.W_OK) else ""


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # An account without a name, as containers have.
        return ""


def _ms(time_s: float) -> int:
    return int(time_s * 1000)
