"""The worker's link to the server, in a thread with its own event loop, so that handlers cannot block the heartbeat."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import ssl
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import ClassVar

from websockets.asyncio.client import ClientConnection
from websockets.exceptions import InvalidStatus, NegotiationError, WebSocketException

from taskqueue_core.capabilities import NewEvent
from taskqueue_core.errors import ConfigurationError
from taskqueue_core.protocol.client_session import (
    ClientSession,
    ClientSessionState,
    Complained,
    Delivered,
    Draining,
    Event,
    Revoked,
    StoreChanged,
    Welcomed,
)
from taskqueue_core.protocol.frames import (
    CLOSE_PROTOCOL,
    CLOSE_TRY_LATER,
    CLOSE_UNAUTHENTICATED,
    SUBPROTOCOL,
    Feature,
)
from taskqueue_core.retry import Outcome, Snoozed
from taskqueue_core.server_address import ServerAddress
from taskqueue_worker.server_connection import ConnectionEnd, EndKind, ServerConnection, open_socket
from taskqueue_worker.threads import ThreadsafeInbox


class WorkerRefused(ConfigurationError):
    """The server refused this worker because of its token, its permissions, the host name or the protocol version.

    >>> WorkerRefused.exit_code  # of the command `taskqueue worker`
    4
    """

    code = "worker_refused"
    exit_code: ClassVar[int] = 4


class Backoff:
    """The delays between attempts to connect.

    The first delay is 0. The following delays begin with ``base`` seconds and double up to ``cap`` seconds; a random
    factor reduces each of them by up to half.
    """

    def __init__(
        self, base: float = 0.1, cap: float = 5.0, uniform: Callable[[], float] = random.random
    ) -> None:
        """Create the delays. ``base`` and ``cap`` are in seconds; ``uniform`` returns a random x with 0 <= x < 1."""
        self._base = base
        self._cap = cap
        self._uniform = uniform
        self._tries = 0

    def next(self, *, at_once: bool = True) -> float:
        """Return the seconds to wait before the next attempt. With ``at_once=False``, the result is never 0."""
        if self._tries == 0:
            self._tries = 1
            if at_once:
                return 0.0
        wait = min(self._cap, self._base * 2.0 ** min(self._tries - 1, 30))
        self._tries += 1
        return wait * (0.5 + self._uniform() / 2)

    def reset(self, *, at_once: bool = True) -> None:
        """Restart the delays after a successful connection. Without ``at_once``, the first delay is not 0."""
        self._tries = 0 if at_once else 1


_REFUSALS = {
    401: "the token is missing or wrong",
    403: "this client is not allowed to connect",
    421: "the server does not accept this host name",
    426: "the server uses another protocol",
}
_BACKOFF_CODES = (CLOSE_PROTOCOL, CLOSE_TRY_LATER, 1008, 1009, 1011)
"""close codes after which the worker does not reconnect at once, because that would probably fail again"""
_STABLE_SECONDS = 1.0
_WELCOMED = (ClientSessionState.READY, ClientSessionState.DRAINING, ClientSessionState.CLOSED)
_log = logging.getLogger("taskqueue.worker")

Work = Delivered | Revoked


class ServerLink:
    """A task source that receives from a server.

    It reconnects until `leave` is called or the server refuses the worker. The methods are thread-safe.
    """

    def __init__(
        self,
        session: ClientSession,
        address: ServerAddress,
        backoff: Backoff,
        deliver: Callable[[Work], None],
        on_connected: Callable[[bool], None],
        *,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Create the link. The token is sent with each handshake.

        The callbacks are called in the link's thread: ``deliver`` with work, and ``on_connected`` with True after each
        welcome of the server, and with False when the link is down.
        """
        self._session = session
        self._address = address
        self._backoff = backoff
        self._deliver = deliver
        self._on_connected = on_connected
        self._token = token
        self._tls = tls
        self._loop = asyncio.new_event_loop()
        self._inbox = ThreadsafeInbox[Callable[[], object]](self._loop, self._run_calls)
        self._connection: ServerConnection | None = None
        self._finishing = False
        self._connected: bool | None = None
        self._store_available = True
        self._last_error_code: str | None = None
        self._warned = False
        self._warned_of_events = False
        self._finished = asyncio.Event()
        self._thread = threading.Thread(target=self._main, name="taskqueue-link", daemon=True)
        self.result_limit = session.limits.result
        """maximum size of a result in bytes; a default value until the server has sent its limit"""
        self.ended: Future[None] = Future()

    def start(self) -> None:
        self._thread.start()

    def settle(self, receipt: str, outcome: Outcome) -> None:
        if type(outcome) is Snoozed:
            self._warn_of_snooze()
        self._inbox.put(partial(self._session.settle, receipt, outcome))

    def finish(self, receipt: str, outcome: Outcome) -> None:
        if type(outcome) is Snoozed:
            self._warn_of_snooze()
        self._inbox.put(partial(self._session.finish, receipt, outcome))

    def _warn_of_snooze(self) -> None:
        if not self._warned and self._connected:
            self._warned = Feature.SNOOZE not in self._session.features
            if self._warned:
                _log.warning(
                    "the server %s is older than this worker: a snooze counts an attempt there",
                    self._address.shown,
                )

    def free(self) -> None:
        self._inbox.put(self._session.free)

    def lend(self, count: int) -> None:
        self._inbox.put(partial(self._session.lend, count))

    def progress(self, receipt: str, value: float | str) -> None:
        self._inbox.put(partial(self._session.progress, receipt, value))

    def stream(self, receipt: str, event: NewEvent) -> None:
        self._inbox.put(partial(self._stream, receipt, event))

    def drained(self, receipt: str, callback: Callable[[], None]) -> None:
        self._inbox.put(partial(self._session.drained, receipt, callback))

    def resize(self, capacity: int) -> None:
        self._inbox.put(partial(self._session.resize, capacity))

    def leave(self, seconds: float) -> None:
        """End when all outcomes are confirmed, but after ``seconds`` at the latest.

        Send a bye frame if this worker has no deliveries; otherwise abort the connection, so that the deliveries count
        as lost.
        """
        self._inbox.put(partial(self._leave, seconds))

    # The methods below run in the link's thread. The public methods above reach it through `_inbox`.

    def _main(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._stay_connected())
        except BaseException as error:  # noqa: BLE001 - the future `ended` reports the error
            self.ended.set_exception(error)
        else:
            self.ended.set_result(None)

    def _run_calls(self, calls: list[Callable[[], object]]) -> None:
        for call in calls:
            call()
        self._finish_if_settled()

    def _handle(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Delivered | Revoked):
                self._deliver(event)
            else:
                self._log_event(event)
        self._finish_if_settled()

    def _finish_if_settled(self) -> None:
        session = self._session
        if self._finishing and not session.unconfirmed:
            self._finished.set()
            if self._connection and (session.held or session.state not in _WELCOMED):
                self._connection.abort()
            else:
                session.bye()
        if self._connection:
            self._connection.has_outgoing.set()

    def _stream(self, receipt: str, event: NewEvent) -> None:
        self._session.stream(receipt, event.value, event.channel)
        if not self._warned_of_events and Feature.EVENTS not in self._session.features:
            self._warned_of_events = True
            _log.warning("the server %s does not store events of tasks", self._address.shown)

    def _leave(self, seconds: float) -> None:
        self._finishing = True
        self._session.resize(0)
        self._loop.call_later(seconds, self._give_up)

    def _give_up(self) -> None:
        if self._session.unconfirmed:
            _log.warning("outcomes not confirmed in time: %d", self._session.unconfirmed)
        self._finished.set()
        if self._connection:
            self._connection.abort()

    async def _stay_connected(self) -> None:
        while not self._finished.is_set():
            began = self._loop.time()
            end = await self._connect_once()
            if end.kind is EndKind.LEFT or self._finished.is_set():
                break
            if end.code == CLOSE_UNAUTHENTICATED:
                raise self._refused(end.reason)
            back_off = end.kind is EndKind.VIOLATED or end.code in _BACKOFF_CODES
            if self._connected and not back_off:
                # After a short connection, delay the first attempt, so that the worker does not reconnect in a tight
                # loop. The delay is short enough that the server still holds this worker's deliveries.
                self._backoff.reset(at_once=self._loop.time() - began >= _STABLE_SECONDS)
            self._log_down(end)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._backoff.next(at_once=not back_off)):
                    await self._finished.wait()

    async def _connect_once(self) -> ConnectionEnd:
        try:
            socket = await self._open()
        except InvalidStatus as error:
            status = error.response.status_code
            if status in _REFUSALS:
                raise self._refused(f"{_REFUSALS[status]} (HTTP {status})") from None
            return ConnectionEnd(EndKind.CLOSED, f"HTTP {status}", CLOSE_TRY_LATER)
        except NegotiationError as error:
            raise self._refused(f"{_REFUSALS[426]}: {error}") from None
        except (OSError, WebSocketException) as error:  # OSError includes TimeoutError
            return ConnectionEnd(EndKind.CLOSED, f"{type(error).__name__}: {error}")
        if socket is None or self._finished.is_set():
            if socket:
                socket.transport.abort()
            return ConnectionEnd(EndKind.CLOSED, "connecting was cancelled")
        if socket.subprotocol != SUBPROTOCOL:
            await socket.close()
            raise self._refused(f"the server does not support {SUBPROTOCOL}")
        self._connection = ServerConnection(socket, self._session, self._handle)
        try:
            return await self._connection.run()
        finally:
            self._connection = None

    async def _open(self) -> ClientConnection | None:
        # Connecting may take several seconds, so wait for `leave` at the same time.
        opening = asyncio.create_task(open_socket(self._address, self._token, self._tls))
        finished = asyncio.create_task(self._finished.wait())
        try:
            await asyncio.wait((opening, finished), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (opening, finished):
                task.cancel()
            await asyncio.gather(opening, finished, return_exceptions=True)
        return None if opening.cancelled() else opening.result()

    def _refused(self, reason: str) -> WorkerRefused:
        return WorkerRefused(f"{self._address.shown} refused this worker: {reason}")

    def _log_down(self, end: ConnectionEnd) -> None:
        """Log that the link is down: a warning at the start of an outage, a debug message for each further attempt."""
        if self._connected is not False:
            verb = "cannot reach" if self._connected is None else "lost the connection to"
            _log.warning("%s the server %s: %s; retrying", verb, self._address.shown, end.reason)
        else:
            _log.debug("the server is still unavailable: %s", end.reason)
        self._connected = False
        self._on_connected(False)  # noqa: FBT003 - see `__init__`

    def _log_event(self, event: Event) -> None:
        match event:
            case Welcomed(connection_id, adopted, lost):
                self._connected = True
                self._on_connected(True)  # noqa: FBT003 - see `__init__`
                self.result_limit = self._session.limits.result
                note = f"; deliveries kept: {adopted}, lost: {lost}" if adopted or lost else ""
                _log.info("connected to %s as %s%s", self._address.shown, connection_id, note)
            case Draining():
                _log.info("the server is shutting down")
            case StoreChanged(ok, reason) if ok is not self._store_available:
                self._store_available = ok
                if ok:
                    _log.info("the server's store is available again")
                else:
                    _log.warning("the server's store is unavailable: %s", reason[:200])
            case Complained(code, message):
                level = logging.DEBUG if code == self._last_error_code else logging.WARNING
                self._last_error_code = code
                _log.log(level, "the server did not accept a frame: %s: %s", code, message)
