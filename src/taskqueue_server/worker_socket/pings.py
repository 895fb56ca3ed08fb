"""Pings of websockets themselves, for peers that know no frame for it; every library answers them unasked."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, cast

from starlette.websockets import WebSocket
from uvicorn._types import ASGIReceiveEvent
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import InvalidState
from websockets.frames import Frame

PINGS = "taskqueue.pings"
"""the scope extension under which our own protocol class offers what `Pings` does"""
_MARK = 8
"""bytes of a mark; pings of the server program have 4"""


class Pings:
    """What an application may ask of the protocol class. Where another serves it, there are no pings and no marks."""

    def __init__(self, websocket: WebSocket) -> None:
        result = websocket.scope.get("extensions", {}).get(PINGS, {})
        self._offered: Mapping[str, Callable[..., Any]] = result

    def keep_alive(self, silence: float) -> None:
        """Break the connection once the peer has answered nothing for ``silence`` seconds."""
        if keep_alive := self._offered.get("keep_alive"):
            keep_alive(silence)

    def mark(self) -> int:
        """Send a ping, and return its number. What is sent after it has not been seen before it."""
        mark = self._offered.get("mark")
        return cast("int", mark()) if mark else 0

    def passed(self) -> int:
        """Return the mark that the peer had seen for certain when it sent the message that was received last."""
        passed = self._offered.get("passed")
        return cast("int", passed()) if passed else 0


class PingingProtocol(WebSocketsSansIOProtocol):
    """Offers `PINGS`. A pong tells what its sender had seen, so that an answer can be told from what crossed it."""

    _marked = 0
    _seen = 0
    _passed = 0
    _stamps: deque[int] | None = None

    def pings(self) -> dict[object, object]:
        """Return the extension."""
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
            # What waits to be received was sent before anything could be marked.
            self._stamps = deque([0] * self.queue.qsize())
        self._marked += 1
        try:
            self.conn.send_ping(self._marked.to_bytes(_MARK))
        except InvalidState:  # it is closing
            return self._marked
        self.transport.write(b"".join(self.conn.data_to_send()))
        return self._marked

    def keepalive_timeout(self) -> None:
        """Break the connection: who answers no ping reads no farewell either."""
        self.pong_timer = None
        self.transport.abort()

    def handle_pong(self, event: Frame) -> None:
        """Note what the peer has seen."""
        if len(event.data) == _MARK:
            self._seen = max(self._seen, min(int.from_bytes(event.data), self._marked))
            return
        super().handle_pong(event)

    def send_receive_event_to_app(self) -> None:
        """Stamp a message with what its sender had seen."""
        before = self.queue.qsize()
        super().send_receive_event_to_app()
        if self._stamps is not None and self.queue.qsize() > before:
            self._stamps.append(self._seen)

    async def receive(self) -> ASGIReceiveEvent:
        """Return the next event; `passed` is about this one from now on."""
        event = await super().receive()
        if self._stamps and event["type"] == "websocket.receive":
            self._passed = self._stamps.popleft()
        return event
