"""uvicorn's protocol classes with additional limits, most of which are timeouts."""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
from asyncio import sslproto
from functools import partial
from typing import Any

import h11
from uvicorn._types import ASGIReceiveCallable, ASGISendCallable, ASGISendEvent
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.utils import ClientDisconnected
from websockets.frames import Frame

from taskqueue_server.auth.credentials import LIMITED
from taskqueue_server.context.unauthenticated import (
    SECONDS,
    WRITE_BYTES,
    PiecewiseProtocol,
    UnauthenticatedConnections,
)
from taskqueue_server.worker_socket.uvicorn_protocol import PINGS, FairProtocol
from taskqueue_server.worker_socket.websocket import ABORT

HEADER_SECONDS = 10.0
"""seconds within which the head of a request must arrive on a new or reused connection"""
ANSWER_SECONDS = 30.0
"""seconds within which the client must read the buffered part of a response"""
_CLOSE_SECONDS = 2.0
_NOT_UTF8 = 1007
_FRAGMENTS = 1024
"""maximum number of fragments of one message; its size is limited separately"""
_HEAD_PIECE_BYTES = 1024
_HEAD_LINES = 128
"""maximum number of lines in the head of a request, as in the websockets library"""
_HEAD_END = re.compile(rb"\n\r?\n")
_CHUNKS_BYTES = 256
"""number of bytes of a chunked body parsed at once: about forty of the smallest chunks, in half a millisecond"""
_BODY_BYTES = 256 * 1024
_CHUNK_HEAD_BYTES = 1024
"""maximum number of bytes before and after the data of a chunk, and of trailers"""
_HANDSHAKE_BYTES = 16 * 1024


