"""Delivery of runs to one worker's socket: a run is received only after the previous run has been acknowledged.

The handler of the socket is Prefect's code. Its calls mean the following:

===================================== ===========================================================================
it creates a `MultiQueue`             a worker has subscribed; the current asyncio task is the handler
it observes the worker                the worker has sent a message, which *acknowledges* the previous run
it asks for a run                     the previous run is acknowledged; receive the next one
it asks whether the socket is up      there is no run; read from the socket to detect a disconnect
it passes a run to ``retry``          the socket broke before the acknowledgement
its asyncio task ends, in any way     release the run that was sent but not acknowledged
===================================== =====================================================================
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from secrets import token_hex
from typing import Any, Protocol, cast

from taskqueue_core.backend import Capability, Subscription
from taskqueue_core.capabilities import Handover, has
from taskqueue_core.consumer.outage import close
from taskqueue_core.limits import LIMITS
from taskqueue_core.tasks import Delivery
from taskqueue_prefect.batching import Ready, SharedReceiver
from taskqueue_prefect.context import LOG, Host
from taskqueue_prefect.names import connection_of, name_of
from taskqueue_prefect.task_runs import AcceptedRun, StoredRun

_DISCONNECT = "websocket.disconnect"


class Socket(Protocol):
    """The part of Starlette's websocket that is used here."""

    def receive(self) -> Awaitable[MutableMapping[str, Any]]:
        """Return the next message. Cancelling the call loses no message."""


class ClientListener:
    """A reader of a worker's socket that detects a disconnect while Prefect's handler is not reading."""

    def __init__(self, on_disconnect: Callable[[], None]) -> None:
        """Create a listener that calls ``on_disconnect`` when it detects that the worker has disconnected."""
        self._on_disconnect = on_disconnect
        self._received: asyncio.Task[MutableMapping[str, Any]] | None = None

    def is_up(self, socket: Socket) -> bool:
        """Start listening if necessary; return whether the worker is connected. Received messages are dropped."""
        if self.is_down:
            return False
        if self._received is None or self._received.done():
            self._received = asyncio.ensure_future(socket.receive())
            self._received.add_done_callback(self._report_disconnect)
        return True

    @property
    def is_down(self) -> bool:
        """Whether the listener has seen the worker disconnect."""
        heard = self._received
        if heard is None or not heard.done() or heard.cancelled():
            return False
        return heard.exception() is not None or heard.result()["type"] == _DISCONNECT

    def _report_disconnect(self, _: object) -> None:
        if self.is_down:
            self._on_disconnect()

    async def stop(self) -> None:
        """Stop listening, so the handler gets the worker's next message. `is_down` stays true after a disconnect."""
        if self._received is None or self.is_down:
            return
        self._received.cancel()
        await asyncio.wait([self._received])
        if not self.is_down:
            self._received = None


_UNKNOWN_CLIENT = "unknown"
_VIOLATION = 4001
_current: ContextVar[SharedQueueDelivery | None] = ContextVar(
    "taskqueue_prefect_socket", default=None
)


