"""The protocol class for uvicorn: sockets share the event loop fairly, and the application can send websocket pings."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from starlette.websockets import WebSocket
from uvicorn._types import ASGIReceiveEvent, ASGISendEvent
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import InvalidState
from websockets.frames import Frame

from taskqueue_server.context.connections import MAX_CONNECTIONS

PINGS = "taskqueue.pings"
"""the scope extension in which `FairProtocol` offers what `Pings` does"""
_MARK_BYTES = 8
"""length of a mark's ping; uvicorn's own pings have 4 bytes"""
_PIECE_BYTES = 4096
"""bytes that are read at once: about a hundred of the smallest frames, which take a few milliseconds"""


class Pings:
    """Pings and marks of one websocket. With another protocol class there are none, and each method does nothing."""

    def __init__(self, websocket: WebSocket) -> None:
        result = websocket.scope.get("extensions", {}).get(PINGS, {})
        self._offered: Mapping[str, Callable[..., Any]] = result

    def keep_alive(self, silence: float) -> None:
        """Break the connection when the peer has not answered a ping for ``silence`` seconds."""
        if keep_alive := self._offered.get("keep_alive"):
            keep_alive(silence)

    def mark(self) -> int:
        """Send a ping and return its number. The peer has not read what is sent next before it answers this ping."""
        mark = self._offered.get("mark")
        return cast("int", mark()) if mark else 0

    def passed(self) -> int:
        """Return the last mark that the peer had answered when it sent the message that was received last."""
        passed = self._offered.get("passed")
        return cast("int", passed()) if passed else 0


class FairProtocol(WebSocketsSansIOProtocol):
    """Reads large chunks piece by piece, and offers `PINGS` to the application.

    A chunk may hold thousands of frames. If it were read at once, a peer that sends at full speed would occupy the
    event loop for seconds, and its messages would take many times the chunk's memory. So the next piece is read when
    the application has received all messages of the last one.

    A pong shows what its sender had read, so that an answer to a message differs from a message that crossed it.
    """

    _unread = b""
    """the chunk that is being read; until it has been read, nothing more is read from the transport"""
    _read_bytes = 0
    """how much of the chunk was read"""
    _next_read: asyncio.Handle | None = None
    _marked = 0
    _answered_mark = 0
    _passed = 0
    _stamps: deque[int] | None = None
    """for each message that waits to be received, the mark that its sender had answered"""

    def data_received(self, data: bytes) -> None:
        """Read a piece, and leave the rest for later."""
        if not self._unread and len(data) <= _PIECE_BYTES:
            super().data_received(data)
            return
        self._unread, self._read_bytes = self._unread[self._read_bytes :] + data, 0
        self._read_piece()

    async def receive(self) -> ASGIReceiveEvent:
        """Return the next event. After the last one of a piece, the next piece is read soon."""
        event = await super().receive()
        if self._stamps and event["type"] == "websocket.receive":
            self._passed = self._stamps.popleft()
        if self._unread:
            self._schedule_read()
        return event

    async def send(self, message: ASGISendEvent) -> None:
        """Send an event. After a close the application receives no more, but the peer's own close must be read."""
        await super().send(message)
        if self._unread and self.close_sent:
            self._schedule_read()

    def connection_lost(self, exc: Exception | None) -> None:
        """Drop what was not read."""
        if self._next_read is not None:
            self._next_read.cancel()
        self._unread = b""
        super().connection_lost(exc)

    def _schedule_read(self) -> None:
        self.transport.pause_reading()
        if self._next_read is None and (self.queue.empty() or self.close_sent):
            self._next_read = self.loop.call_soon(self._read_piece)

    def _read_piece(self) -> None:
        self._next_read = None
        piece = self._unread[self._read_bytes : self._read_bytes + _PIECE_BYTES]
        self._read_bytes += len(piece)
        if self._read_bytes == len(self._unread):
            self._unread, self._read_bytes = b"", 0
        super().data_received(piece)
        if self.transport.is_closing():
            self._unread = b""
        elif self._unread:
            self._schedule_read()
        elif not self.read_paused:
            self.transport.resume_reading()

    def pings(self) -> dict[object, object]:
        """Return the content of the extension `PINGS`."""
        return {
            "keep_alive": self._keep_alive,
            "mark": self._mark,
            "passed": lambda: self._passed,
        }

    def _keep_alive(self, silence: float) -> None:
        self.ping_interval = silence / 3
        self.ping_timeout = silence / 2
        self.start_keepalive()

    def _mark(self) -> int:
        if self._stamps is None:
            # Messages that wait now were sent before the first mark.
            self._stamps = deque([0] * self.queue.qsize())
        self._marked += 1
        try:
            self.conn.send_ping(self._marked.to_bytes(_MARK_BYTES))
        except InvalidState:  # it is closing
            return self._marked
        self.transport.write(b"".join(self.conn.data_to_send()))
        return self._marked

    def keepalive_timeout(self) -> None:
        """Break the connection: a peer that answers no ping reads no close frame either."""
        self.pong_timer = None
        self.transport.abort()

    def handle_pong(self, event: Frame) -> None:
        """Note which mark the peer has answered."""
        if len(event.data) == _MARK_BYTES:
            mark = min(int.from_bytes(event.data), self._marked)
            self._answered_mark = max(self._answered_mark, mark)
            return
        super().handle_pong(event)

    def send_receive_event_to_app(self) -> None:
        """Queue a message, with the mark that its sender had answered."""
        before = self.queue.qsize()
        super().send_receive_event_to_app()
        if self._stamps is not None and self.queue.qsize() > before:
            self._stamps.append(self._answered_mark)


ACCEPTS_PER_TURN = 10
"""Connections accepted in one turn of the event loop.

Without free descriptors asyncio retries, and logs, as often as the backlog that it was given."""
_BACKLOG = 2048
"""connections that the kernel keeps until they are accepted"""
_DESCRIPTORS = MAX_CONNECTIONS + 2000


def raise_backlog(listeners: Iterable[socket.socket]) -> None:
    """Raise the kernel's backlog of listeners that asyncio was given with the backlog `ACCEPTS_PER_TURN`."""
    for listener in listeners:
        listener.listen(_BACKLOG)


def raise_descriptor_limit() -> None:
    """Raise this process's limit of descriptors to what its sockets need, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
