"""Whether a worker is still there, while it has nothing to answer.

Prefect's handler listens to its socket for a tenth of a second in each second, in which no run is handed over. Here
one task listens for as long as the worker is idle: less work, no gaps, and an end is known at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Protocol

__all__ = ["Line", "Socket"]

_END = "websocket.disconnect"


class Socket(Protocol):
    """What is used of a websocket of Starlette's."""

    def receive(self) -> Awaitable[MutableMapping[str, Any]]:
        """Return the next message. Cancelled, it has taken none."""


class Line:
    """Listens to one worker."""

    def __init__(self, hung_up: Callable[[], None]) -> None:
        """``hung_up`` is called when the worker has gone, if it is listened to."""
        self._hung_up = hung_up
        self._heard: asyncio.Task[MutableMapping[str, Any]] | None = None

    def is_up(self, socket: Socket) -> bool:
        """Listen from now on; return whether the worker is there, so far. What it says unasked is dropped."""
        if self.is_down:
            return False
        if self._heard is None or self._heard.done():
            self._heard = asyncio.ensure_future(socket.receive())
            self._heard.add_done_callback(self._tell)
        return True

    @property
    def is_down(self) -> bool:
        """Whether the worker was heard to go."""
        heard = self._heard
        if heard is None or not heard.done() or heard.cancelled():
            return False
        return heard.exception() is not None or heard.result()["type"] == _END

    def _tell(self, _: object) -> None:
        if self.is_down:
            self._hung_up()

    async def stop(self) -> None:
        """Listen no more, so that the handler hears what the worker answers. That it has gone stays known."""
        if self._heard is None or self.is_down:
            return
        self._heard.cancel()
        await asyncio.wait([self._heard])
        if not self.is_down:
            self._heard = None