class SharedQueueDelivery:
    """The delivery of runs to one worker, until the asyncio task that created this object ends."""

    def __init__(self, host: Host, task_keys: object) -> None:
        """Create a delivery. Invalid ``task_keys`` raise an exception that closes the socket with the code 4001."""
        self._host = host
        self._keys = _names(task_keys)
        self._connection_mark = token_hex(4)
        self._client = _UNKNOWN_CLIENT
        self._connection = connection_of(_UNKNOWN_CLIENT, self._connection_mark)
        self._subscription: Subscription | None = None
        self._receiver = SharedReceiver.join(host, self._keys)
        self._sent: Delivery | None = None
        """the run that was sent to the worker and has not been acknowledged yet"""
        self._state = ""
        self._registration: asyncio.Task[None] | None = None
        self._acked: asyncio.Future[None] | None = None
        """done when the store has answered the last ack"""
        self._request: asyncio.Future[Ready] | None = None
        self._changed = asyncio.Event()
        """set when a run has been received, or receiving it has failed, or the worker has disconnected"""
        self._listener = ClientListener(self._changed.set)
        _current.set(self)
        if (handler := asyncio.current_task()) is not None:
            handler.add_done_callback(lambda _: host.begin(self._end()))

    @classmethod
    def of_this_context(cls) -> SharedQueueDelivery | None:
        """Return the delivery of the socket handler that calls this; ``None`` outside a handler."""
        return _current.get()

    def observed(self, client_id: object) -> None:
        """Process a worker's message, which acknowledges the last run. An invalid id closes the socket with 4001."""
        if not isinstance(client_id, str):
            raise _violation(f"client_id must be text, not {type(client_id).__name__}")
        if client_id != self._client:
            self._client = client_id
            self._connection = connection_of(client_id, self._connection_mark)
        if self._sent is not None:
            self._accept()

    def is_connected(self, socket: Socket) -> bool:
        """Return whether the worker is connected, and listen for a disconnect until the next run is sent."""
        return self._listener.is_up(socket)

    async def next(self) -> StoredRun:
        """Return the next run. After a cancelled call, receiving continues, and the next call returns the run.

        Raises `TimeoutError` if the worker has disconnected.
        """
        if self._sent is not None:  # the worker has acknowledged the last run
            self._accept()
        if self._registration is None:
            self._registration = asyncio.create_task(self._register())
        if self._request is None:
            self._request = self._receiver.request(after=self._registration)
            self._request.add_done_callback(lambda _: self._changed.set())
        # The handler cancels this call every second, so a run counts as sent only when the call returns.
        while not (self._request.done() or self._listener.is_down):
            self._changed.clear()
            await self._changed.wait()
        if self._acked is not None:
            await asyncio.shield(self._acked)  # at most one ack of a socket is unanswered
        await self._listener.stop()
        if self._listener.is_down:
            raise TimeoutError  # makes the handler check whether the worker is connected
        request, self._request = self._request, None
        self._sent, run = request.result()
        self._state = run.state_id
        return run

    async def release(self) -> None:
        """Release the run that was sent, so that it is delivered again."""
        delivery, self._sent = self._sent, None
        if delivery is not None:
            await self._receiver.settler.redeliver([delivery])

    async def _register(self) -> None:
        """List the worker among those that are connected. Its subscription receives nothing."""
        self._subscription = self._host.backend.subscribe(self._keys, self._connection)
        if has(self._host.backend, Capability.HANDOVER):
            adopt = cast("Handover", self._subscription).adopt
            await self._receiver.outage.retry_until_available(adopt)

    def _accept(self) -> None:
        delivery, self._sent = self._sent, None
        if delivery is not None:
            run = AcceptedRun(worker=self._connection, state=self._state)
            self._acked = self._receiver.ack(delivery, run)

    async def _end(self) -> None:
        """Wait until the acknowledged run is settled, and release the run that was not acknowledged."""
        await self._listener.stop()
        delivery, self._sent = self._sent, None
        if self._request is not None:
            delivery = self._receiver.withdraw(self._request)
        if self._registration is not None:
            self._registration.cancel()
            await asyncio.wait([self._registration])
        if self._acked is not None:
            await asyncio.wait([self._acked])
        if delivery is not None:
            await self._receiver.settler.redeliver([delivery])
        if self._subscription is not None:
            await close(self._subscription)
        await self._receiver.leave()


def _names(task_keys: object) -> list[str]:
    max_keys = LIMITS.keys
    if not isinstance(task_keys, list) or not 0 < len(task_keys) <= max_keys:
        received = (
            len(task_keys) if isinstance(task_keys, list) else f"a {type(task_keys).__name__}"
        )
        raise _violation(f"keys must be a list of 1 to {max_keys} keys; received {received}")
    for key in task_keys:
        if not isinstance(key, str):
            raise _violation(f"each of the keys must be text, not {type(key).__name__}")
    return [name_of(key) for key in task_keys]


def _violation(what: str) -> Exception:
    from starlette.exceptions import WebSocketException

    LOG.warning("subscription of a task worker refused: %s", what)
    return WebSocketException(_VIOLATION, f"Protocol violation: {what}")
