"""A channel on an accepted WebSocket, with a time limit for sends and `ConnectionClosed` as its only error."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, NoReturn

from starlette.websockets import WebSocket, WebSocketDisconnect

from taskqueue_core.protocol.frames import CLOSE_CLEAN, CLOSE_RESTART

ABORT = "taskqueue.abort"
"""name of the ASGI scope extension in which `SocketProtocol` offers ``{"abort": callable}``"""

CLOSE_BROKEN = 1006
"""close code of a connection that broke without a close frame"""
_ORDERLY = frozenset(
    {
        CLOSE_CLEAN,
        1001,  # the worker's process is ending
        1002,  # invalid data: the protocol class closes the WebSocket with this code or one of the next three
        1003,
        1007,
        1009,
        CLOSE_RESTART,
    }
)
_CLOSE_SECONDS = 1.0


class ConnectionClosed(Exception):
    """An error for a closed socket. ``orderly`` is true if one of the sides closed the socket on purpose."""

    def __init__(self, code: int) -> None:
        super().__init__(f"closed with {code}")
        self.code = code
        self.orderly = code in _ORDERLY


class WebSocketChannel:
    """Sends and receives messages. Only one asyncio task may receive; any number may send."""

    def __init__(self, websocket: WebSocket, send_seconds: float) -> None:
        """Create a channel that calls `abort` if a send and its wait for other sends exceed ``send_seconds``."""
        self._websocket = websocket
        self._seconds = send_seconds
        self._turn = asyncio.Lock()
        self._lost = asyncio.Event()
        self._code = CLOSE_BROKEN

    async def receive(self) -> str | bytes:
        """Return the next message: ``str`` for text, ``bytes`` for a binary message. Raises `ConnectionClosed`."""
        try:
            message = await self._websocket.receive()
        except (WebSocketDisconnect, RuntimeError):
            raise self._closed(CLOSE_BROKEN) from None
        if message["type"] == "websocket.disconnect":
            raise self._closed(message.get("code") or CLOSE_BROKEN)
        text: str | bytes | None = message.get("text")
        return message["bytes"] if text is None else text

    async def send(self, *texts: str) -> None:
        """Send the texts as consecutive messages; wait if the peer reads slowly. Raises `ConnectionClosed`."""
        try:
            async with asyncio.timeout(self._seconds), self._turn:
                for text in texts:
                    await self._websocket.send_text(text)
        except TimeoutError:
            self.abort()
            raise self._closed(CLOSE_BROKEN) from None
        # Starlette raises RuntimeError for a send on a closed WebSocket.
        except (WebSocketDisconnect, RuntimeError):
            raise self._closed(CLOSE_BROKEN) from None

    async def lost(self) -> NoReturn:
        """Wait until a send or a receive has found the socket closed, then raise `ConnectionClosed`."""
        await self._lost.wait()
        raise ConnectionClosed(self._code)

    async def close(self, code: int, reason: str) -> None:
        """Close the socket with a code and a reason; abort it if the peer does not read. Never raises."""
        with contextlib.suppress(WebSocketDisconnect, RuntimeError, TimeoutError):
            async with asyncio.timeout(_CLOSE_SECONDS), self._turn:
                await self._websocket.close(code, reason)
                return
        self.abort()

    def abort(self) -> None:
        """Break the connection at once. If the protocol class is not `SocketProtocol`, do nothing."""
        extensions: dict[str, dict[str, Callable[[], Any]]] = self._websocket.scope.get(
            "extensions", {}
        )
        if ABORT in extensions:
            extensions[ABORT]["abort"]()

    def _closed(self, code: int) -> ConnectionClosed:
        if not self._lost.is_set():
            self._code = code
            self._lost.set()
        return ConnectionClosed(code)
