"""What the sockets of Prefect have in common: who is let in, and the handshake that shows a token."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable
from typing import Protocol

import msgspec
from starlette.websockets import WebSocket

from taskqueue_core.concurrency import first_completed
from taskqueue_core.hooks import Identity
from taskqueue_server.auth.credentials import peer_of, token_of
from taskqueue_server.auth.quotas import QuotaSlot
from taskqueue_server.context.server import ServerContext
from taskqueue_server.prefect import frames
from taskqueue_server.problems import respond
from taskqueue_server.worker_socket.endpoint import refusal
from taskqueue_server.worker_socket.handshake import HELLO_SECONDS
from taskqueue_server.worker_socket.pings import Pings
from taskqueue_server.worker_socket.websocket import ConnectionClosed, WebSocketChannel


class PrefectSessionEnd(msgspec.Struct, frozen=True):
    """How a socket ends."""

    reason: str
    code: int | None = None
    """to close with; none where the peer is gone"""


class Guest:
    """An accepted socket, and a member of the registry for as long as it may hold a delivery."""

    def __init__(self, context: ServerContext, websocket: WebSocket) -> None:
        self.connection_id = secrets.token_hex(8)
        self.worker_id: str | None = None
        self.context = context
        self.peer = peer_of(websocket)
        self.token = token_of(websocket)
        self.identity = self._identified() if context.access.authenticates else None
        """who it is, where a header says so"""
        self.slot: QuotaSlot | None = None
        self.channel = WebSocketChannel(websocket, context.settings.lease)
        self.pings = Pings(websocket)
        self.credit = 0
        """how many more deliveries it may be sent"""
        self.busy = 0
        """how many it has that are not settled"""

    def forget(self, receipts: Iterable[str]) -> None:
        """Do nothing: who comes again does not say what it has."""

    async def greet(self) -> PrefectSessionEnd | None:
        """Check its token, unless a header had it. Return how to end if it is wrong. Raises `ConnectionClosed`."""
        auth = await receive_frame(frames.Auth, self.channel)
        if isinstance(auth, PrefectSessionEnd):
            return auth
        if self.token is None:
            self.token = auth.token
        identity = self._identified()
        if identity is None:
            return PrefectSessionEnd("a valid token is required", frames.CLOSE_POLICY)
        if self.slot is None:
            self.slot = self.context.usage.enter(identity)
        if self.slot is None:
            return PrefectSessionEnd("too many", frames.CLOSE_TRY_LATER)
        await self.channel.send(frames.AUTH_SUCCESS)
        return None

    async def wait_closed(self) -> PrefectSessionEnd:
        """Read and drop, until it leaves. Raises `ConnectionClosed` then."""
        while True:
            await self.channel.receive()

    def has_room(self) -> bool:
        """Whether it may come in: it has its place then, if it is known already."""
        if not self.context.registry.has_room_for(known=self.identity is not None):
            return False
        if self.identity is not None:
            self.slot = self.context.usage.enter(self.identity)
        return self.identity is None or self.slot is not None

    def _identified(self) -> Identity | None:
        identity = self.context.access.identify(self.token, self.peer)
        return identity if identity is not None and "consume" in identity.verbs else None


class Visit(Protocol):
    """What becomes of a guest that has shown who it is."""

    async def __call__(self, guest: Guest) -> PrefectSessionEnd:
        """Serve it until the end. Raises `ConnectionClosed` where it left before there was anything to hand back."""
        ...


async def welcome(websocket: WebSocket, visit: Visit) -> None:
    """Let a websocket in, and serve it. A page is refused by a problem; a worker never, for any would end it."""
    context: ServerContext = websocket.app.state.context
    refused = refusal(context, websocket, frames.SUBPROTOCOL)
    try:
        if refused is not None:
            await websocket.send_denial_response(respond(refused))
            return
        await websocket.accept(frames.SUBPROTOCOL)
        guest = Guest(context, websocket)
        if context.draining.is_set() or not context.started:
            await websocket.close(frames.CLOSE_RESTART, "not ready")
            return
        if not guest.has_room():
            await websocket.close(frames.CLOSE_TRY_LATER, "too many")
            return
    except (OSError, RuntimeError, ConnectionClosed):
        return  # it left during the handshake
    await _serve(guest, visit)


async def _serve(guest: Guest, visit: Visit) -> None:
    context = guest.context
    context.registry.add(guest, known=guest.identity is not None)
    try:
        guest.pings.keep_alive(context.settings.lease)
        end = await first_completed(guest.greet(), restart(guest)) or await visit(guest)
        if end.code is not None:
            await guest.channel.close(end.code, end.reason)
    except ConnectionClosed:
        pass
    finally:
        if guest.slot is not None:
            guest.slot.leave()
        context.registry.remove(guest)


async def restart(guest: Guest) -> PrefectSessionEnd:
    """Wait until the server leaves."""
    await guest.context.draining.wait()
    return PrefectSessionEnd("restart", frames.CLOSE_RESTART)


async def receive_frame(
    kind: type[frames.F], channel: WebSocketChannel
) -> frames.F | PrefectSessionEnd:
    """Return a frame that must come now, or how to end where another comes, or none. Raises `ConnectionClosed`."""
    try:
        async with asyncio.timeout(HELLO_SECONDS):
            return frames.decode(kind, await channel.receive())
    except TimeoutError:
        return PrefectSessionEnd("no handshake in time", frames.CLOSE_NO_HELLO)
    except frames.Violation as violation:
        return PrefectSessionEnd(str(violation), frames.CLOSE_PROTOCOL)
