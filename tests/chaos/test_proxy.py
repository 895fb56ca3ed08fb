"""The fault proxy breaks a link exactly as asked, and in no other way."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import pytest
import pytest_asyncio

from tests.chaos.proxy import FaultProxy

T = TypeVar("T")
QUIET = 0.15
"""seconds without data after which a test assumes that no data will come"""


class Echo:
    """A server that sends each line back and records the lines it received."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []
        self.port = 0
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Start listening on a free port."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while line := await reader.readline():
                self.heard.append(line)
                writer.write(line)
                await writer.drain()
        writer.close()

    async def stop(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()


class Client:
    """One client connection through the proxy."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def ask(self, line: bytes) -> bytes:
        """Send a line and return the answer; empty if the connection was closed normally."""
        self.writer.write(line + b"\n")
        return await self.answer()

    async def answer(self) -> bytes:
        """Wait for a line."""
        async with asyncio.timeout(30):
            return (await self.reader.readline()).rstrip(b"\n")


@pytest_asyncio.fixture
async def echo() -> AsyncIterator[Echo]:
    """Target of the proxy: a running echo server."""
    echo = Echo()
    await echo.start()
    yield echo
    await echo.stop()


@pytest_asyncio.fixture
async def proxy(echo: Echo) -> AsyncIterator[FaultProxy]:
    """A running proxy to the echo server."""
    async with FaultProxy(lambda: ("127.0.0.1", echo.port)) as proxy:
        yield proxy
    assert proxy.connections == 0


Connect = Callable[[], Awaitable[Client]]


@pytest_asyncio.fixture
async def connect(proxy: FaultProxy) -> AsyncIterator[Connect]:
    """Return a function that opens connections, which are closed after the test."""
    writers: list[asyncio.StreamWriter] = []

    async def connect() -> Client:
        client = Client(*await asyncio.open_connection(*proxy.address))
        writers.append(client.writer)
        return client

    yield connect
    for writer in writers:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


@pytest_asyncio.fixture
async def client(connect: Connect) -> Client:
    """A client connection that has been used once."""
    client = await connect()
    assert await client.ask(b"hello") == b"hello"
    return client


async def quiet(answer: Awaitable[T]) -> bool:
    """Return whether no answer comes within `QUIET` seconds."""
    try:
        await asyncio.wait_for(answer, QUIET)
    except TimeoutError:
        return True
    return False


async def test_cut(proxy: FaultProxy, client: Client, connect: Connect) -> None:
    """A cut resets open connections; the next connection works."""
    assert proxy.cut() == 1
    with pytest.raises(ConnectionResetError):
        await client.answer()
    assert await (await connect()).ask(b"again") == b"again"


async def test_a_partition(proxy: FaultProxy, client: Client, echo: Echo) -> None:
    """In a partition no data passes and sockets stay open; after healing, the data arrives."""
    proxy.block()
    assert await quiet(client.ask(b"lost?"))
    assert echo.heard == [b"hello\n"]
    proxy.heal()
    assert await client.answer() == b"lost?"


async def test_half_open(proxy: FaultProxy, client: Client, echo: Echo) -> None:
    """With one direction blocked, the request arrives at the target but its answer does not come back."""
    proxy.block(up=False)
    assert await quiet(client.ask(b"one way"))
    assert echo.heard[-1] == b"one way\n"
    proxy.heal()
    assert await client.answer() == b"one way"


async def test_a_new_connection_in_a_partition(
    proxy: FaultProxy, echo: Echo, connect: Connect
) -> None:
    """A new connection in a partition is accepted, but data passes only after the partition heals."""
    proxy.block()
    client = await connect()
    assert await quiet(client.ask(b"hello"))
    assert not echo.heard
    proxy.heal()
    assert await client.answer() == b"hello"


async def test_lost_replies(
    proxy: FaultProxy, client: Client, echo: Echo, connect: Connect
) -> None:
    """The first two requests are carried out but their replies are lost; the third reply arrives."""
    proxy.lose_replies(2)
    for word in (b"one", b"two"):
        with pytest.raises(ConnectionResetError):
            await client.ask(word)
        client = await connect()
    assert await client.ask(b"three") == b"three"
    assert echo.heard == [b"hello\n", b"one\n", b"two\n", b"three\n"]
    assert (proxy.lost, proxy.losing) == (2, 0)


async def test_the_reply_to_one_kind_of_request(proxy: FaultProxy, client: Client) -> None:
    """With ``after``, only a request that contains the given bytes loses its reply."""
    proxy.lose_replies(1, after=b"publish")
    assert await client.ask(b"ping") == b"ping"
    with pytest.raises(ConnectionResetError):
        await client.ask(b"publish")


async def test_a_reply_lost_in_silence(
    proxy: FaultProxy, client: Client, echo: Echo, connect: Connect
) -> None:
    """With ``silently``, the connection stays open and never answers again; other connections work."""
    proxy.lose_replies(1, silently=True)
    assert await quiet(client.ask(b"one"))
    assert await quiet(client.ask(b"two"))
    assert echo.heard[-2:] == [b"one\n", b"two\n"]
    assert await (await connect()).ask(b"three") == b"three"


async def test_latency(proxy: FaultProxy, client: Client) -> None:
    """A delay makes each round trip longer by that time."""
    proxy.delay(0.1)
    loop = asyncio.get_running_loop()
    start = loop.time()
    assert await client.ask(b"slow") == b"slow"
    assert loop.time() - start >= 0.1


async def test_rate(proxy: FaultProxy, client: Client) -> None:
    """Transferring 20 kB at 100 kB/s takes at least 0.2 s, and the data is complete."""
    proxy.throttle(100_000)
    loop = asyncio.get_running_loop()
    start = loop.time()
    assert await client.ask(b"x" * 20_000) == b"x" * 20_000
    assert loop.time() - start >= 0.2


async def test_slices(proxy: FaultProxy) -> None:
    """Small segments do not change the data."""
    line, pieces, whole = b"in little pieces\n", list[bytes](), asyncio.Event()

    class Pieces(asyncio.Protocol):
        def data_received(self, data: bytes) -> None:
            pieces.append(data)
            if len(b"".join(pieces)) >= len(line):
                whole.set()

    transport, _ = await asyncio.get_running_loop().create_connection(Pieces, *proxy.address)
    proxy.slice(1)
    transport.write(line)
    await asyncio.wait_for(whole.wait(), 30)
    transport.close()
    assert b"".join(pieces) == line
    assert len(pieces) > 1


async def test_bit_flips(proxy: FaultProxy, client: Client, echo: Echo) -> None:
    """Bits of answers are flipped; requests stay intact by default."""
    proxy.flip(1.0)
    client.writer.write(b"intact\n")
    async with asyncio.timeout(30):
        assert len(damaged := await client.reader.readexactly(7)) == 7
    assert all(a != b for a, b in zip(damaged, b"intact\n", strict=True))
    assert echo.heard[-1] == b"intact\n"


async def test_refusing(proxy: FaultProxy, client: Client, connect: Connect) -> None:
    """New connections are reset, open ones continue."""
    proxy.refuse()
    with pytest.raises(ConnectionResetError):
        await (await connect()).ask(b"hello")
    assert await client.ask(b"still here") == b"still here"


async def test_a_target_that_is_away(echo: Echo, connect: Connect) -> None:
    """If the target is down, the client is reset; it is served once the target is back."""
    port = echo.port
    echo.port = 1
    with pytest.raises(ConnectionResetError):
        await (await connect()).ask(b"hello")
    echo.port = port
    assert await (await connect()).ask(b"hello") == b"hello"


async def test_back_pressure(proxy: FaultProxy, connect: Connect) -> None:
    """If a client does not read, its target is held up: the proxy buffers only a bounded amount."""
    sent = 0
    full = asyncio.Event()

    async def flood(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        with contextlib.suppress(OSError):
            while True:
                writer.write(b"x" * 65536)
                if await quiet(writer.drain()):
                    full.set()
                    break
                sent += 65536
        writer.close()

    server = await asyncio.start_server(flood, "127.0.0.1", 0)
    proxy._target = lambda: server.sockets[0].getsockname()[:2]
    client = await connect()
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    async with asyncio.timeout(30):
        await full.wait()
    assert sent < 32 * 1024 * 1024, (
        "the kernel's buffers are a few MB; the proxy must not add to them"
    )
    assert proxy.passed <= sent + 65536
    client.writer.transport.abort()
    server.close()


async def test_an_orderly_end_is_passed_on(client: Client) -> None:
    """A client that closes its sending side still gets its answer."""
    client.writer.write(b"last\n")
    client.writer.write_eof()
    assert await client.answer() == b"last"
    assert await client.answer() == b""
