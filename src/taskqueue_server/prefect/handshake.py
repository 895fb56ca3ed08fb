"""The handshake of Prefect sockets: limits, quota and token."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterable
from contextlib import ExitStack

from starlette.websockets import WebSocket

from taskqueue_core.concurrency import first_completed
from taskqueue_core.hooks import Identity
from taskqueue_server.auth.credentials import peer_of, token_of
from taskqueue_server.context.server import ServerContext
from taskqueue_server.prefect import frames
from taskqueue_server.problems import respond
from taskqueue_server.worker_socket.admission import HELLO_SECONDS, enter, refusal
from taskqueue_server.worker_socket.session import SessionEnd
from taskqueue_server.worker_socket.uvicorn_protocol import Pings
from taskqueue_server.worker_socket.websocket import ConnectionClosed, WebSocketChannel


class PrefectConnection:
    """An accepted WebSocket of a Prefect process, which stays registered for as long as it may hold a delivery."""

    def __init__(self, context: ServerContext, websocket: WebSocket) -> None:
        self.connection_id = secrets.token_hex(8)
        self.worker_id: str | None = None
        self.context = context
        self.websocket = websocket
        self.peer = peer_of(websocket)
        self.token = token_of(websocket)
        self.identity = self._identified() if context.access.authenticates else None
        """identity of the header's token; ``None`` without authentication, or without a valid token that may consume"""
        self.slot: ExitStack | None = None
        self.channel = WebSocketChannel(websocket, context.settings.lease)
        self.pings = Pings(websocket)
        self.credit = 0
        """number of deliveries that the worker is ready to receive"""
        self.busy = 0
        """number of deliveries that the worker holds"""

    def forget(self, receipts: Iterable[str]) -> None:
        """Do nothing, because a Prefect worker cannot move deliveries to another connection."""

    async def authenticate(self) -> SessionEnd | None:
        """Check the token in the header or in the first frame. Return a `SessionEnd` if the worker is refused.

        Raises `ConnectionClosed`.
        """
        auth = await receive_frame(frames.Auth, self.channel)
        if isinstance(auth, SessionEnd):
            return auth
        if self.token is None:
            self.token = auth.token
        identity = self._identified()
        if identity is None:
            return SessionEnd("a valid token is required", frames.CLOSE_POLICY)
        if self.slot is None:
            self.slot = self.context.usage.enter(identity)
        if self.slot is None:
            return SessionEnd("too many connections", frames.CLOSE_TRY_LATER)
        await self.channel.send(frames.AUTH_SUCCESS)
        return None

    async def wait_closed(self) -> SessionEnd:
        """Read and drop messages until the client leaves, then raise `ConnectionClosed`."""
        while True:
            await self.channel.receive()

    def _identified(self) -> Identity | None:
        identity = self.context.access.authenticate(self.websocket, self.token)
        return identity if identity is not None and "consume" in identity.verbs else None


Service = Callable[[PrefectConnection], Awaitable[SessionEnd]]
"""a function that serves an authenticated WebSocket; it raises `ConnectionClosed` if the client leaves early"""


async def accept_and_serve(websocket: WebSocket, serve: Service) -> None:
    """Accept and serve a WebSocket of a Prefect process.

    A request that cannot come from a worker, such as one from a web page, is denied with an HTTP problem. All later
    errors are reported by close codes, because a worker exits if it receives an HTTP problem.
    """
    context: ServerContext = websocket.app.state.context
    refused = refusal(context, websocket, frames.SUBPROTOCOL)
    try:
        if refused is not None:
            await websocket.send_denial_response(respond(refused))
            return
        await websocket.accept(frames.SUBPROTOCOL)
        connection = PrefectConnection(context, websocket)
        if context.draining.is_set() or not context.started:
            await websocket.close(frames.CLOSE_RESTART, "server not ready")
            return
        has_room, connection.slot = enter(context, connection.identity)
        if not has_room:
            await websocket.close(frames.CLOSE_TRY_LATER, "too many connections")
            return
    except (OSError, RuntimeError, ConnectionClosed):
        return  # the client left during the handshake
    context.registry.add(connection, known=connection.identity is not None)
    try:
        connection.pings.keep_alive(context.settings.lease)
        end = await first_completed(
            connection.authenticate(), wait_for_shutdown(connection)
        ) or await serve(connection)
        if end.code is not None:
            await connection.channel.close(end.code, end.reason)
    except ConnectionClosed:
        pass
    finally:
        if connection.slot is not None:
            connection.slot.close()
        context.registry.remove(connection)


async def wait_for_shutdown(connection: PrefectConnection) -> SessionEnd:
    """Wait until the server shuts down, and return the end of the session."""
    await connection.context.draining.wait()
    return SessionEnd("restart", frames.CLOSE_RESTART)


async def receive_frame(kind: type[frames.F], channel: WebSocketChannel) -> frames.F | SessionEnd:
    """Return the next frame, or a `SessionEnd` if the frame is invalid or late. Raises `ConnectionClosed`."""
    try:
        async with asyncio.timeout(HELLO_SECONDS):
            return frames.decode(kind, await channel.receive())
    except TimeoutError:
        return SessionEnd("no handshake in time", frames.CLOSE_NO_HELLO)
    except frames.Violation as violation:
        return SessionEnd(str(violation), frames.CLOSE_PROTOCOL)