class HttpProtocol(PiecewiseProtocol, H11Protocol):
    """An HTTP connection that is closed if no request arrives in time, or the client reads the response too slowly.

    Before the client has authenticated, the limits of `ConnectionLimits` apply, and the connection is closed after the
    first response.
    """

    _head_timeout: asyncio.TimerHandle | None = None
    _read_timeout: asyncio.TimerHandle | None = None
    _started = False

    def __init__(self, connections: UnauthenticatedConnections, **options: Any) -> None:
        """Create a protocol. ``options`` are the arguments of uvicorn."""
        super().__init__(**options)
        self._connections = connections
        self._application = self.app

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the limits of the connection, unless TLS has started them, and the timeout for the first request."""
        if not hasattr(self, "limits"):
            self.limits = self._connections.enter(transport)
        self.limits.limit_buffers(transport)
        self.app = self._serve
        self.ws_protocol_class = partial(SocketProtocol, self.limits)  # type: ignore[assignment]
        super().connection_made(transport)
        self._start_head_timeout()

    def piece_bytes(self) -> int:
        """Return the maximum number of bytes to parse at once."""
        if self.conn.their_state is not h11.SEND_BODY:
            return _HEAD_PIECE_BYTES
        return _CHUNKS_BYTES if self._is_chunked() else _BODY_BYTES

    def starts_task(self) -> bool:
        """Return whether the last piece completed the head or body of a request, which the application handles next."""
        return self._started

    def is_cheap(self) -> bool:
        """Return whether the next piece is part of a body of known length, which is not parsed."""
        return self.conn.their_state is h11.SEND_BODY and not self._is_chunked()

    def reading_paused(self) -> bool:
        """Return whether uvicorn has paused reading."""
        return self.flow.read_paused

    def _is_chunked(self) -> bool:
        return any(name == b"transfer-encoding" for name, _ in self.headers)

    def handle_piece(self, piece: bytes) -> None:
        """Parse a piece. The timeout runs while the head of a request, or a body that is dropped, is incomplete."""
        if self.conn.their_state is h11.IDLE and self._has_many_lines(piece):
            self.send_400_response("Too many header fields.")
            return
        scope, state = self.scope, self.conn.their_state
        super().handle_piece(piece)
        complete = state is h11.SEND_BODY and self.conn.their_state is not h11.SEND_BODY
        self._started = complete or self.scope is not scope
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            if self.timeout_keep_alive_task is None and self._head_timeout is None:
                self._start_head_timeout()
        elif self._head_timeout is not None and not self._drops_body():
            self._stop_head_timeout()
        if (
            self.conn.their_state is h11.SEND_BODY
            and len(self.conn.trailing_data[0]) > _CHUNK_HEAD_BYTES
        ):
            self.transport.abort()  # trailers, or the extensions of a chunk, which the server does not use

    def _has_many_lines(self, piece: bytes) -> bool:
        head = self.conn.trailing_data[0] + piece
        end = _HEAD_END.search(head)
        return head.count(b"\n", 0, end.start() if end else len(head)) > _HEAD_LINES

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Stop the timeouts; the WebSocket has its own."""
        self._stop_head_timeout()
        self._stop_read_timeout()
        super().handle_websocket_upgrade(event)
        self._unread = b""
        self.app = (
            self._application
        )  # as in `connection_lost`, which is not called for this protocol

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timeouts."""
        self._stop_head_timeout()
        self._stop_read_timeout()
        super().connection_lost(exc)
        # These refer to the protocol. Without them, it is freed at once: collecting the garbage of many short
        # connections at a time would take milliseconds.
        self.app = self._application
        self.cycle = None  # type: ignore[assignment]  # uvicorn no longer uses it

    async def _serve(
        self, scope: Any, receive: ASGIReceiveCallable, send: ASGISendCallable
    ) -> None:
        scope["extensions"] = {LIMITED: self.limits.extension()}
        if not self.limits.authenticated:
            send = partial(self._send_limited, receive, send)
        await self._application(scope, receive, send)

    async def _send_limited(
        self, receive: ASGIReceiveCallable, send: ASGISendCallable, message: ASGISendEvent
    ) -> None:
        """Send an event. Before the client has authenticated, send a body in pieces, then close the connection."""
        if self.limits.authenticated:
            await send(message)
        elif message["type"] == "http.response.start":
            headers = [item for item in message.get("headers", ()) if item[0] != b"connection"]
            await send({**message, "headers": [*headers, CLOSE_HEADER]})
        elif message["type"] == "http.response.body":
            body, more = message.get("body", b""), message.get("more_body", False)
            for start in range(0, len(body), WRITE_BYTES):
                piece = body[start : start + WRITE_BYTES]
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            if not more:
                await self._drop_request_body(receive)
                await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _drop_request_body(self, receive: ASGIReceiveCallable) -> None:
        # If the server closed a connection with unread input, the client could lose the response.
        self.limits.drop_input()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_SECONDS):
                while self.is_cheap() and (await receive())["type"] == "http.request":
                    pass

    def on_response_complete(self) -> None:
        """Start the timeout if the client is still sending a body, which nothing will read."""
        super().on_response_complete()
        if self._drops_body() and self._head_timeout is None:
            self._start_head_timeout()

    def _drops_body(self) -> bool:
        return self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY

    def pause_writing(self) -> None:
        """Start the timeout within which the client must read the response."""
        super().pause_writing()
        self._read_timeout = self.loop.call_later(ANSWER_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop the timeout, because the client has read enough of the response."""
        self._stop_read_timeout()
        super().resume_writing()

    def _stop_read_timeout(self) -> None:
        if self._read_timeout is not None:
            self._read_timeout.cancel()
            self._read_timeout = None

    def _start_head_timeout(self) -> None:
        self._head_timeout = self.loop.call_later(HEADER_SECONDS, self.transport.abort)

    def _stop_head_timeout(self) -> None:
        if self._head_timeout is not None:
            self._head_timeout.cancel()
            self._head_timeout = None


