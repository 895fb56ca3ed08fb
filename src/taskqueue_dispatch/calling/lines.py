"""Connections to servers: HTTP/1.1 with bounds on all that is read, and as little work as there can be for each call.

A pool as those of HTTP clients looks at all of its connections for each request. Here a call takes the connection of
its server that was used last, and looks at none else.
"""

from __future__ import annotations

import asyncio
import select
import socket
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import h11

from taskqueue_dispatch.calling.reading import Reply

__all__ = ["Lines", "NotReachedError", "NotUsableError", "NotWholeError", "Place"]

_CONNECT = 5.0
_IDLE = 2.0
"""seconds; less than a server keeps idle connections (uvicorn: 5), so that few calls meet one that is closing"""
_UNANSWERED = 60.0
"""seconds after which a connection ends whose other side's machine is gone, or cut off"""
_HEAD = 64 * 1024
_AHEAD = 256 * 1024
"""what is taken from the network before somebody reads it"""
_ANY = 18
"""digits that a length may have"""


class NotReachedError(Exception):
    """Nothing was sent. Its text says why, and shows no address."""


class NotUsableError(Exception):
    """The answer is not read to its end. Its text says why, and shows none of it."""


class NotWholeError(Exception):
    """The server may have got the request, and there is no whole answer. Its text is as that of the others."""


class Place(NamedTuple):
    """Where a server is."""

    host: str
    port: int
    secure: bool
    authority: str
    """as the server is told it"""


class _Line(asyncio.Protocol):
    """One connection."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport
        self.h11 = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEAD)
        self.idle_since: float | None = None
        self._parts: deque[bytes] = deque()
        self._size = 0
        self._wake: asyncio.Future[None] | None = None
        self._over = False
        self._error: Exception | None = None

    @property
    def open(self) -> bool:
        return not self._over and not self.transport.is_closing()

    @property
    def quiet(self) -> bool:
        """Whether nothing has come since the last answer: not even the end, which the loop may not know of yet."""
        if not self.open:
            return False
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), select.POLLIN)
        return not poll.poll(0)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - a TCP connection has no other
        self.transport = transport
        for level, name, value in _watched():
            transport.get_extra_info("socket").setsockopt(level, name, value)

    def data_received(self, data: bytes) -> None:
        if (
            self.idle_since is not None
        ):  # nobody has asked: it must not be taken for the next answer
            self.transport.abort()
            return
        self._parts.append(data)
        self._size += len(data)
        if self._size > _AHEAD:
            self.transport.pause_reading()
        self._woken()

    def eof_received(self) -> bool:
        self._over = True
        self._woken()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._over, self._error = True, exc
        self._woken()

    def _woken(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def read(self) -> bytes:
        """Return what has come, nothing at the end. Raises `NotWholeError` where the connection broke."""
        while not self._parts and not self._over:
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        if self._parts:
            part = self._parts.popleft()
            self._size -= len(part)
            self.transport.resume_reading()
            return part
        if self._error is not None:
            raise NotWholeError(f"the connection broke ({type(self._error).__name__})")
        return b""


class Lines:
    """Connections that are kept for the next call to the same server. One event loop."""

    def __init__(self, secured: Callable[[], ssl.SSLContext]) -> None:
        """Do no input or output. ``secured`` is called once, for the first server with TLS."""
        self._secured = secured
        self._tls: ssl.SSLContext | None = None
        self._idle: dict[Place, list[_Line]] = {}
        self._sweeping: asyncio.TimerHandle | None = None

    async def call(self, place: Place, request: h11.Request, content: bytes, limit: int) -> Reply:
        """Send a request, and return the whole answer, of ``limit`` bytes at most. It takes its time: bound it.

        Raises `NotReachedError`, `NotWholeError` or `NotUsableError`.
        """
        line = self._kept(place) or await self._connected(place)
        good = False
        try:
            line.transport.write(_told(line.h11, request, content))
            reply = await _answer(line, limit)
            good = line.h11.states == {h11.CLIENT: h11.DONE, h11.SERVER: h11.DONE}
            good = good and not line.h11.trailing_data[0] and line.open
        finally:
            if good:
                self._keep(place, line)
            else:
                line.transport.abort()
        return reply

    def close(self) -> None:
        """Close what is idle; calls that are under way go on. A later call opens new ones."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._sweeping = None
        for lines in self._idle.values():
            for line in lines:
                line.transport.abort()
        self._idle.clear()

    def _kept(self, place: Place) -> _Line | None:
        lines = self._idle.get(place, [])
        while lines:
            line = lines.pop()
            if line.quiet:
                line.idle_since = None
                return line
            line.transport.abort()
        return None

    async def _connected(self, place: Place) -> _Line:
        loop = asyncio.get_running_loop()
        try:
            tls = self._context() if place.secure else None
            async with asyncio.timeout(_CONNECT):
                _, line = await loop.create_connection(
                    _Line,
                    place.host,
                    place.port,
                    ssl=tls,
                    server_hostname=place.host if place.secure else None,
                )
        except (OSError, UnicodeError, OverflowError) as error:  # with a host's name that is none
            raise NotReachedError(f"no connection ({type(error).__name__})") from None
        return line

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = self._secured()
        return self._tls

    def _keep(self, place: Place, line: _Line) -> None:
        loop = asyncio.get_running_loop()
        line.h11.start_next_cycle()
        line.idle_since = loop.time()
        self._idle.setdefault(place, []).append(line)
        if self._sweeping is None:
            self._sweeping = loop.call_later(_IDLE, self._sweep)

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        old = loop.time() - _IDLE
        for place, lines in tuple(self._idle.items()):
            kept = []
            for line in lines:
                if line.open and line.idle_since is not None and line.idle_since > old:
                    kept.append(line)
                else:
                    line.transport.abort()
            if kept:
                self._idle[place] = kept
            else:
                del self._idle[place]
        self._sweeping = loop.call_later(_IDLE / 2, self._sweep) if self._idle else None


