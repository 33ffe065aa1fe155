"""Messages between a lane and its ranks over authenticated sockets.

The mailbox lives in the process that waits for it (the lane), so a report costs one local socket
round trip: no actor between, no polling.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from typing import TYPE_CHECKING, cast, overload

from heats.lane.messages import RankStarting

if TYPE_CHECKING:
    from collections.abc import Callable

    from heats.lane.messages import (
        CheckpointsRequest,
        RankMessage,
        Turn,
        TurnCheckpoints,
        VerdictRequest,
    )
    from heats.trial import Verdict

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Address:
    """Where a mailbox listens, and the key without which it does not talk."""

    host: str
    port: int
    key: bytes = field(repr=False)

    @property
    def name(self) -> str:
        """No other lane's, and no secret; a port may come again."""
        return hashlib.sha256(self.key).hexdigest()[:16]


class Mailbox:
    """The lane's end: one connection and one reader thread for each rank.

    `on_message(rank, message)` runs in the reader threads; what it returns, if not None, is the
    reply. `on_gone(rank)` runs when a rank's connection breaks.
    """

    def __init__(
        self,
        host: str,
        on_message: Callable[[int, RankMessage], Verdict | TurnCheckpoints | None],
        on_gone: Callable[[int], None],
    ) -> None:
        # Not `multiprocessing.connection.Listener`: it shakes hands with one after another, so a
        # port scanner that says nothing would keep every rank out.
        self._socket = socket.create_server((host, 0))
        self.address = Address(host, self._socket.getsockname()[1], secrets.token_bytes(32))
        self._on_message, self._on_gone = on_message, on_gone
        self._ranks: dict[int, Connection] = {}
        self._connections: set[Connection] = set()
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
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # Closing alone would not wake `accept`,
        self._socket.close()
        for connection in list(self._connections):  # nor end a connection that is being read.
            with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as shared:
                shared.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                accepted, _ = self._socket.accept()
            except OSError:
                continue  # That one left again, or the mailbox was closed.
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = Connection(accepted.detach())
            self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        try:
            deliver_challenge(connection, self.address.key)
            answer_challenge(connection, self.address.key)
        except Exception as exc:  # noqa: BLE001 - a stranger without the key must not end the lane
            if not self._is_closed:
                logger.warning("Refused a connection to a lane: %r", exc)
        else:
            self._read(connection)
        finally:
            self._connections.discard(connection)
            connection.close()

    def _read(self, connection: Connection) -> None:
        rank = -1
        try:
            while True:
                message: RankMessage = connection.recv()
                if isinstance(message, RankStarting):
                    rank = message.rank
                    self._ranks[rank] = connection
                reply = self._on_message(rank, message)
                if reply is not None:
                    connection.send(reply)
        except (EOFError, OSError):
            connection.close()  # A turn that is posted from now on is refused.
            if not self._is_closed:
                self._on_gone(rank)


class RankMailbox:
    """A rank's end of the mailbox; safe to use from several threads of the rank."""

    def __init__(self, address: Address) -> None:
        self._connection = Client((address.host, address.port), authkey=address.key)
        with socket.socket(fileno=os.dup(self._connection.fileno())) as shared:
            # A report and the question after it are two small packets: without this the second
            # waits 40 ms for the first one's delayed acknowledgement.
            shared.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._lock = threading.Lock()  # Uploads report from threads of their own.

    def send(self, message: RankMessage) -> None:
        """Send and go on."""
        with self._lock:
            self._connection.send(message)

    @overload
    def ask(self, message: VerdictRequest) -> Verdict: ...

    @overload
    def ask(self, message: CheckpointsRequest) -> TurnCheckpoints: ...

    def ask(self, message: VerdictRequest | CheckpointsRequest) -> Verdict | TurnCheckpoints:
        """Send and wait for the reply; other threads may send meanwhile, but not ask."""
        self.send(message)
        return cast("Verdict | TurnCheckpoints", self._connection.recv())

    def next_turn(self) -> Turn | None:
        """Wait for the next turn; None where there are no more, or the lane is gone."""
        try:
            return cast("Turn | None", self._connection.recv())
        except (EOFError, OSError):
            return None

    def close(self) -> None:
        """Hang up."""
        self._connection.close()