class SocketProtocol(FairProtocol):
    """A WebSocket that the application can abort, with limits on closing time, fragments and unread pongs."""

    async def run_asgi(self) -> None:
        """Run the application, and abort the connection if the client does not close it soon after."""
        self.scope["extensions"][ABORT] = {"abort": self.transport.abort}
        self.scope["extensions"][PINGS] = self.pings()
        self.scope["extensions"][LIMITED] = self.limits.extension()
        try:
            await super().run_asgi()
        finally:
            self.scope[
                "extensions"
            ].clear()  # they refer to the protocol; see `HttpProtocol.connection_lost`
            self.loop.call_later(_CLOSE_SECONDS, self.transport.abort)

    async def send(self, message: ASGISendEvent) -> None:
        """Send an event. Mark a denied handshake as complete, because uvicorn would otherwise log an error.

        Raises `ClientDisconnected` if the connection is closed, because asyncio would otherwise log each write.
        """
        if message["type"] == "websocket.send" and self.transport.is_closing():
            raise ClientDisconnected
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and not message.get("more_body"):
            self.handshake_complete = True

    def handle_cont(self, event: Frame) -> None:
        """Abort the connection after too many fragments: empty fragments use memory but never reach the size limit."""
        super().handle_cont(event)
        if len(self.frames) > _FRAGMENTS:
            self.frames = []
            self.transport.abort()

    def send_receive_event_to_app(self) -> None:
        """Close the connection if a text message is not UTF-8, without logging the client's mistake as an error."""
        if self.curr_msg_data_type == "text" and not self.close_sent:
            self.frames = [b"".join(self.frames)]
            try:
                self.frames[0].decode()
            except UnicodeDecodeError:
                self.frames = []
                # If the client's close frame has arrived too, it is handled next.
                if self.conn.close_rcvd is None:
                    self.conn.send_close(_NOT_UTF8)
                    self.handle_parser_exception()
                return
        super().send_receive_event_to_app()

    def handle_ping(self) -> None:
        """Answer a ping, but drop the pong if the client reads too slowly, because unread pongs would use memory."""
        pong = b"".join(self.conn.data_to_send())
        if self.writable.is_set() and not self.transport.is_closing():
            self.transport.write(pong)


class TlsProtocol(sslproto.SSLProtocol):
    """TLS of one connection, with the limits of `ConnectionLimits` from the first byte of the handshake."""

    max_size = _HANDSHAKE_BYTES
    """number of bytes received at once; asyncio allocates a buffer of this size for each connection"""

    def __init__(
        self,
        connections: UnauthenticatedConnections,
        context: ssl.SSLContext,
        **options: Any,
    ) -> None:
        """Create the protocol of a connection with an `HttpProtocol`, whose arguments are ``options``."""
        self._connections = connections
        self._http = HttpProtocol(connections, **options)
        super().__init__(
            asyncio.get_running_loop(),
            self._http,
            context,
            None,  # type: ignore[arg-type]  # nothing waits for the handshake
            server_side=True,
            ssl_handshake_timeout=SECONDS,  # type: ignore[arg-type]
            ssl_shutdown_timeout=_CLOSE_SECONDS,
        )

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the limits of the connection."""
        self.limits = self._http.limits = self._connections.enter(transport, encrypted=True)
        super().connection_made(transport)

    def buffer_updated(self, nbytes: int) -> None:
        """Handle received bytes, before the client has authenticated in turns with other connections."""
        transport = self._transport
        if self.limits.authenticated or transport is None:
            super().buffer_updated(nbytes)
        elif self.limits.count(nbytes):
            transport.pause_reading()  # type: ignore[attr-defined]
            self.limits.turns.add(partial(self._handle, nbytes))

    def _handle(self, nbytes: int) -> int:
        if self._transport is not None:
            super().buffer_updated(nbytes)
        if self._transport is not None and not self._ssl_reading_paused:  # type: ignore[attr-defined]
            self._transport.resume_reading()  # type: ignore[attr-defined]
        return nbytes

    def connection_lost(self, exc: BaseException | None) -> None:
        """End the limits of the connection."""
        self.limits.leave()
        super().connection_lost(exc)
        del self._http  # its transport refers to this protocol; see `HttpProtocol.connection_lost`
