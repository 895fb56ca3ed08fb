"""Sockets share the event loop: of what one has sent only a piece is read before the others have their turn."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import Iterable

from uvicorn._types import ASGIReceiveEvent, ASGISendEvent

from taskqueue_server.context.connections import MAX_CONNECTIONS
from taskqueue_server.worker_socket.pings import PingingProtocol

_PIECE = 4096
"""bytes read at once: some hundred of the smallest frames, which take a few milliseconds"""


class SharingProtocol(PingingProtocol):
    """Reads large chunks piece by piece, the next when all messages of the last were received.

    A chunk may hold thousands of frames. Read in one go, a peer that sends at full speed would have the loop to
    itself for seconds, and its messages would take many times the chunk's memory.
    """

    _rest = b""
    """of the chunk that was read last; while there is some, nothing more is read from the transport"""
    _read = 0
    """how much of it was read"""
    _turn: asyncio.Handle | None = None

    def data_received(self, data: bytes) -> None:
        """Read a piece, and leave the rest for later."""
        if not self._rest and len(data) <= _PIECE:
            super().data_received(data)
            return
        self._rest, self._read = self._rest[self._read :] + data, 0
        self._take_turn()

    async def receive(self) -> ASGIReceiveEvent:
        """Return the next event; where it was the last of a piece, the next piece is read soon."""
        event = await super().receive()
        if self._rest:
            self._go_on()
        return event

    async def send(self, message: ASGISendEvent) -> None:
        """Send; after a close nobody receives any more, yet the peer's own is read."""
        await super().send(message)
        if self._rest and self.close_sent:
            self._go_on()

    def connection_lost(self, exc: Exception | None) -> None:
        """Pass over what was not read."""
        if self._turn is not None:
            self._turn.cancel()
        self._rest = b""
        super().connection_lost(exc)

    def _go_on(self) -> None:
        self.transport.pause_reading()
        if self._turn is None and (self.queue.empty() or self.close_sent):
            self._turn = self.loop.call_soon(self._take_turn)

    def _take_turn(self) -> None:
        self._turn = None
        piece = self._rest[self._read : self._read + _PIECE]
        self._read += len(piece)
        if self._read == len(self._rest):
            self._rest, self._read = b"", 0
        super().data_received(piece)
        if self.transport.is_closing():
            self._rest = b""
        elif self._rest:
            self._go_on()
        elif not self.read_paused:
            self.transport.resume_reading()


AT_ONCE = 10
"""connections that are accepted in one turn of the loop, and tries where there are no descriptors: asyncio goes on
trying, and logs each try, as often as the backlog that it was told"""
_WAITING = 2048
"""connections that the kernel keeps until it is their turn"""
_DESCRIPTORS = MAX_CONNECTIONS + 2000


def let_wait(listeners: Iterable[socket.socket]) -> None:
    """Let many wait at listeners that were told the backlog `AT_ONCE`."""
    for listener in listeners:
        listener.listen(_WAITING)


def have_room() -> None:
    """Let this process have as many descriptors as it may serve sockets, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
