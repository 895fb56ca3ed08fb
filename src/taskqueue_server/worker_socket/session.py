"""A worker's socket from the welcome to its end, and what becomes of its deliveries then."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

import msgspec

from taskqueue_core.backend import Capability, Subscription
from taskqueue_core.capabilities import has, revocation_of
from taskqueue_core.concurrency import first, forever
from taskqueue_core.consumer.outage import OUTAGES, StoreLink, close, give_up_as_lost
from taskqueue_core.errors import SubscriptionClosed
from taskqueue_core.protocol.frames import (
    CLOSE_CLEAN,
    CLOSE_RESTART,
    CLOSE_REVOKED,
    CLOSE_TIMEOUT,
    Hello,
)
from taskqueue_core.protocol.server_events import (
    Event,
    Granted,
    Hangup,
    Left,
    Progressed,
    Say,
    Settlement,
)
from taskqueue_core.protocol.server_session import ServerSession, SessionState
from taskqueue_server.context.server import VERSION, Hub
from taskqueue_server.worker_socket.handshake import adopt
from taskqueue_server.worker_socket.sender import Pump
from taskqueue_server.worker_socket.settler import Settler
from taskqueue_server.worker_socket.websocket import Channel, Gone

__all__ = ["Conversation", "End"]

CLOSE_INTERNAL = 1011
_ADOPT_SECONDS = 5.0
_FLUSH_SECONDS = 2.0
"""for settlements that were under way when the socket ended"""
_log = logging.getLogger("taskqueue.server.socket")


class End(msgspec.Struct, frozen=True):
    """How a conversation ends."""

    orderly: bool
    """what is held goes back at once; otherwise after the grace, as lost"""
    reason: str
    code: int | None = None
    """to close with; none where the peer is gone"""


class Conversation:
    """Owns its subscription and every task that serves the socket. Runs once."""

    def __init__(
        self,
        hub: Hub,
        channel: Channel,
        session: ServerSession,
        subscription: Subscription,
        *,
        changed: asyncio.Event,
        dismissed: asyncio.Event,
        parted: Callable[[], None] = lambda: None,
    ) -> None:
        """``changed`` is set whenever deliveries leave the books, ``dismissed`` once the worker may not stay.

        ``parted`` is called as soon as nobody listens any more, before what is held is handed back.
        """
        self._hub = hub
        self._channel = channel
        self._session = session
        self._subscription = subscription
        self._changed = changed
        self._dismissed = dismissed
        self._parted = parted
        self._loop = asyncio.get_running_loop()
        self._listening_since: float | None = None
        self._store = StoreLink(self._tell)
        self._pump = Pump(session, subscription, channel, self._store)
        self._settler = Settler(
            hub,
            subscription,
            session=session,
            channel=channel,
            store=self._store,
            settled=changed.set,
        )

    async def welcome(
        self, hello: Hello, connection_id: str, may: Callable[[str], bool] = lambda _: True
    ) -> None:
        """Adopt what the worker still runs of the keys that it ``may`` have, and answer its hello.

        Raises `TimeoutError` where the store cannot say, and `Gone`, after the grace, where the worker is.
        """
        async with asyncio.timeout(_ADOPT_SECONDS):
            adopted = await adopt(
                self._hub.backend, self._subscription, hello.holding, self._store, may
            )
        lease = self._hub.settings.lease
        texts = self._session.welcome(connection_id, lease, VERSION, adopted)
        try:
            await self._channel.send(*texts)
        except Gone as gone:
            self._session.close()
            self._parted()
            if not gone.orderly:  # its next connection adopts the same
                await self._break_off(End(orderly=False, reason=str(gone)))
            raise

    async def run(self) -> End:
        """Serve until the end, and hand back what is held then. If cancelled, closing the subscription does that."""
        settling = asyncio.create_task(self._settler.run())
        try:
            end = await self._talk(settling)
            self._parted()
            self._session.close()
            await (self._part(end) if end.orderly else self._break_off(end))
            return end
        finally:
            settling.cancel()
            await asyncio.gather(settling, return_exceptions=True)

    async def _part(self, end: End) -> None:
        await self._settler.finish(_FLUSH_SECONDS)
        if self._hub.draining.is_set() and self._session.busy and self._hub.handover and end.code:
            # The worker goes on, and another server adopts what it runs: only what is left is handed back.
            await self._channel.close(end.code, end.reason)
            await asyncio.sleep(self._hub.handover)
        await close(self._subscription)
        if end.code is not None:
            await self._channel.close(end.code, end.reason)

    async def _break_off(self, end: End) -> None:
        # The subscription stays open, and nothing receives into it: the worker may come back and adopt.
        ours = self._hub.draining.is_set()
        if end.code is not None:
            await self._channel.close(end.code, end.reason)
        grace = self._hub.settings.grace
        await first(self._hub.draining.wait(), asyncio.sleep(grace, result=True))
        await self._settler.finish(_FLUSH_SECONDS)
        if not ours:
            await give_up_as_lost(self._subscription, self._session.held)

    async def _talk(self, settling: asyncio.Task[None]) -> End:
        try:
            return await first(
                self._dismiss(),
                self._read(),
                self._notice(),
                self._keep(),
                self._drain(),
                self._deliver(),
                self._revoke(),
                self._mind(settling),
            )
        except Gone as gone:
            return End(gone.orderly, str(gone))
        except Exception:  # noqa: BLE001 - a fault of ours must not take other connections along
            _log.exception("a connection failed")
            return End(orderly=True, reason="internal", code=CLOSE_INTERNAL)

    # The tasks; each returns when it knows that the conversation is over.

    async def _read(self) -> End:
        while True:
            self._listening_since = self._loop.time()
            data = await self._channel.receive()
            self._listening_since = None
            for event in self._session.feed(data):
                end = await self._apply(event)
                if end is not None:
                    return end
            await self._settler.room()

    async def _apply(self, event: Event) -> End | None:
        match event:
            case Say(text):
                await self._channel.send(text)
            case Granted():
                self._pump.wake()
            case Progressed():
                await self._progress(event)
            case Left():
                return End(orderly=True, reason="bye", code=CLOSE_CLEAN)
            case Hangup(code, reason):
                return End(orderly=True, reason=reason, code=code)
            case _ if isinstance(event, Settlement):
                self._settler.put(event)
        return None

    async def _progress(self, event: Progressed) -> None:
        try:
            current = await self._hub.control.progress(event.delivery, event.value)
        except OUTAGES:
            return  # the next report says more
        if not current:
            await self._take_away([event.delivery.receipt])

    async def _dismiss(self) -> End:
        await self._dismissed.wait()
        return End(orderly=True, reason="revoked", code=CLOSE_REVOKED)

    async def _notice(self) -> End:
        raise await self._channel.lost()

    async def _keep(self) -> End:
        """Ping, and give up a worker that stays silent while we listen."""
        lease = self._hub.settings.lease
        ping_at = self._loop.time() + lease / 3
        while True:
            since = self._listening_since
            due = ping_at if since is None else min(ping_at, since + lease)
            awake = max(due, self._loop.time())
            await asyncio.sleep(awake - self._loop.time())
            now = self._loop.time()
            # Having slept too long ourselves, we cannot know who was silent: what came meanwhile is read first. Only
            # this sleep counts: after it, who is silent still is given up, however long ago the lease was over.
            if now - awake > lease / 3:
                await asyncio.sleep(lease / 10)
            elif since is not None and since == self._listening_since and now - since >= lease:
                return End(orderly=False, reason="silent", code=CLOSE_TIMEOUT)
            if now >= ping_at:
                await self._channel.send(*self._session.ping())
                ping_at = now + lease / 3

    async def _drain(self) -> End:
        await self._hub.draining.wait()
        try:
            async with asyncio.timeout(self._hub.drain_left):
                texts = self._session.drain(self._hub.drain_left)
                self._pump.stop()
                await self._channel.send(*texts)
                while self._session.busy:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass
        return End(orderly=True, reason="restart", code=CLOSE_RESTART)

    async def _deliver(self) -> End:
        try:
            await self._pump.run()
        except SubscriptionClosed:
            return End(orderly=True, reason="restart", code=CLOSE_RESTART)
        return await forever()

    async def _revoke(self) -> End:
        if has(self._hub.backend, Capability.REVOCATION):
            revocation = revocation_of(self._hub.backend, self._subscription)
            while receipts := await self._store.insist(revocation.revoked):
                await self._take_away(receipts)
        return await forever()

    async def _mind(self, settling: asyncio.Task[None]) -> End:
        await asyncio.wait([settling])
        settling.result()
        return await forever()

    async def _take_away(self, receipts: Sequence[str]) -> None:
        texts = self._session.revoke(receipts)
        self._changed.set()
        await self._channel.send(*texts)

    async def _tell(self, ok: bool, reason: str) -> None:  # noqa: FBT001 - the frame's field
        if self._session.state is SessionState.NEW:
            return
        with contextlib.suppress(Gone):  # others notice; who tells may have work to finish
            await self._channel.send(*self._session.degraded(ok=ok, reason=reason))
