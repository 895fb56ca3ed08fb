"""Connections whose client has not authenticated: limits on their number, duration, input and share of the event loop.

A connection is unauthenticated from the moment when it is accepted, so the limits include the TLS handshake, the head
of a request, and everything that a client sends before it has shown a valid token.
"""

from __future__ import annotations

import abc
import asyncio
import ipaddress
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable

SECONDS = 10.0
"""seconds within which a client must authenticate; then its connection is closed"""
INPUT_BYTES = 64 * 1024
"""maximum number of bytes that a client may send before it authenticates"""
DROPPED_BYTES = 1024 * 1024
"""maximum number of bytes, including `INPUT_BYTES`, that are read and dropped after a response"""
BODY_BYTES = 32 * 1024
"""maximum number of bytes of a request body before the client authenticates"""
RECEIVE_BYTES = 2048
"""maximum number of bytes that are received at once from a client that has not authenticated"""
WRITE_BYTES = 16 * 1024
"""maximum number of bytes of a response that are buffered for a client that has not authenticated"""
TURN_BYTES = 16 * 1024
"""maximum number of bytes of such input that are handled in one turn of the event loop"""
_FAIR_SECONDS = 1.0
"""seconds that a client needs to authenticate at most, unless it waits on purpose"""
_TURN_SECONDS = 0.0005
"""after this time, a turn handles no further piece of input, so that it takes less than a millisecond"""
_log = logging.getLogger("taskqueue.server.connections")


class Turns:
    """Handles pieces of input of many connections, a limited amount in each turn of the event loop."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], int]] = deque()
        self._scheduled = False

    def add(self, handle: Callable[[], int]) -> None:
        """Call ``handle`` in a later turn. It handles one piece and returns the number of bytes."""
        self._waiting.append(handle)
        self._schedule()

    def _schedule(self) -> None:
        if self._waiting and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        self._scheduled = False
        until, size = time.perf_counter() + _TURN_SECONDS, 0
        try:
            # A piece has at most `RECEIVE_BYTES`, or is what `TlsProtocol` receives at once.
            while self._waiting and size < TURN_BYTES and time.perf_counter() < until:
                size += self._waiting.popleft()()
        finally:
            self._schedule()


class UnauthenticatedConnections:
    """The unauthenticated connections of one server process, at most ``in_all``, and ``per_address`` of one address.

    An IPv6 address counts as its network of 64 bits, all of which one host may use. A connection of one of ``proxies``
    counts for the client that the proxy names.
    """

    def __init__(
        self, in_all: int = 512, per_address: int = 128, proxies: Iterable[str] = ()
    ) -> None:
        self.turns = Turns()
        """turns for the input of unauthenticated connections"""
        self.other_turns = Turns()
        """turns for the input of authenticated connections, which do not wait for the others"""
        self._in_all = in_all
        self._per_address = per_address
        self._proxies = tuple(ipaddress.ip_network(proxy, strict=False) for proxy in proxies)
        self._by_address: dict[str, dict[ConnectionLimits, None]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def largest(self) -> int:
        """Return the largest number of connections that count for one address."""
        return max(map(len, self._by_address.values()), default=0)

    def enter(self, transport: asyncio.Transport, *, encrypted: bool = False) -> ConnectionLimits:
        """Return the limits of an accepted connection, which is closed at once if there is no room for it."""
        peer = transport.get_extra_info("peername")
        address = _parsed(str(peer[0])) if isinstance(peer, tuple) else None
        proxied = address is not None and any(address in proxy for proxy in self._proxies)
        limits = ConnectionLimits(
            self, transport, _group(address), encrypted=encrypted, proxied=proxied
        )
        limits.start()
        if proxied:
            self._add(limits, self._in_all)
        else:
            self._add(limits, self._per_address)
        return limits

    def move(self, limits: ConnectionLimits, host: str) -> None:
        """Count a proxy's connection for the client with the address ``host``."""
        self.remove(limits)
        limits.address = _group(_parsed(host))
        self._add(limits, self._per_address)

    def _add(self, limits: ConnectionLimits, most: int) -> None:
        """Add a connection. If there is no room, the oldest one of the address with the most connections is closed.

        But if that address has no more connections than the new one's, the new one is closed, unless the other has had
        enough time to authenticate: else clients that connect all at once would close each other's connections.
        """
        members = self._by_address.get(limits.address, {})
        full = None
        if len(members) >= most:
            full = members
        elif self._count >= self._in_all:
            full = max(self._by_address.values(), key=len)
        if full is not None:
            closed = next(iter(full))
            if len(full) <= len(members) + 1 and limits.since - closed.since < _FAIR_SECONDS:
                closed = limits
            _log.warning(
                "connection closed: too many unauthenticated connections",
                extra={"peer": closed.address},
            )
            closed.abort()
            if closed is limits:
                return
        self._by_address.setdefault(limits.address, {})[limits] = None
        self._count += 1

    def remove(self, limits: ConnectionLimits) -> None:
        """Forget a connection that has ended or authenticated. Idempotent."""
        members = self._by_address.get(limits.address, {})
        if limits in members:
            del members[limits]
            self._count -= 1
            if not members:
                del self._by_address[limits.address]

    def close(self) -> None:
        """Close all connections."""
        for members in tuple(self._by_address.values()):
            for limits in tuple(members):
                limits.abort()


