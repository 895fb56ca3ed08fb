"""One accepted socket: who it is, and whether it may come in."""

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
from taskqueue_server.worker_socket.session import WorkerSession
from taskqueue_server.worker_socket.websocket import ConnectionClosed, WebSocketChannel

_log = logging.getLogger("taskqueue.server.socket")


class SocketAdmission:
    """A member of the registry for as long as it may hold deliveries. Runs once."""

    def __init__(
        self, context: ServerContext, websocket: WebSocket, slot: QuotaSlot | None = None
    ) -> None:
        """Serve an accepted websocket, with a ``place`` if it showed a good token by header; the hello may, too."""
        self.connection_id = secrets.token_hex(8)
        self.worker_id: str | None = None
        self._context = context
        self._peer = peer_of(websocket)
        self._known = slot is not None
        self._slot = slot
        self._token = token_of(websocket)
        self._channel = WebSocketChannel(websocket, context.settings.lease)
        self._session = ServerSession()
        self._changed = asyncio.Event()

    @property
    def credit(self) -> int:
        """How many more deliveries the worker takes."""
        return self._session.credit

    @property
    def busy(self) -> int:
        """How many deliveries the worker has."""
        return self._session.busy

    def forget(self, receipts: Iterable[str]) -> None:
        """Let go of receipts that move to another connection."""
        self._session.forget(receipts)
        self._changed.set()

    async def run(self) -> None:
        """Serve until the end. Whatever happens, nothing stays behind."""
        self._context.registry.add(self, known=self._known)
        try:
            match await first_completed(self._hello(), self._restart()):
                case Hello() as hello:
                    await self._admit(hello)
                case CloseSocket(code, reason):
                    await self._channel.close(code, reason)
        except ConnectionClosed:
            pass  # it left before it was welcome
        finally:
            self._leave()
            self._context.registry.remove(self)

    def _leave(self) -> None:
        if self._slot is not None:
            self._slot.leave()

    async def _hello(self) -> Hello | CloseSocket:
        return await read_hello(self._session, self._channel)

    async def _restart(self) -> Hello | CloseSocket:
        await self._context.draining.wait()
        return CloseSocket(CLOSE_RESTART, "restart")

    async def _admit(self, hello: Hello) -> None:
        token = self._token if self._known else hello.token
        identity = self._context.access.identify(token, self._peer)
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
        with self._context.access.watch_access(token, self._peer, may_stay) as dismissed:
            await self._let_in(hello, dismissed, partial(identity.is_allowed, "consume"))

    async def _let_in(
        self, hello: Hello, dismissed: asyncio.Event, may: Callable[[str], bool]
    ) -> None:
        context = self._context
        hello = self._without_others(hello, may)
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
            talk = WorkerSession(
                context,
                self._channel,
                self._session,
                subscription,
                deliveries_changed=self._changed,
                access_revoked=dismissed,
                on_closed=self._leave,
            )
            try:
                await talk.welcome(hello, self.connection_id, may)
            except TimeoutError:
                await self._refuse("try_later", "the store is unavailable", CLOSE_TRY_LATER)
                return
            await self._converse(talk, hello)
        finally:
            await close(subscription)

    def _without_others(self, hello: Hello, may: Callable[[str], bool]) -> Hello:
        """Leave out what a connection of the same name holds of keys that this one may not have."""
        others = self._context.registry.others(self, hello.worker_id) if hello.holding else ()
        foreign = {
            delivery.receipt
            for other in others
            if isinstance(other, SocketAdmission)
            for delivery in other._session.held  # noqa: SLF001 - one of us
            if not may(delivery.task.key)
        }
        retained = [receipt for receipt in hello.holding if receipt not in foreign]
        return msgspec.structs.replace(hello, holding=retained)

    async def _converse(self, talk: WorkerSession, hello: Hello) -> None:
        hooks = self._context.hooks
        info = ConnectionInfo(
            connection_id=self.connection_id,
            worker_id=hello.worker_id,
            keys=tuple(dict.fromkeys(hello.keys)),
        )
        shown = {"connection_id": info.connection_id, "worker_id": info.worker_id}
        _log.info("worker connected", extra={**shown, "keys": len(info.keys)})
        hooks.fire("worker_connected", connection=info)
        reason = "cancelled"
        try:
            reason = (await talk.run()).reason
        finally:
            _log.info("worker disconnected", extra={**shown, "reason": reason})
            hooks.fire("worker_disconnected", connection=info, reason=reason)

    async def _refuse(self, rule: str, message: str, code: int) -> None:
        for event in self._session.refuse(rule, message, code):
            match event:
                case SendFrames(text):
                    await self._channel.send(text)
                case CloseSocket(close_code, reason):
                    await self._channel.close(close_code, reason)
