"""uvicorn's protocol classes with additional limits, most of which are timeouts."""

from __future__ import annotations

import asyncio

import h11
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.utils import ClientDisconnected
from websockets.frames import Frame

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


class HttpProtocol(H11Protocol):
    """An HTTP connection that is closed if no request arrives in time, or the client reads the response too slowly."""

    _head_timeout: asyncio.TimerHandle | None = None
    _read_timeout: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timeout for the first request."""
        super().connection_made(transport)
        self._start_head_timeout()

    def data_received(self, data: bytes) -> None:
        """Start the timeout while the head of a request is incomplete; stop it when the head has arrived."""
        super().data_received(data)
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            if self.timeout_keep_alive_task is None and self._head_timeout is None:
                self._start_head_timeout()
        elif self._head_timeout is not None:
            self._stop_head_timeout()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Stop the timeouts; the WebSocket has its own."""
        self._stop_head_timeout()
        self._stop_read_timeout()
        super().handle_websocket_upgrade(event)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timeouts."""
        self._stop_head_timeout()
        self._stop_read_timeout()
        super().connection_lost(exc)

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
        try:
            await super().run_asgi()
        finally:
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
