"""A worker's session on a socket, from the welcome to the release of the worker's deliveries."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

import msgspec

from taskqueue_core.backend import Capability, Subscription
from taskqueue_core.capabilities import NewEvent, has, revocation_of, streams_of
from taskqueue_core.concurrency import first_completed, wait_forever
from taskqueue_core.consumer.event_queue import EventQueue
from taskqueue_core.consumer.outage import OUTAGE_ERRORS, OutageRetry, close, release_as_lost
from taskqueue_core.consumer.settlement_queue import SettlementQueue
from taskqueue_core.errors import SubscriptionClosed
from taskqueue_core.hooks import Connection, Hooks
from taskqueue_core.limits import LIMITS
from taskqueue_core.protocol import frames
from taskqueue_core.protocol.server_session import (
    CloseSocket,
    CreditGranted,
    Event,
    Progressed,
    SendFrames,
    ServerSession,
    ServerSessionState,
    SettlementRequested,
    Streamed,
    WorkerLeft,
)
from taskqueue_core.retry import Outcome
from taskqueue_core.tasks import Delivery
from taskqueue_server.context.server import VERSION, ServerContext, read_each
from taskqueue_server.worker_socket.adoption import adopt
from taskqueue_server.worker_socket.sender import DeliverySender
from taskqueue_server.worker_socket.websocket import ConnectionClosed, WebSocketChannel

CLOSE_INTERNAL = 1011
_ADOPT_SECONDS = 5.0
READ_AT_ONCE = 20
"""number of queues whose settings are read at once for a worker without the feature ``timeouts``"""
_FLUSH_SECONDS = 2.0
"""seconds allowed for finishing the settlements that were in progress when the socket closed"""
_log = logging.getLogger("taskqueue.server.socket")


class SessionEnd(msgspec.Struct, frozen=True):
    """The result of a worker's session: why it ended, and how to close its socket."""

    reason: str
    code: int | None = None
    """the close code; ``None`` if the socket has closed already"""
    orderly: bool = True
    """whether the worker's deliveries are released at once; otherwise they count as lost after the grace period"""


async def report_connection(
    hooks: Hooks, log: logging.Logger, connection: Connection, session: Awaitable[SessionEnd]
) -> SessionEnd:
    """Await a worker's session; log its start and its end, and call the hooks for both."""
    fields = {"connection_id": connection.connection_id, "worker_id": connection.worker_id}
    log.info("worker connected", extra={**fields, "keys": len(connection.keys)})
    hooks.fire("worker_connected", connection=connection)
    reason = "cancelled"
    try:
        end = await session
        reason = end.reason
        return end
    finally:
        log.info("worker disconnected", extra={**fields, "reason": reason})
        hooks.fire("worker_disconnected", connection=connection, reason=reason)


