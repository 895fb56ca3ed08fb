"""The protocol class for uvicorn: sockets share the event loop fairly, and the application can send websocket pings."""

from __future__ import annotations

import contextlib
import resource
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, cast

from starlette.websockets import WebSocket
from uvicorn._types import ASGIReceiveEvent, ASGISendEvent
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import InvalidState
from websockets.frames import Frame

from taskqueue_server.context.connections import MAX_CONNECTIONS
from taskqueue_server.context.unauthenticated import ConnectionLimits, PiecewiseProtocol

PINGS = "taskqueue.pings"
"""name of the ASGI scope extension in which `FairProtocol` offers the functions that `Pings` calls"""
_MARK_BYTES = 8
"""number of bytes in a ping of `Pings.mark`; uvicorn's own pings have 4 bytes"""
_PIECE_BYTES = 4096
"""number of bytes parsed at once: several hundred of the smallest frames, which takes a few milliseconds"""
_FIRST_PIECE_BYTES = 256
"""number of bytes parsed at once before the client has authenticated, which takes less than half a millisecond"""


class Pings:
    """Pings of one WebSocket. If its protocol class is not `FairProtocol`, no pings are sent, and all numbers are 0."""

    def __init__(self, websocket: WebSocket) -> None:
        result = websocket.scope.get("extensions", {}).get(PINGS, {})
        self._offered: Mapping[str, Callable[..., Any]] = result

    def keep_alive(self, silence: float) -> None:
        """Send pings periodically, and break the connection if none is answered for ``silence`` seconds."""
        if keep_alive := self._offered.get("keep_alive"):
            keep_alive(silence)

    def mark(self) -> int:
        """Send a numbered ping and return its number. The peer answers the ping before it reads any later message."""
        mark = self._offered.get("mark")
        return cast("int", mark()) if mark else 0

    def passed(self) -> int:
        """Return the number of the last ping that the peer had answered before it sent the last received message."""
        passed = self._offered.get("passed")
        return cast("int", passed()) if passed else 0


class FairProtocol(PiecewiseProtocol, WebSocketsSansIOProtocol):
    """A WebSocket protocol that parses large chunks piece by piece, and offers `PINGS` to the application.

    The messages of a chunk would need many times its memory. So the next piece is parsed when the application has
    received all messages of the previous piece.

    Numbered pings show which messages the peer had read when it sent a message. So the application can distinguish an
    answer from a message that the peer had sent before it read the question.
    """

    _marked = 0
    _answered_mark = 0
    _passed = 0
    _stamps: deque[int] | None = None
    """for each queued message, the number of the last ping that the peer had answered before sending the message"""

    def __init__(self, limits: ConnectionLimits, **options: Any) -> None:
        """Create a protocol for a connection with these limits. ``options`` are the arguments of uvicorn."""
        super().__init__(**options)
        self.limits = limits

    def data_received(self, data: bytes) -> None:
        """Parse the data in pieces, except for the head of the request, which the HTTP protocol has limited."""
        if self.handshake_initiated:
            super().data_received(data)
        else:
            self.handle_piece(data)

    def piece_bytes(self) -> int:
        """Return the maximum number of bytes to parse at once."""
        return _PIECE_BYTES if self.limits.authenticated else _FIRST_PIECE_BYTES

    def ready_for_piece(self) -> bool:
        """Return whether all messages of the previous piece are received, or will be dropped."""
        return self.queue.empty() or self.close_sent

    def reading_paused(self) -> bool:
        """Return whether uvicorn has paused reading."""
        return self.read_paused

    async def receive(self) -> ASGIReceiveEvent:
        """Return the next event. Once all messages of a piece are received, schedule parsing of the next piece."""
        event = await super().receive()
        if self._stamps and event["type"] == "websocket.receive":
            self._passed = self._stamps.popleft()
        self.schedule_piece()
        return event

    async def send(self, message: ASGISendEvent) -> None:
        """Send an event. After a close, continue parsing, because the peer's close frame must still be read."""
        await super().send(message)
        if self.close_sent:
            self.schedule_piece()

    def pings(self) -> dict[object, object]:
        """Return the functions that the scope extension `PINGS` offers."""
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
            # The messages in the queue were sent before the peer could answer the first numbered ping.
            self._stamps = deque([0] * self.queue.qsize())
        self._marked += 1
        try:
            self.conn.send_ping(self._marked.to_bytes(_MARK_BYTES))
        except InvalidState:  # the connection is closing
            return self._marked
        self.transport.write(b"".join(self.conn.data_to_send()))
        return self._marked

    def keepalive_timeout(self) -> None:
        """Break the connection without a close frame, because a peer that answers no ping would not read one."""
        self.pong_timer = None
        self.transport.abort()

    def handle_pong(self, event: Frame) -> None:
        """Record which numbered ping the peer has answered."""
        if len(event.data) == _MARK_BYTES:
            mark = min(int.from_bytes(event.data), self._marked)
            self._answered_mark = max(self._answered_mark, mark)
            return
        super().handle_pong(event)

    def send_receive_event_to_app(self) -> None:
        """Queue a message for the application, with the number of the last ping that the peer had answered."""
        before = self.queue.qsize()
        super().send_receive_event_to_app()
        if self._stamps is not None and self.queue.qsize() > before:
            self._stamps.append(self._answered_mark)


ACCEPTS_PER_TURN = 2
"""Maximum number of connections accepted in one turn of the event loop. asyncio calls this number the backlog.

It is small, because each one takes about 0.2 ms, and because asyncio retries and logs that many times if the process
has no free file descriptors."""
BACKLOG = 2048
"""maximum number of connections that the kernel keeps until they are accepted"""
_DESCRIPTORS = MAX_CONNECTIONS + 2000


def raise_descriptor_limit() -> None:
    """Raise this process's limit on file descriptors to fit the maximum number of sockets, if the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
