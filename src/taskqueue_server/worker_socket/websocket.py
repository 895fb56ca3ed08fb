"""An accepted websocket: receives and sends text, with a time limit for sends, and one error for every end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from taskqueue_core.protocol.frames import CLOSE_CLEAN, CLOSE_RESTART

ABORT = "taskqueue.abort"
"""the scope extension in which our protocol class offers ``{"abort": callable}``"""

CLOSE_BROKEN = 1006
"""the connection broke without a close frame"""
_ORDERLY = frozenset(
    {
        CLOSE_CLEAN,
        1001,  # the worker leaves
        1002,  # a violation of the WebSocket protocol, closed by the protocol class, like the next three
        1003,
        1007,
        1009,
        CLOSE_RESTART,
    }
)
_CLOSE_SECONDS = 1.0


class ConnectionClosed(Exception):
    """The socket has closed. ``orderly`` if one of the sides closed it on purpose."""

    def __init__(self, code: int) -> None:
        super().__init__(f"closed with {code}")
        self.code = code
        self.orderly = code in _ORDERLY


class WebSocketChannel:
    """Sends and receives. One task may receive; several may send, one at a time."""

    def __init__(self, websocket: WebSocket, send_seconds: float) -> None:
        """Break the socket if a send takes longer than ``send_seconds``, including the wait for other sends."""
        self._websocket = websocket
        self._seconds = send_seconds
        self._turn = asyncio.Lock()
        self._lost = asyncio.Event()
        self._code = CLOSE_BROKEN

    async def receive(self) -> str | bytes:
        """Return the next message, a binary one as bytes. Raises `ConnectionClosed`."""
        try:
            message = await self._websocket.receive()
        except (WebSocketDisconnect, RuntimeError):
            raise self._closed(CLOSE_BROKEN) from None
        if message["type"] == "websocket.disconnect":
            raise self._closed(message.get("code") or CLOSE_BROKEN)
        text: str | bytes | None = message.get("text")
        return message["bytes"] if text is None else text

    async def send(self, *texts: str) -> None:
        """Send messages together; wait while the peer reads slowly. Raises `ConnectionClosed`; the rest is not sent."""
        try:
            async with asyncio.timeout(self._seconds), self._turn:
                for text in texts:
                    await self._websocket.send_text(text)
        except TimeoutError:
            self.abort()
            raise self._closed(CLOSE_BROKEN) from None
        # A send on a socket that is closed raises RuntimeError.
        except (WebSocketDisconnect, RuntimeError):
            raise self._closed(CLOSE_BROKEN) from None

    async def lost(self) -> ConnectionClosed:
        """Wait until a send or a receive has found the socket closed; return the error."""
        await self._lost.wait()
        return ConnectionClosed(self._code)

    async def close(self, code: int, reason: str) -> None:
        """Close with a code and a reason; abort if the peer does not read. Never raises."""
        with contextlib.suppress(WebSocketDisconnect, RuntimeError, TimeoutError):
            async with asyncio.timeout(_CLOSE_SECONDS), self._turn:
                await self._websocket.close(code, reason)
                return
        self.abort()

    def abort(self) -> None:
        """Break the connection if our protocol class serves it; otherwise it breaks when the application returns."""
        extension: dict[str, Callable[[], Any]] = self._websocket.scope.get("extensions", {}).get(
            ABORT, {}
        )
        if abort := extension.get("abort"):
            abort()

    def _closed(self, code: int) -> ConnectionClosed:
        if not self._lost.is_set():
            self._code = code
            self._lost.set()
        return ConnectionClosed(code)