class WorkerSession:
    """Serves one worker, and owns the asyncio tasks that serve its socket. Call `run` only once."""

    def __init__(
        self,
        context: ServerContext,
        channel: WebSocketChannel,
        session: ServerSession,
        subscription: Subscription,
        *,
        deliveries_changed: asyncio.Event,
        access_revoked: asyncio.Event,
        withheld: Sequence[str] = (),
        on_closed: Callable[[], None] = lambda: None,
    ) -> None:
        """Create a session that sets ``deliveries_changed`` when deliveries end.

        The session ends when ``access_revoked`` is set, and when one of the queues that are ``withheld`` from the
        worker, which cannot end attempts at their timeouts, has no timeout any more. It calls ``on_closed`` when it
        stops serving the worker, before it releases the worker's deliveries.
        """
        self._context = context
        self._channel = channel
        self._session = session
        self._subscription = subscription
        self._deliveries_changed = deliveries_changed
        self._access_revoked = access_revoked
        self._withheld = withheld
        self._on_closed = on_closed
        self._loop = asyncio.get_running_loop()
        self._listening_since: float | None = None
        self._outage = OutageRetry(self._log_outage)
        self._sender = DeliverySender(
            session,
            subscription,
            channel,
            self._outage,
            deliveries_changed,
            backend=context.backend,
        )
        self._settlements = SettlementQueue(
            context.backend, subscription, self._outage, self._report_settled
        )
        self._events: EventQueue | None = None
        if has(context.backend, Capability.STREAMS):
            self._events = EventQueue(
                streams_of(context.backend),
                self._outage,
                on_stored=self._report_stored,
                on_stale=self._revoke_deliveries,
                pause=0,
            )
        self._streams = False
        """whether the worker has sent events"""

    async def welcome(
        self,
        hello: frames.Hello,
        connection_id: str,
        is_allowed: Callable[[str], bool] = lambda _: True,
    ) -> None:
        """Adopt the deliveries that the worker still runs, if ``is_allowed`` permits their keys, and answer the hello.

        Raises `TimeoutError` if the store does not answer, and `ConnectionClosed` if the worker has left. If neither
        side closed the socket on purpose, `ConnectionClosed` is raised only after the grace period or on shutdown.
        """
        async with asyncio.timeout(_ADOPT_SECONDS):
            adopted = await adopt(
                self._context.backend, self._subscription, hello.holding, self._outage, is_allowed
            )
        lease = self._context.settings.lease
        features = [
            each
            for each in frames.FEATURES
            if self._events is not None or each is not frames.Feature.EVENTS
        ]
        texts = self._session.welcome(connection_id, lease, VERSION, adopted, features)
        try:
            await self._channel.send(*texts)
        except ConnectionClosed as closed:
            self._session.close()
            self._on_closed()
            if not closed.orderly:  # the worker may reconnect and adopt its deliveries
                await self._end_lost(SessionEnd(str(closed), orderly=False))
            raise

    async def run(self) -> SessionEnd:
        """Serve the worker until its session ends, then release its deliveries.

        The caller must then close the subscription, which releases the deliveries that remain after a cancellation.
        """
        settling = asyncio.create_task(self._work())
        try:
            end = await self._serve(settling)
            self._on_closed()
            self._session.close()
            await (self._end_orderly(end) if end.orderly else self._end_lost(end))
            return end
        finally:
            settling.cancel()
            await asyncio.gather(settling, return_exceptions=True)

    async def _work(self) -> None:
        """Append events and settle outcomes until cancelled."""
        if self._events is None:
            await self._settlements.run()
        else:  # an unexpected error of either ends the connection
            await first_completed(self._settlements.run(), self._events.run())

    async def _finish(self) -> None:
        """Wait until the store has what the worker has sent, for a short time."""
        if self._events is not None:
            await self._events.finish(_FLUSH_SECONDS)
        await self._settlements.finish(_FLUSH_SECONDS)

    async def _end_orderly(self, end: SessionEnd) -> None:
        await self._finish()
        moves = self._context.draining.is_set() and self._context.handover
        if moves and self._session.busy and end.code:
            # The worker reconnects to another server, which adopts its deliveries. Wait for that before the release.
            await self._channel.close(end.code, end.reason)
            await asyncio.sleep(self._context.handover)
        await close(self._subscription)
        if end.code is not None:
            await self._channel.close(end.code, end.reason)

    async def _end_lost(self, end: SessionEnd) -> None:
        # The subscription stays open without receiving: the worker may reconnect and adopt its deliveries.
        shutting_down = self._context.draining.is_set()
        if end.code is not None:
            await self._channel.close(end.code, end.reason)
        grace = self._context.settings.grace
        await first_completed(self._context.draining.wait(), asyncio.sleep(grace, result=True))
        await self._finish()
        if not shutting_down:
            await release_as_lost(self._subscription, self._session.held)

    async def _serve(self, settling: asyncio.Task[None]) -> SessionEnd:
        try:
            return await first_completed(
                self._watch_access(),
                self._read(),
                self._channel.lost(),
                self._watch_pings(),
                self._drain(),
                self._deliver(),
                self._watch_withheld(),
                self._watch_revocations(),
                self._watch_settlements(settling),
            )
        except ConnectionClosed as closed:
            return SessionEnd(str(closed), orderly=closed.orderly)
        except SubscriptionClosed:
            return SessionEnd("restart", frames.CLOSE_RESTART)
        except Exception:  # noqa: BLE001 - a bug here must not end other connections
            _log.exception("unexpected error in the connection of a worker")
            return SessionEnd("internal", CLOSE_INTERNAL)

    # `_serve` runs several of the methods below concurrently. The first that returns or raises ends the session.

    async def _read(self) -> SessionEnd:
        while self._session.unknown <= LIMITS.unknown:
            self._listening_since = self._loop.time()
            data = await self._channel.receive()
            self._listening_since = None
            for event in self._session.feed(data):
                if end := await self._handle(event):
                    return end
            await self._settlements.room()
            if self._streams and self._events is not None:
                await self._events.room()
        # A worker whose leases have expired may reconnect: its deliveries stay for the grace period.
        _log.warning(
            "connection closed: the worker named too many unknown receipts",
            extra={"worker_id": self._session.worker_id, "count": self._session.unknown},
        )
        return SessionEnd("unknown_receipts", frames.CLOSE_TRY_LATER, orderly=False)

    async def _handle(self, event: Event) -> SessionEnd | None:
        match event:
            case SettlementRequested(outcomes):
                self._settle(outcomes)
            case SendFrames(text):
                await self._channel.send(text)
            case CreditGranted():
                self._sender.wake()
            case Progressed():
                await self._progress(event)
            case Streamed():
                self._stream(event)
            case WorkerLeft():
                return SessionEnd("bye", frames.CLOSE_CLEAN)
            case CloseSocket(code, reason):
                return SessionEnd(reason, code)
        return None

    def _settle(self, outcomes: Sequence[tuple[Delivery, Outcome]]) -> None:
        """Settle deliveries, once their events are stored."""
        if not self._streams or self._events is None:
            self._settlements.put(*outcomes)
            return
        for delivery, outcome in outcomes:
            put = partial(self._settlements.put, (delivery, outcome))
            self._events.end(delivery.receipt, put)

    def _stream(self, event: Streamed) -> None:
        if self._events is not None:
            self._streams = True
            events = [
                NewEvent(value=bytes(each.value), channel=each.channel) for each in event.events
            ]
            self._events.put_numbered(event.delivery, events, event.first)

    async def _report_stored(self, numbers: dict[str, int]) -> None:
        if self._session.state is not ServerSessionState.CLOSED:
            with contextlib.suppress(ConnectionClosed):
                await self._channel.send(*self._session.stored(numbers))

    async def _report_settled(self, results: Mapping[str, bool]) -> None:
        if texts := self._session.settled(results):
            with contextlib.suppress(ConnectionClosed):
                await self._channel.send(*texts)
        self._deliveries_changed.set()

    async def _progress(self, event: Progressed) -> None:
        try:
            current = await self._context.control.progress(event.delivery, event.value)
        except OUTAGE_ERRORS:
            return  # the worker's next progress report replaces this one
        if not current:
            await self._revoke_deliveries([event.delivery.receipt])

    async def _watch_access(self) -> SessionEnd:
        await self._access_revoked.wait()
        return SessionEnd("revoked", frames.CLOSE_REVOKED)

    async def _watch_pings(self) -> SessionEnd:
        """Send pings. End the session of a worker that is silent while `_read` waits for a frame."""
        lease = self._context.settings.lease
        ping_at = self._loop.time() + lease / 3
        while True:
            since = self._listening_since
            due = ping_at if since is None else min(ping_at, since + lease)
            awake = max(due, self._loop.time())
            await asyncio.sleep(awake - self._loop.time())
            now = self._loop.time()
            # If this process was suspended, frames of the worker may have arrived that `_read` has not received yet.
            # Give `_read` time to receive them. If there are none, the worker counts as silent in the next round.
            if now - awake > lease / 3:
                await asyncio.sleep(lease / 10)
            elif since is not None and since == self._listening_since and now - since >= lease:
                return SessionEnd("silent", frames.CLOSE_TIMEOUT, orderly=False)
            if now >= ping_at:
                await self._channel.send(*self._session.ping())
                ping_at = now + lease / 3

    async def _drain(self) -> SessionEnd:
        await self._context.draining.wait()
        try:
            async with asyncio.timeout(self._context.drain_remaining):
                texts = self._session.drain(self._context.drain_remaining)
                self._sender.stop()
                await self._channel.send(*texts)
                while self._session.busy:
                    self._deliveries_changed.clear()
                    await self._deliveries_changed.wait()
        except TimeoutError:
            pass
        return SessionEnd("restart", frames.CLOSE_RESTART)

    async def _deliver(self) -> SessionEnd:
        if await self._sender.run():
            # The queue's timeout is new. The worker reconnects, and its next subscription is without the queue.
            return SessionEnd("timeouts", frames.CLOSE_RESTART, orderly=False)
        return await wait_forever()

    async def _watch_withheld(self) -> SessionEnd:
        read = partial(read_each, self._context.control.settings, self._withheld, READ_AT_ONCE)
        while self._withheld:
            await asyncio.sleep(self._context.settings.lease / 3)
            found = await self._outage.retry_until_available(read)
            # The worker reconnects, and its next subscription is with the queue. It must be able to keep its tasks.
            keeps = has(self._context.backend, Capability.HANDOVER) or not self._session.busy
            if keeps and any(settings.timeout is None for settings in found):
                return SessionEnd("timeouts", frames.CLOSE_RESTART, orderly=False)
        return await wait_forever()

    async def _watch_revocations(self) -> SessionEnd:
        if has(self._context.backend, Capability.REVOCATION):
            revocation = revocation_of(self._context.backend, self._subscription)
            while receipts := await self._outage.retry_until_available(revocation.revoked):
                await self._revoke_deliveries(receipts)
        return await wait_forever()

    async def _watch_settlements(self, settling: asyncio.Task[None]) -> SessionEnd:
        await asyncio.wait([settling])
        settling.result()
        return await wait_forever()

    async def _revoke_deliveries(self, receipts: Sequence[str]) -> None:
        texts = self._session.revoke(receipts)
        self._deliveries_changed.set()
        await self._channel.send(*texts)

    async def _log_outage(self, ok: bool, reason: str) -> None:  # noqa: FBT001 - `OutageRetry` passes ``ok`` by position
        if self._session.state is ServerSessionState.NEW:
            return
        # Ignore a closed socket here: other asyncio tasks notice it, and the caller may have to finish a settlement.
        with contextlib.suppress(ConnectionClosed):
            await self._channel.send(*self._session.degraded(ok=ok, reason=reason))
