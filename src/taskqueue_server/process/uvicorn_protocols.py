"""uvicorn's protocol classes, with time limits where it has none."""

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
"""for a request's head to arrive, once a connection is open or a request has begun"""
ANSWER_SECONDS = 30.0
"""for a peer to read what is buffered of an answer"""
_CLOSE_SECONDS = 2.0
_NOT_UTF8 = 1007
_FRAGMENTS = 1024
"""of one message; nobody needs more, since its size is limited too"""


class HttpProtocol(H11Protocol):
    """Closes connections on which no request arrives, or whose peer does not read its answer."""

    _patience: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start to wait for a request."""
        super().connection_made(transport)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        """Wait again where only a part of a request's head has come."""
        super().data_received(data)
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            if self.timeout_keep_alive_task is None and self._patience is None:
                self._wait_for_head()
        else:
            self._stop_waiting()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Leave the waiting to the socket's own rules."""
        self._stop_waiting()
        self._was_read()
        super().handle_websocket_upgrade(event)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop to wait."""
        self._stop_waiting()
        self._was_read()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Give the peer some time to read."""
        super().pause_writing()
        self._unread = self.loop.call_later(ANSWER_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """Note that it has read."""
        self._was_read()
        super().resume_writing()

    def _was_read(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _wait_for_head(self) -> None:
        self._patience = self.loop.call_later(HEADER_SECONDS, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None


class SocketProtocol(FairProtocol):
    """Can be broken by the application, waits briefly for a farewell, and answers pings only as they are read."""

    async def run_asgi(self) -> None:
        """Run the application; break the connection soon after if the peer has not ended it."""
        self.scope["extensions"][ABORT] = {"abort": self.transport.abort}
        self.scope["extensions"][PINGS] = self.pings()
        try:
            await super().run_asgi()
        finally:
            self.loop.call_later(_CLOSE_SECONDS, self.transport.abort)

    async def send(self, message: ASGISendEvent) -> None:
        """Count a refusal as a completed handshake, which it is; else it would be logged as an error.

        Raises `ClientDisconnected` where the connection is known to be gone, before asyncio logs each write as a fault.
        """
        if message["type"] == "websocket.send" and self.transport.is_closing():
            raise ClientDisconnected
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and not message.get("more_body"):
            self.handshake_complete = True

    def handle_cont(self, event: Frame) -> None:
        """Refuse a message in too many fragments: empty ones take memory, and never reach the limit of its size."""
        super().handle_cont(event)
        if len(self.frames) > _FRAGMENTS:
            self.frames = []
            self.transport.abort()

    def send_receive_event_to_app(self) -> None:
        """Refuse text that is not UTF-8. It is the peer's fault, and no error of ours to be logged each time."""
        if self.curr_msg_data_type == "text" and not self.close_sent:
            self.frames = [b"".join(self.frames)]
            try:
                self.frames[0].decode()
            except UnicodeDecodeError:
                self.frames = []
                if (
                    self.conn.close_rcvd is None
                ):  # else its own close came with it, and is handled next
                    self.conn.send_close(_NOT_UTF8)
                    self.handle_parser_exception()
                return
        super().send_receive_event_to_app()

    def handle_ping(self) -> None:
        """Answer, unless earlier answers are still waiting to be read."""
        pong = b"".join(self.conn.data_to_send())
        if self.writable.is_set() and not self.transport.is_closing():
            self.transport.write(pong)
