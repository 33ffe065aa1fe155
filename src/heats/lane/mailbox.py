"""Messages between a lane and its ranks over authenticated sockets.

The mailbox lives in the process that waits for it (the lane), so a report costs one local socket
round trip: no actor between, no polling.
"""

from __future__ import annotations

import logging
import secrets
import threading
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, Listener
from typing import TYPE_CHECKING, cast

from heats.lane.messages import RankBroken, RankReady

if TYPE_CHECKING:
    from collections.abc import Callable

    from heats.lane.messages import RankMessage, Turn
    from heats.trial import Verdict

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Address:
    """Where a mailbox listens, and the key without which it does not talk."""

    host: str
    port: int
    key: bytes = field(repr=False)


class Mailbox:
    """The lane's end: one connection and one reader thread for each rank.

    `on_message(rank, message)` runs in the reader threads; what it returns, if not None, is the
    reply. `on_gone(rank)` runs when a rank's connection breaks.
    """

    def __init__(
        self,
        host: str,
        on_message: Callable[[int, RankMessage], Verdict | None],
        on_gone: Callable[[int], None],
    ) -> None:
        key = secrets.token_bytes(32)
        self._listener = Listener((host, 0), authkey=key)
        _, port = cast("tuple[str, int]", self._listener.address)
        self.address = Address(host, port, key)
        self._on_message, self._on_gone = on_message, on_gone
        self._ranks: dict[int, Connection] = {}
        self._is_closed = False
        threading.Thread(target=self._accept, daemon=True, name="heats-mailbox").start()

    def post(self, rank: int, turn: Turn | None) -> None:
        """Send a turn to a rank, or None: there are no more.

        Raises:
            OSError: The rank is gone.
        """
        self._ranks[rank].send(turn)

    def close(self) -> None:
        """Stop listening and hang up on every rank."""
        self._is_closed = True
        self._listener.close()
        for connection in list(self._ranks.values()):
            connection.close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection = self._listener.accept()
            except Exception as exc:  # noqa: BLE001 - a stranger without the key must not end the lane
                if not self._is_closed:
                    logger.warning("Refused a connection to a lane: %r", exc)
                continue
            threading.Thread(target=self._read, args=(connection,), daemon=True).start()

    def _read(self, connection: Connection) -> None:
        rank = -1
        try:
            while True:
                message: RankMessage = connection.recv()
                if isinstance(message, RankReady | RankBroken):
                    rank = message.rank
                    self._ranks[rank] = connection
                reply = self._on_message(rank, message)
                if reply is not None:
                    connection.send(reply)
        except (EOFError, OSError):
            if not self._is_closed:
                self._on_gone(rank)


class RankMailbox:
    """A rank's end of the mailbox; safe to use from several threads of the rank."""

    def __init__(self, address: Address) -> None:
        self._connection = Client((address.host, address.port), authkey=address.key)
        self._lock = threading.Lock()

    def send(self, message: RankMessage) -> None:
        """Send and go on."""
        with self._lock:
            self._connection.send(message)

    def ask(self, message: RankMessage) -> Verdict:
        """Send and wait for the verdict."""
        with self._lock:
            self._connection.send(message)
            return cast("Verdict", self._connection.recv())

    def next_turn(self) -> Turn | None:
        """Wait for the next turn; None where there are no more, or the lane is gone."""
        try:
            return cast("Turn | None", self._connection.recv())
        except (EOFError, OSError):
            return None
