"""The worker's network side: a thread and an event loop of its own, so that no handler can starve the heartbeat."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import ssl
import threading
from collections.abc import Callable
from concurrent.futures import Future

from websockets.asyncio.client import ClientConnection
from websockets.exceptions import InvalidStatus, NegotiationError, WebSocketException

from taskqueue_core.protocol.client_session import (
    ClientSession,
    Complained,
    Delivered,
    Draining,
    Event,
    Revoked,
    SessionState,
    StoreChanged,
    Welcomed,
)
from taskqueue_core.protocol.frames import (
    CLOSE_PROTOCOL,
    CLOSE_TRY_LATER,
    CLOSE_UNAUTHENTICATED,
    SUBPROTOCOL,
)
from taskqueue_core.retry import Outcome
from taskqueue_core.server_address import Address
from taskqueue_worker.errors import WorkerRefused
from taskqueue_worker.server_connection import ConnectionEnd, How, ServerConnection, open_socket
from taskqueue_worker.threads import ThreadsafeInbox

__all__ = [
    "Backoff",
    "ServerLink",
]


class Backoff:
    """At once the first time, then ``base``, doubled each time up to ``cap``; each wait is 50 to 100 % of that."""

    def __init__(
        self, base: float = 0.1, cap: float = 5.0, uniform: Callable[[], float] = random.random
    ) -> None:
        """Seconds; ``uniform`` gives 0 <= x < 1."""
        self._base = base
        self._cap = cap
        self._uniform = uniform
        self._tries = 0

    def next(self, *, at_once: bool = True) -> float:
        """Return the seconds to wait before the next try. ``at_once=False`` leaves out the first, immediate one."""
        if self._tries == 0:
            self._tries = 1
            if at_once:
                return 0.0
        wait = min(self._cap, self._base * 2.0 ** min(self._tries - 1, 30))
        self._tries += 1
        return wait * (0.5 + self._uniform() / 2)

    def reset(self, *, at_once: bool = True) -> None:
        """Start again: the connection was good. ``at_once=False`` starts at the first wait."""
        self._tries = 0 if at_once else 1


_REFUSALS = {
    401: "the token is missing or wrong",
    403: "it may not connect",
    421: "the server does not answer to this host name",
    426: "another protocol",
}
_PATIENT = (CLOSE_PROTOCOL, CLOSE_TRY_LATER, 1008, 1009, 1011)
"""close codes after which an immediate return would only repeat the trouble"""
_STABLE_SECONDS = 1.0
_WELCOMED = (SessionState.READY, SessionState.DRAINING, SessionState.CLOSED)
_log = logging.getLogger("taskqueue.worker")

Work = Delivered | Revoked


class ServerLink:
    """Keeps a session connected until told to leave, or refused. Its methods may be called from any thread."""

    def __init__(
        self,
        session: ClientSession,
        address: Address,
        backoff: Backoff,
        deliver: Callable[[Work], None],
        *,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """``deliver`` is called in the link's thread. The token is shown to the server as it is connected to."""
        self._session = session
        self._address = address
        self._backoff = backoff
        self._deliver = deliver
        self._token = token
        self._tls = tls
        self._loop = asyncio.new_event_loop()
        self._inbox: ThreadsafeInbox[Callable[[], object]] = ThreadsafeInbox(
            self._loop, self._run_calls
        )
        self._connection: ServerConnection | None = None
        self._finishing = False
        self._up: bool | None = None
        self._store_ok = True
        self._complaint: str | None = None
        self._enough = asyncio.Event()
        self._thread = threading.Thread(target=self._main, name="taskqueue-link", daemon=True)
        self.ended: Future[None] = Future()
        """done when the link has ended, with the error that ended it"""

    def start(self) -> None:
        """Start to connect."""
        self._thread.start()

    @property
    def result_limit(self) -> int:
        """How long a result may be, as far as is known."""
        return self._session.limits.result

    def settle(self, receipt: str, outcome: Outcome) -> None:
        """See `ClientSession.settle`."""
        self._inbox.put(lambda: self._session.settle(receipt, outcome))

    def finish(self, receipt: str, outcome: Outcome) -> None:
        """See `ClientSession.finish`."""
        self._inbox.put(lambda: self._session.finish(receipt, outcome))

    def free(self) -> None:
        """See `ClientSession.free`."""
        self._inbox.put(self._session.free)

    def progress(self, receipt: str, value: float | str) -> None:
        """See `ClientSession.progress`."""
        self._inbox.put(lambda: self._session.progress(receipt, value))

    def resize(self, capacity: int) -> None:
        """See `ClientSession.resize`."""
        self._inbox.put(lambda: self._session.resize(capacity))

    def leave(self, seconds: float) -> None:
        """End as soon as every outcome is confirmed, after ``seconds`` at the latest.

        Says bye where nothing is held any more; otherwise breaks the connection, so that the rest counts as lost.
        """
        self._inbox.put(lambda: self._leave(seconds))

    # All that follows runs in the link's thread.

    def _main(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._stay_connected())
        except BaseException as error:  # noqa: BLE001 - it is passed on to whoever waits
            self.ended.set_exception(error)
        else:
            self.ended.set_result(None)

    def _run_calls(self, calls: list[Callable[[], object]]) -> None:
        for call in calls:
            call()
        self._check_deadline()

    def _handle(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case Delivered() | Revoked():
                    self._deliver(event)
                case _:
                    self._log_event(event)
        self._check_deadline()

    def _check_deadline(self) -> None:
        session = self._session
        if self._finishing and not session.unconfirmed:
            self._enough.set()
            if self._connection and (session.held or session.state not in _WELCOMED):
                self._connection.abort()
            else:
                session.bye()
        if self._connection:
            self._connection.poke()

    def _leave(self, seconds: float) -> None:
        self._finishing = True
        self._session.resize(0)
        self._loop.call_later(seconds, self._give_up)

    def _give_up(self) -> None:
        if self._session.unconfirmed:
            _log.warning("%d outcomes were not confirmed in time", self._session.unconfirmed)
        self._enough.set()
        if self._connection:
            self._connection.abort()

    async def _stay_connected(self) -> None:
        while not self._enough.is_set():
            began = self._loop.time()
            end = await self._connect_once()
            if end.how is How.LEFT or self._enough.is_set():
                break
            if end.code == CLOSE_UNAUTHENTICATED:
                raise self._refused(end.reason)
            patient = end.how is How.VIOLATED or end.code in _PATIENT
            if self._up and not patient:
                # One that broke soon is tried again soon, while the server still waits, but not in a tight loop.
                self._backoff.reset(at_once=self._loop.time() - began >= _STABLE_SECONDS)
            self._log_down(end)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._backoff.next(at_once=not patient)):
                    await self._enough.wait()

    async def _connect_once(self) -> ConnectionEnd:
        try:
            socket = await self._open()
        except InvalidStatus as error:
            status = error.response.status_code
            if status in _REFUSALS:
                raise self._refused(f"{_REFUSALS[status]} (HTTP {status})") from None
            return ConnectionEnd(How.CLOSED, f"HTTP {status}", CLOSE_TRY_LATER)
        except NegotiationError as error:
            raise self._refused(f"{_REFUSALS[426]}: {error}") from None
        except (OSError, WebSocketException) as error:  # TimeoutError is an OSError
            return ConnectionEnd(How.CLOSED, f"{type(error).__name__}: {error}")
        if socket is None or self._enough.is_set():
            if socket:
                socket.transport.abort()
            return ConnectionEnd(How.CLOSED, "given up")
        if socket.subprotocol != SUBPROTOCOL:
            await socket.close()
            raise self._refused(f"it does not speak {SUBPROTOCOL}")
        self._connection = ServerConnection(socket, self._session, self._handle)
        try:
            return await self._connection.run()
        finally:
            self._connection = None

    async def _open(self) -> ClientConnection | None:
        # Opening may take long; being told to leave must end it.
        opening = asyncio.create_task(open_socket(self._address, self._token, self._tls))
        enough = asyncio.create_task(self._enough.wait())
        try:
            await asyncio.wait((opening, enough), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (opening, enough):
                task.cancel()
            await asyncio.gather(opening, enough, return_exceptions=True)
        return None if opening.cancelled() else opening.result()

    def _refused(self, reason: str) -> WorkerRefused:
        return WorkerRefused(f"{self._address.shown} refused this worker: {reason}")

    # Logs: once per change, not once per try.

    def _log_down(self, end: ConnectionEnd) -> None:
        if self._up is not False:
            verb = "cannot reach" if self._up is None else "lost"
            _log.warning("%s the server %s: %s; trying on", verb, self._address.shown, end.reason)
        else:
            _log.debug("still no server: %s", end.reason)
        self._up = False

    def _log_event(self, event: Event) -> None:
        match event:
            case Welcomed(connection_id, adopted, lost):
                self._up = True
                note = f"; kept {adopted} deliveries, lost {lost}" if adopted or lost else ""
                _log.info("connected to %s as %s%s", self._address.shown, connection_id, note)
            case Draining():
                _log.info("the server is going away")
            case StoreChanged(ok, reason) if ok is not self._store_ok:
                self._store_ok = ok
                if ok:
                    _log.info("the server's store is back")
                else:
                    _log.warning("the server's store is out of reach: %s", reason[:200])
            case Complained(code, message):
                level = logging.DEBUG if code == self._complaint else logging.WARNING
                self._complaint = code
                _log.log(level, "the server did not accept a frame: %s: %s", code, message)
