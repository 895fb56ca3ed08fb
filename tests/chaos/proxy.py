"""FaultProxy: one network link that can be broken in every way a network breaks, while it runs."""

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
    """One direction of every connection of the link. Its faults act on what passes from now on."""

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
        """Return the chunk with each byte's lowest bits turned at the rate of flips."""
        if not self.flips:
            return chunk
        return bytes(
            byte ^ (1 << self.chance.randrange(8)) if self.chance.random() < self.flips else byte
            for byte in chunk
        )


class _Connection:
    """One client and its connection to the target: two pumps, which end together."""

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
        """Tear both halves down with RST: what is in flight is gone."""
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
            # A latency holds up what follows as well, so bytes keep their order. While the way is
            # blocked nothing more is read: what the peers send fills the kernel's buffers, and
            # comes through when the way opens, as TCP would send it again.
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
                    await asyncio.sleep(0)  # a segment of its own
            self.proxy.passed += len(chunk)
        if writer.can_write_eof():
            writer.write_eof()
        else:  # TLS cannot end one direction alone
            writer.close()

    def _lost(self, chunk: bytes, way: _Way) -> bool:
        """Whether a reply is to vanish. Requests arm the connection, so that only their replies count."""
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
    """Forwards TCP from a port of its own to ``target``, which is asked for anew with each connection.

    Lives in the running event loop, with a bounded buffer per direction. Faults are set at run time,
    add up, and last until `heal`; ``up`` is what clients send, ``down`` what the target answers.
    """

    def __init__(
        self,
        target: Address | Callable[[], Address],
        *,
        seed: int = 0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Do no input or output yet. ``seed`` decides which bits flip. With ``tls`` clients speak TLS."""
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
        """how many more replies will be lost"""
        self.after = b""
        self.silently = False
        self.refusing = False
        self._stopped = False
        self.lost = 0
        """replies lost so far"""
        self.passed = 0
        """bytes forwarded so far"""
        self.opened = 0
        """connections accepted so far"""

    # Where it is

    @property
    def address(self) -> Address:
        """Where clients connect."""
        return "127.0.0.1", self._port

    @property
    def connections(self) -> int:
        """How many are open."""
        return len(self._connections)

    async def start(self) -> Self:
        """Listen; on the same port as before, if it was stopped."""
        self._stopped = False
        self._server = await asyncio.start_server(
            self._connected, "127.0.0.1", self._port, limit=_CHUNK, ssl=self._tls
        )
        self._port = self._server.sockets[0].getsockname()[1]
        return self

    async def aclose(self) -> None:
        """Close the port and every connection."""
        self._stopped = True
        if self._server is not None:
            self._server.close()
        self.cut()
        accepted = dict(self._accepted)
        for task in [*self._connections.values(), *accepted]:
            task.cancel()
        await asyncio.gather(*accepted, return_exceptions=True)
        for writer in accepted.values():
            writer.transport.abort()  # of one that was cancelled before it began
        if self._server is not None:
            await self._server.wait_closed()
            self._server = None
        await asyncio.sleep(0)  # for one that is being let in

    # Faults

    def cut(self) -> int:
        """Reset every open connection; return how many there were. New ones are let in."""
        for connection in self._connections:
            connection.reset()
        return len(self._connections)

    def refuse(self) -> None:
        """Reset every new connection at once; open ones stay."""
        self.refusing = True

    def block(self, *, up: bool = True, down: bool = True) -> None:
        """Let nothing through, in one direction or both, and keep all sockets open: a partition, or a half-open link.

        New connections are accepted by this machine's kernel and lead nowhere, just as slowly. What was sent
        meanwhile comes through after `heal`, unless the connection has been cut or given up.
        """
        for way, blocked in ((self.up, up), (self.down, down)):
            if blocked:
                way.open.clear()

    def lose_replies(self, count: int, *, after: bytes = b"", silently: bool = False) -> None:
        """Deliver the next requests and lose what is answered, ``count`` times.

        Only connections that have sent a request containing ``after`` since then lose their next
        reply. With ``silently`` the connection stays open and never answers again; otherwise it is
        reset.
        """
        self.losing, self.after, self.silently = count, after, silently

    def delay(self, seconds: float) -> None:
        """Make each round trip so much longer, half of it in either direction."""
        self.up.latency = self.down.latency = seconds / 2

    def throttle(self, rate: float) -> None:
        """Forward so many bytes per second, in each direction of each connection."""
        self.up.rate = self.down.rate = rate

    def slice(self, size: int) -> None:
        """Forward in segments of ``size`` bytes."""
        self.up.slice = self.down.slice = size

    def flip(self, probability: float, *, up: bool = False, down: bool = True) -> None:
        """Turn one bit of a byte with this probability."""
        self.up.flips = probability if up else 0.0
        self.down.flips = probability if down else 0.0

    def heal(self) -> None:
        """End every fault."""
        self.losing, self.after, self.silently, self.refusing = 0, b"", False, False
        self.up.heal()
        self.down.heal()

    # Connections

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._stopped:  # it was let in at the very last
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