class ConnectionLimits:
    """The limits of one connection until its client has authenticated."""

    authenticated = False

    def __init__(
        self,
        connections: UnauthenticatedConnections,
        transport: asyncio.Transport,
        address: str,
        *,
        encrypted: bool,
        proxied: bool,
    ) -> None:
        """Create limits. If the connection is ``encrypted``, ``transport`` is the one below TLS."""
        self.address = address
        """address for which the connection counts"""
        self.encrypted = encrypted
        self.connections = connections
        self.since = asyncio.get_running_loop().time()
        self._proxied = proxied
        self._transport = transport
        self._buffered: asyncio.Transport | None = None
        self._bytes_left = INPUT_BYTES
        self._timeout: asyncio.TimerHandle | None = None

    @property
    def turns(self) -> Turns:
        """The turns in which input of the connection is handled."""
        return self.connections.other_turns if self.authenticated else self.connections.turns

    def start(self) -> None:
        """Start the time within which the client must authenticate."""
        self._timeout = asyncio.get_running_loop().call_later(SECONDS, self.abort)

    def limit_buffers(self, transport: asyncio.Transport) -> None:
        """Limit the buffers of ``transport``, on which requests and responses are transferred."""
        self._buffered = transport
        transport.set_write_buffer_limits(high=WRITE_BYTES)
        if self.encrypted:
            transport.set_read_buffer_limits(high=1, low=0)  # type: ignore[attr-defined]
        else:
            transport.max_size = RECEIVE_BYTES  # type: ignore[attr-defined]

    def count(self, size: int) -> bool:
        """Count received bytes. Close the connection and return false if its client has sent too many."""
        self._bytes_left -= size
        if self.authenticated or self._bytes_left >= 0:
            return True
        self.abort()
        return False

    def drop_input(self) -> None:
        """Allow more input, which the server drops because it has responded."""
        self._bytes_left += DROPPED_BYTES - INPUT_BYTES

    def extension(self) -> dict[object, object]:
        """Return the functions of the connection that an application may call."""
        return {"authenticate": self.authenticate, "count_for": self.count_for}

    def count_for(self, host: str) -> None:
        """Count the connection for the address of the client that a trusted proxy has named."""
        if self._proxied and not self.authenticated:
            self.connections.move(self, host)

    def authenticate(self) -> None:
        """Lift all limits. Idempotent."""
        if self.authenticated or self._timeout is None:
            return
        buffered = self._buffered
        self.leave()
        self.authenticated = True
        if buffered is not None:
            buffered.set_write_buffer_limits()
            if self.encrypted:
                buffered.set_read_buffer_limits()  # type: ignore[attr-defined]
            else:
                del buffered.max_size  # type: ignore[attr-defined]

    def leave(self) -> None:
        """Stop the timeout and the counting: the connection has ended, or its client has authenticated. Idempotent."""
        if self._timeout is not None:
            self._timeout.cancel()
        self._buffered = None  # it may refer to the protocol; see `HttpProtocol.connection_lost`
        self.connections.remove(self)

    def abort(self) -> None:
        """Close the connection at once."""
        self.leave()
        self._transport.abort()


