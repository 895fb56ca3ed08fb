"""A TCP proxy that stands for one network link and simulates network faults at run time."""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
import struct
from collections.abc import Callable
from typing import Self

Address = tuple[str, int]
_CHUNK = 64 * 1024
_RESET = struct.pack("ii", 1, 0)


class _Way:
    """One direction of all connections of a link. Faults apply to data forwarded from now on."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.open = asyncio.Event()
        self.heal()

    def heal(self) -> None:
        self.open.set()
        self.latency = 0.0
        self.rate = 0.0
        self.slice = 0
        self.flips = 0.0

    def damaged(self, chunk: bytes) -> bytes:
        """Return the data with a random bit flipped in each byte, with probability ``flips`` per byte."""
        if not self.flips:
            return chunk
        return bytes(
            byte ^ (1 << self.chance.randrange(8)) if self.chance.random() < self.flips else byte
            for byte in chunk
        )


class _Connection:
    """One client connection and its connection to the target. The two forwarding tasks end together."""

    def __init__(
        self, proxy: FaultProxy, client: asyncio.StreamWriter, target: asyncio.StreamWriter
    ) -> None:
        self.proxy = proxy
        self.client = client
        self.target = target
        self.armed = False
        self.silenced = False

    async def run(self, ups: asyncio.StreamReader, downs: asyncio.StreamReader) -> None:
        pumps = [
            asyncio.ensure_future(self._pump(ups, self.target, self.proxy.up)),
            asyncio.ensure_future(self._pump(downs, self.client, self.proxy.down)),
        ]
        try:
            await asyncio.gather(*pumps)
        except (OSError, asyncio.IncompleteReadError):
            self.reset()
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            for writer in (self.client, self.target):
                writer.close()

    def reset(self) -> None:
        """Reset both connections with RST, so that data in transit is lost."""
        for writer in (self.client, self.target):
            end = writer.get_extra_info("socket")
            if end is not None and end.fileno() >= 0:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: _Way
    ) -> None:
        while chunk := await reader.read(_CHUNK):
            if self._lost(chunk, way):
                continue
            # The delay also holds up the data behind it, so bytes stay in order. While the direction is blocked,
            # nothing more is read: the data collects in the kernel's buffers and arrives when the direction opens, as
            # if TCP had retransmitted it.
            if way.latency or way.rate:
                pace = len(chunk) / way.rate if way.rate else 0.0
                await asyncio.sleep(way.latency + pace)
            await way.open.wait()
            chunk = way.damaged(chunk)
            size = way.slice or len(chunk)
            for start in range(0, len(chunk), size):
                writer.write(chunk[start : start + size])
                await writer.drain()
                if way.slice:
                    await asyncio.sleep(0)  # let the event loop send it as a separate segment
            self.proxy.passed += len(chunk)
        if writer.can_write_eof():
            writer.write_eof()
        else:  # TLS cannot close one direction only
            writer.close()

    def _lost(self, chunk: bytes, way: _Way) -> bool:
        """Return whether to drop this data as a lost reply. Only connections with a matching request lose replies."""
        proxy = self.proxy
        if way is proxy.up:
            self.armed = self.armed or (bool(proxy.losing) and proxy.after in chunk)
            return False
        if self.silenced:
            return True
        if not (self.armed and proxy.losing):
            return False
        self.armed = False
        proxy.losing -= 1
        proxy.lost += 1
        if proxy.silently:
            self.silenced = True
        else:
            self.reset()
        return True


class FaultProxy:
    """TCP proxy from a local port to ``target``, which may be a function that is called for each connection.

    It runs in the current event loop and buffers a bounded amount of data per direction. Faults can be set at any time,
    combine with each other, and last until `heal`. ``up`` is the direction from clients to the target, ``down`` the
    opposite one.
    """

    def __init__(
        self,
        target: Address | Callable[[], Address],
        *,
        seed: int = 0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Prepare the proxy without opening a port. ``seed`` decides which bits flip; with ``tls``, clients use TLS."""
        self._target = target if callable(target) else lambda: target
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._connections: dict[_Connection, asyncio.Task[None]] = {}
        self._accepted: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._port = 0
        chance = random.Random(seed)
        self.up = _Way(chance)
        self.down = _Way(chance)
        self.losing = 0
        """number of replies that are still to be lost"""
        self.after = b""
        self.silently = False
        self.refusing = False
        self._stopped = False
        self.lost = 0
        """number of replies lost so far"""
        self.passed = 0
        """number of bytes forwarded so far"""
        self.opened = 0
        """number of connections accepted so far"""

    @property
    def address(self) -> Address:
        """Address to which clients connect."""
        return "127.0.0.1", self._port

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return len(self._connections)

    async def start(self) -> Self:
        """Start listening; after a stop, on the same port as before."""
        self._stopped = False
        self._server = await asyncio.start_server(
            self._connected, "127.0.0.1", self._port, limit=_CHUNK, ssl=self._tls
        )
        self._port = self._server.sockets[0].getsockname()[1]
        return self

    async def aclose(self) -> None:
        """Close the port and all connections."""
        self._stopped = True
        if self._server is not None:
            self._server.close()
        self.cut()
        accepted = dict(self._accepted)
        for task in [*self._connections.values(), *accepted]:
            task.cancel()
        await asyncio.gather(*accepted, return_exceptions=True)
        for writer in accepted.values():
            writer.transport.abort()  # for tasks that were cancelled before they ran
        if self._server is not None:
            await self._server.wait_closed()
            self._server = None
        await asyncio.sleep(0)  # let asyncio close a connection that it is just accepting

    def cut(self) -> int:
        """Reset all open connections and return their number. New connections are accepted."""
        for connection in self._connections:
            connection.reset()
        return len(self._connections)

    def refuse(self) -> None:
        """Reset every new connection at once; open ones stay."""
        self.refusing = True

    def block(self, *, up: bool = True, down: bool = True) -> None:
        """Block one or both directions but keep all sockets open: a partition, or a half-open link.

        The kernel still accepts new connections, but no data passes on them either. Blocked data arrives after `heal`,
        unless the connection was reset or closed meanwhile.
        """
        for way, blocked in ((self.up, up), (self.down, down)):
            if blocked:
                way.open.clear()

    def lose_replies(self, count: int, *, after: bytes = b"", silently: bool = False) -> None:
        """Deliver the next ``count`` matching requests but lose their replies.

        A request matches if it contains ``after``. With ``silently`` the connection stays open and never answers again;
        otherwise it is reset.
        """
        self.losing, self.after, self.silently = count, after, silently

    def delay(self, seconds: float) -> None:
        """Add this delay to each round trip, half of it in each direction."""
        self.up.latency = self.down.latency = seconds / 2

    def throttle(self, rate: float) -> None:
        """Limit each direction of each connection to ``rate`` bytes per second."""
        self.up.rate = self.down.rate = rate

    def slice(self, size: int) -> None:
        """Forward data in segments of ``size`` bytes."""
        self.up.slice = self.down.slice = size

    def flip(self, probability: float, *, up: bool = False, down: bool = True) -> None:
        """Flip a bit of each forwarded byte with this probability."""
        self.up.flips = probability if up else 0.0
        self.down.flips = probability if down else 0.0

    def heal(self) -> None:
        """End all faults."""
        self.losing, self.after, self.silently, self.refusing = 0, b"", False, False
        self.up.heal()
        self.down.heal()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._stopped:  # accepted just while the proxy was being stopped
            writer.transport.abort()
            return
        task = asyncio.create_task(self._accept(reader, writer))
        self._accepted[task] = writer

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            await self._serve(reader, writer, task)
        finally:
            self._accepted.pop(task, None)
            writer.transport.abort()

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, task: asyncio.Task[None]
    ) -> None:
        self.opened += 1
        if self.refusing:
            _Connection(self, writer, writer).reset()
            return
        await self.up.open.wait()
        await self.down.open.wait()
        try:
            answers, target = await asyncio.open_connection(*self._target(), limit=_CHUNK)
        except OSError:
            _Connection(self, writer, writer).reset()
            return
        for end in (writer, target):
            end.transport.set_write_buffer_limits(_CHUNK)
        connection = _Connection(self, writer, target)
        self._connections[connection] = task
        try:
            await connection.run(reader, answers)
        finally:
            del self._connections[connection]

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
