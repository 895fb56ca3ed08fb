"""What the sockets of Prefect have in common: who is let in, and the handshake that shows a token."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable
from typing import Protocol

import msgspec
from starlette.websockets import WebSocket

from taskqueue_core.concurrency import first
from taskqueue_core.hooks import Identity
from taskqueue_server.auth.credentials import peer_of, token_of
from taskqueue_server.auth.quotas import Place
from taskqueue_server.context.server import Hub
from taskqueue_server.prefect import frames
from taskqueue_server.problems import respond
from taskqueue_server.worker_socket.endpoint import refusal
from taskqueue_server.worker_socket.handshake import HELLO_SECONDS
from taskqueue_server.worker_socket.pings import Pings
from taskqueue_server.worker_socket.websocket import Channel, Gone

__all__ = ["End", "Guest", "Visit", "receive_frame", "restart", "welcome"]


class End(msgspec.Struct, frozen=True):
    """How a socket ends."""

    reason: str
    code: int | None = None
    """to close with; none where the peer is gone"""


class Guest:
    """An accepted socket, and a member of the registry for as long as it may hold a delivery."""

    def __init__(self, hub: Hub, websocket: WebSocket) -> None:
        self.connection_id = secrets.token_hex(8)
        self.worker_id: str | None = None
        self.hub = hub
        self.peer = peer_of(websocket)
        self.token = token_of(websocket)
        self.identity = self._identified() if hub.authenticates else None
        """who it is, where a header says so"""
        self.place: Place | None = None
        self.channel = Channel(websocket, hub.settings.lease)
        self.pings = Pings(websocket)
        self.credit = 0
        """how many more deliveries it may be sent"""
        self.busy = 0
        """how many it has that are not settled"""

    def forget(self, receipts: Iterable[str]) -> None:
        """Do nothing: who comes again does not say what it has."""

    async def greet(self) -> End | None:
        """Let it show its token, unless a header did. Returns how to end where that is no good. Raises `Gone`."""
        auth = await receive_frame(frames.Auth, self.channel)
        if isinstance(auth, End):
            return auth
        if self.token is None:
            self.token = auth.token
        identity = self._identified()
        if identity is None:
            return End("a valid token is required", frames.CLOSE_POLICY)
        if self.place is None:
            self.place = self.hub.usage.enter(identity)
        if self.place is None:
            return End("too many", frames.CLOSE_TRY_LATER)
        await self.channel.send(frames.AUTH_SUCCESS)
        return None

    async def left(self) -> End:
        """Read and drop, until it leaves. Raises `Gone` then."""
        while True:
            await self.channel.receive()

    def has_room(self) -> bool:
        """Whether it may come in: it has its place then, if it is known already."""
        if not self.hub.registry.has_room_for(known=self.identity is not None):
            return False
        if self.identity is not None:
            self.place = self.hub.usage.enter(self.identity)
        return self.identity is None or self.place is not None

    def _identified(self) -> Identity | None:
        identity = self.hub.identify(self.token, self.peer)
        return identity if identity is not None and "consume" in identity.verbs else None


class Visit(Protocol):
    """What becomes of a guest that has shown who it is."""

    async def __call__(self, guest: Guest) -> End:
        """Serve it until the end. Raises `Gone` where it left before there was anything to hand back."""
        ...


async def welcome(websocket: WebSocket, visit: Visit) -> None:
    """Let a websocket in, and serve it. A page is refused by a problem; a worker never, for any would end it."""
    hub: Hub = websocket.app.state.hub
    refused = refusal(hub, websocket, frames.SUBPROTOCOL)
    try:
        if refused is not None:
            await websocket.send_denial_response(respond(refused))
            return
        await websocket.accept(frames.SUBPROTOCOL)
        guest = Guest(hub, websocket)
        if hub.draining.is_set() or not hub.started:
            await websocket.close(frames.CLOSE_RESTART, "not ready")
            return
        if not guest.has_room():
            await websocket.close(frames.CLOSE_TRY_LATER, "too many")
            return
    except (OSError, RuntimeError, Gone):
        return  # it left during the handshake
    await _serve(guest, visit)


async def _serve(guest: Guest, visit: Visit) -> None:
    hub = guest.hub
    hub.registry.add(guest, known=guest.identity is not None)
    try:
        guest.pings.keep_alive(hub.settings.lease)
        end = await first(guest.greet(), restart(guest)) or await visit(guest)
        if end.code is not None:
            await guest.channel.close(end.code, end.reason)
    except Gone:
        pass
    finally:
        if guest.place is not None:
            guest.place.leave()
        hub.registry.remove(guest)


async def restart(guest: Guest) -> End:
    """Wait until the server leaves."""
    await guest.hub.draining.wait()
    return End("restart", frames.CLOSE_RESTART)


async def receive_frame(kind: type[frames.F], channel: Channel) -> frames.F | End:
    """Return a frame that must come now, or how to end where another comes, or none. Raises `Gone`."""
    try:
        async with asyncio.timeout(HELLO_SECONDS):
            return frames.decode(kind, await channel.receive())
    except TimeoutError:
        return End("no handshake in time", frames.CLOSE_NO_HELLO)
    except frames.Violation as violation:
        return End(str(violation), frames.CLOSE_PROTOCOL)