def _told(state: h11.Connection, request: h11.Request, content: bytes) -> bytes:
    """Return a whole request: in one piece it is one packet, mostly, and one turn of the server's."""
    parts = [state.send(request), state.send(h11.Data(content)) if content else b""]
    return b"".join(part or b"" for part in (*parts, state.send(h11.EndOfMessage())))


async def _answer(line: _Line, limit: int) -> Reply:
    parts: list[bytes] = []
    size, status, retry_after = 0, 0, None
    while True:
        try:
            event = line.h11.next_event()
        except h11.RemoteProtocolError:
            raise NotWholeError("it ended early, or is no HTTP") from None
        if event is h11.NEED_DATA:
            line.h11.receive_data(await line.read())
        elif isinstance(event, h11.Response):
            status, headers = event.status_code, dict(event.headers)
            _check(status, headers, limit)
            told = headers.get(b"retry-after")
            retry_after = None if told is None else told.decode("latin-1")
        elif isinstance(event, h11.Data):
            size += len(event.data)
            if size > limit:
                raise NotUsableError(_too_long(status, limit))
            parts.append(bytes(event.data))
        elif isinstance(event, h11.EndOfMessage):
            return Reply(status, b"".join(parts), retry_after)
        elif not isinstance(event, h11.InformationalResponse):
            raise NotWholeError("the connection ended without an answer")


def _check(status: int, headers: dict[bytes, bytes], limit: int) -> None:
    told = headers.get(b"content-length", b"")
    if len(told) > _ANY or (told.isdigit() and int(told) > limit):
        raise NotUsableError(_too_long(status, limit))
    if headers.get(b"content-encoding", b"identity").strip().lower() != b"identity":
        raise NotUsableError(f"HTTP {status}: compressed, though none was asked for")


def _too_long(status: int, limit: int) -> str:
    return f"HTTP {status}: the answer is longer than the answer_limit of {limit} bytes"


def _watched() -> Sequence[tuple[int, int, int]]:
    tcp = {
        "TCP_KEEPIDLE": 15,
        "TCP_KEEPINTVL": 5,
        "TCP_KEEPCNT": 3,
        "TCP_USER_TIMEOUT": int(_UNANSWERED * 1000),
    }
    known = [(getattr(socket, name), value) for name, value in tcp.items() if hasattr(socket, name)]
    return [
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        *((socket.IPPROTO_TCP, name, value) for name, value in known),
    ]
