"""Admitting an accepted socket: its hello, its permissions and its quota."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable
from functools import partial

import msgspec
from starlette.websockets import WebSocket

from taskqueue_core.backend import Capability
from taskqueue_core.capabilities import has
from taskqueue_core.concurrency import first_completed
from taskqueue_core.consumer.outage import close
from taskqueue_core.errors import InvalidInput
from taskqueue_core.hooks import Connection as ConnectionInfo
from taskqueue_core.hooks import Identity
from taskqueue_core.protocol.frames import (
    CLOSE_PROTOCOL,
    CLOSE_RESTART,
    CLOSE_TRY_LATER,
    CLOSE_UNAUTHENTICATED,
    Hello,
)
from taskqueue_core.protocol.server_events import CloseSocket, SendFrames
from taskqueue_core.protocol.server_session import ServerSession
from taskqueue_server.auth.credentials import peer_of, token_of
from taskqueue_server.auth.quotas import QuotaSlot
from taskqueue_server.context.server import ServerContext
from taskqueue_server.worker_socket.handshake import read_hello
from taskqueue_server.worker_socket.session import WorkerSession, report_connection
from taskqueue_server.worker_socket.websocket import ConnectionClosed, WebSocketChannel

_log = logging.getLogger("taskqueue.server.socket")


class SocketAdmission:
    """An accepted socket, registered for as long as it may hold deliveries. Runs once."""

    def __init__(
        self, context: ServerContext, websocket: WebSocket, slot: QuotaSlot | None = None
    ) -> None:
        """Serve an accepted websocket. It has a ``slot`` if its header had a valid token; the hello may have one."""
        self.connection_id = secrets.token_hex(8)
        self.worker_id: str | None = None
        self._context = context
        self._peer = peer_of(websocket)
        self._known = slot is not None
        self._slot = slot
        self._token = token_of(websocket)
        self._channel = WebSocketChannel(websocket, context.settings.lease)
        self._session = ServerSession()
        self._deliveries_changed = asyncio.Event()

    @property
    def credit(self) -> int:
        """Number of deliveries that the worker still accepts."""
        return self._session.credit

    @property
    def busy(self) -> int:
        """Number of deliveries that the worker holds."""
        return self._session.busy

    def forget(self, receipts: Iterable[str]) -> None:
        """Remove receipts that move to another connection."""
        self._session.forget(receipts)
        self._deliveries_changed.set()

    async def run(self) -> None:
        """Serve until the end; clean up in any case."""
        self._context.registry.add(self, known=self._known)
        try:
            reading = read_hello(self._session, self._channel)
            match await first_completed(reading, self._restart()):
                case Hello() as hello:
                    await self._admit(hello)
                case CloseSocket(code, reason):
                    await self._channel.close(code, reason)
        except ConnectionClosed:
            pass  # the worker left before the welcome
        finally:
            self._release_quota()
            self._context.registry.remove(self)

    def _release_quota(self) -> None:
        if self._slot is not None:
            self._slot.leave()

    async def _restart(self) -> Hello | CloseSocket:
        await self._context.draining.wait()
        return CloseSocket(CLOSE_RESTART, "restart")

    async def _admit(self, hello: Hello) -> None:
        token = self._token if self._known else hello.token
        identity = self._context.identify(token, self._peer)
        if identity is None or "consume" not in identity.verbs:
            await self._refuse("unauthenticated", "may not consume", CLOSE_UNAUTHENTICATED)
            return

        def may_stay(identity: Identity) -> bool:
            return all(identity.is_allowed("consume", key) for key in hello.keys)

        if not may_stay(identity):
            await self._refuse("forbidden", "may not consume these keys", CLOSE_UNAUTHENTICATED)
            return
        if self._slot is None:
            self._slot = self._context.usage.enter(identity)
        if self._slot is None:
            await self._refuse(
                "too_many", "this token has reached its maximum number of sockets", CLOSE_TRY_LATER
            )
            return
        with self._context.access.watch_access(token, self._peer, may_stay) as access_revoked:
            await self._serve(hello, access_revoked, partial(identity.is_allowed, "consume"))

    async def _serve(
        self, hello: Hello, access_revoked: asyncio.Event, is_allowed: Callable[[str], bool]
    ) -> None:
        context = self._context
        hello = self._without_others(hello, is_allowed)
        try:
            subscription = context.backend.subscribe(hello.keys, hello.worker_id)
        except InvalidInput as error:
            await self._refuse("invalid_frame", str(error), CLOSE_PROTOCOL)
            return
        try:
            self.worker_id = hello.worker_id
            context.registry.identify(self, hello.worker_id)
            if has(context.backend, Capability.HANDOVER):
                context.registry.claim(self, hello.worker_id, hello.holding)
            session = WorkerSession(
                context,
                self._channel,
                self._session,
                subscription,
                deliveries_changed=self._deliveries_changed,
                access_revoked=access_revoked,
                on_closed=self._release_quota,
            )
            try:
                await session.welcome(hello, self.connection_id, is_allowed)
            except TimeoutError:
                await self._refuse("try_later", "the store is unavailable", CLOSE_TRY_LATER)
                return
            connection = ConnectionInfo(
                connection_id=self.connection_id,
                worker_id=hello.worker_id,
                keys=tuple(dict.fromkeys(hello.keys)),
            )
            await report_connection(context.hooks, _log, connection, session.run())
        finally:
            await close(subscription)

    def _without_others(self, hello: Hello, is_allowed: Callable[[str], bool]) -> Hello:
        """Leave out receipts that another connection of this worker holds, for keys that this one may not consume."""
        others = self._context.registry.others(self, hello.worker_id) if hello.holding else ()
        foreign = {
            delivery.receipt
            for other in others
            if isinstance(other, SocketAdmission)
            for delivery in other._session.held  # noqa: SLF001 - of the same class
            if not is_allowed(delivery.task.key)
        }
        retained = [receipt for receipt in hello.holding if receipt not in foreign]
        return msgspec.structs.replace(hello, holding=retained)

    async def _refuse(self, rule: str, message: str, code: int) -> None:
        for event in self._session.refuse(rule, message, code):
            match event:
                case SendFrames(text):
                    await self._channel.send(text)
                case CloseSocket(close_code, reason):
                    await self._channel.close(close_code, reason)