class PiecewiseProtocol(asyncio.Protocol, abc.ABC):
    """Mixin for a protocol whose input is handled in pieces, in turns with the input of other connections.

    A chunk of input may contain thousands of frames or parts of a body. If it were parsed at once, a peer that sends at
    full speed would occupy the event loop for seconds. Reading is paused until the chunk has been parsed.
    """

    limits: ConnectionLimits
    transport: asyncio.Transport
    _unread = b""
    """the chunk that is being parsed; until all of it is parsed, reading from the transport is paused"""
    _read_bytes = 0
    """number of bytes of the chunk that have been parsed"""
    _piece_scheduled = False

    def data_received(self, data: bytes) -> None:
        """Parse the first piece of the data if the client has authenticated; keep the rest for later turns.

        After the server has closed the connection, the parser would answer input with an error: it is discarded.
        """
        if self.transport.is_closing():
            return
        known = self.limits.authenticated
        if not known and not self.limits.encrypted and not self.limits.count(len(data)):
            return
        if known and not self._unread and len(data) <= self.piece_bytes():
            self.handle_piece(data)
            return
        self._unread, self._read_bytes = self._unread[self._read_bytes :] + data, 0
        if known and not self._piece_scheduled:
            self._handle_next()
        else:
            self.schedule_piece()

    @abc.abstractmethod
    def piece_bytes(self) -> int:
        """Return the maximum number of bytes to parse at once."""

    def handle_piece(self, piece: bytes) -> None:
        """Parse some bytes."""
        super().data_received(piece)

    def ready_for_piece(self) -> bool:
        """Return whether the next piece may be parsed."""
        return True

    def starts_task(self) -> bool:
        """Return whether the last piece has started or woken a task, which will use the rest of a turn."""
        return False

    def is_cheap(self) -> bool:
        """Return whether the next piece takes so little time that it may be parsed in the same turn."""
        return False

    @abc.abstractmethod
    def reading_paused(self) -> bool:
        """Return whether reading must stay paused after all input has been parsed."""

    def connection_lost(self, exc: Exception | None) -> None:
        """Discard the data that was not parsed."""
        self._unread = b""
        if not self.limits.encrypted:
            self.limits.leave()
        super().connection_lost(exc)

    def schedule_piece(self) -> None:
        """Parse the next piece in a later turn, if there is one."""
        if not self._unread:
            return
        self.transport.pause_reading()
        if not self._piece_scheduled and self.ready_for_piece():
            self._piece_scheduled = True
            self.limits.turns.add(self._handle_next)

    def _handle_next(self) -> int:
        self._piece_scheduled = False
        size = 0
        while self._unread and not self.transport.is_closing():
            size += self._handle_piece()
            if self.starts_task():
                size = max(size, TURN_BYTES)
                break
            if not self.is_cheap():
                break
        if self.transport.is_closing():
            self._unread = b""
        elif self._unread:
            self.schedule_piece()
        elif not self.reading_paused():
            self.transport.resume_reading()
        return size

    def _handle_piece(self) -> int:
        piece = self._unread[self._read_bytes : self._read_bytes + self.piece_bytes()]
        self._read_bytes += len(piece)
        if self._read_bytes == len(self._unread):
            self._unread, self._read_bytes = b"", 0
        if piece:
            self.handle_piece(piece)
        return len(piece)


def _parsed(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _group(address: ipaddress.IPv4Address | ipaddress.IPv6Address | None) -> str:
    if isinstance(address, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((address, 64), strict=False))
    return "" if address is None else str(address)
