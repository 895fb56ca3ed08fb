"""The server before authentication: what a client without a token can make it hold, read, wait and write."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ssl
import urllib.parse
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from taskqueue_core.protocol.server_session import ServerSession
from taskqueue_server.context.unauthenticated import (
    DROPPED_BYTES,
    INPUT_BYTES,
    SECONDS,
    ConnectionLimits,
    Turns,
)
from taskqueue_server.dashboard import settings_form
from taskqueue_server.process.uvicorn_protocols import (
    HttpProtocol,
    SocketProtocol,
    TlsProtocol,
)
from tests.server.access import ADMIN, A, bearer, everybody, guarded
from tests.server.counting import Counts
from tests.server.rude import CONT, PING, frame
from tests.server.support import Running, eventually, http, receipts
from tests.server.test_access_scopes import EVERYTHING, SOCKETS
from tests.server.tls import Files, make_files

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
SENT = 150_000
"""bytes that a flooding client tries to send"""
FLOODS = 24
"""number of clients that flood at the same time"""
TINY_CHUNKS = b"1\r\nx\r\n" * (SENT // 6)
FRAMES = {
    "an unfinished frame": frame(bytes(1_000_000))[:SENT],
    "messages of one byte": frame(b"x") * (SENT // 7),
    "fragments of one byte": frame(b"x", fin=False) + frame(b"x", CONT, fin=False) * (SENT // 7),
    "pings": frame(b"", PING) * (SENT // 6),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A tokens file."""
    return everybody(tmp_path / "tokens.toml")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Certificates for the server."""
    return make_files(tmp_path_factory.mktemp("tls"))


@pytest.fixture(params=["plain", "tls"])
def tls(request: pytest.FixtureRequest) -> dict[str, Path]:
    """Settings of a server without and with TLS."""
    if request.param == "plain":
        return {}
    files: Files = request.getfixturevalue("files")
    return {"tls_certificate": files.good, "tls_key": files.key}


@contextlib.asynccontextmanager
async def opened(
    it: Running, *, encrypted: bool | None = None, host: str = "127.0.0.1"
) -> AsyncIterator[Streams]:
    """Connect from an address of this machine, with TLS if the server uses it."""
    context = None
    if it.server.url.startswith("https") if encrypted is None else encrypted:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", it.port, ssl=context, local_addr=(host, 0)
    )
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


def head(method: str, path: str, *lines: str) -> bytes:
    """Return the head of a request."""
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", *lines, "", ""]).encode()


def upgrade(path: str) -> bytes:
    """Return the request that opens a WebSocket."""
    return head(
        "GET",
        path,
        "Upgrade: websocket",
        "Connection: Upgrade",
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
        "Sec-WebSocket-Version: 13",
        f"Sec-WebSocket-Protocol: {'taskqueue.v1' if path == '/v1/socket' else 'prefect'}",
    )


def requests() -> Iterator[bytes]:
    """Yield a request with a body of known length and one with tiny chunks, for each route."""
    for one in EVERYTHING:
        kind = f"Content-Type: {one.media_type}"
        target = one.path.replace("{key}", "a").replace("{id}", "x").replace("{name}", "x")
        yield head(one.method, target, kind, f"Content-Length: {SENT}") + b"x" * SENT
        yield head(one.method, target, kind, "Transfer-Encoding: chunked") + TINY_CHUNKS


async def say(streams: Streams, data: bytes) -> None:
    """Send a request; if it opens a WebSocket, what follows it is sent when the server has accepted."""
    reader, writer = streams
    first, _, rest = data.partition(b"\r\n\r\n")
    if b"Upgrade" in first:
        writer.write(first + b"\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101")
        data = rest
    writer.write(data)


async def flood(it: Running, data: bytes, limit: asyncio.Semaphore) -> None:
    """Send as much of the data as the server accepts, and read until the connection ends."""
    async with limit, opened(it) as (reader, writer):
        with contextlib.suppress(OSError):
            await say((reader, writer), data)
            await writer.drain()
            while await reader.read(65536):
                pass


class TestBytes:
    """U26 and fault G11 (A1): bytes held for a connection, and handled in one turn of the event loop."""

    async def test_every_route(
        self, path: Path, tls: dict[str, Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Bodies of 150 kB, whole and in chunks of one byte, to each route: at most 64 kB are held and handled at once.

        After a response, input may be read and dropped, so that the client receives the response.
        """
        async with guarded(path, **tls) as it:
            counts, limit = Counts(monkeypatch), asyncio.Semaphore(FLOODS)
            await asyncio.gather(*(flood(it, data, limit) for data in requests()))
            assert counts.longest_turn <= INPUT_BYTES
            assert counts.most_held <= INPUT_BYTES
            assert max(counts.by_connection.values()) <= DROPPED_BYTES

    @pytest.mark.parametrize("kind", FRAMES)
    async def test_every_socket(
        self, path: Path, tls: dict[str, Path], kind: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Frames before the hello, on both sockets: at most 64 kB are read from a connection."""
        async with guarded(path, **tls) as it:
            counts, limit = Counts(monkeypatch), asyncio.Semaphore(FLOODS)
            floods = [upgrade(where) + FRAMES[kind] for where in sorted(SOCKETS)]
            await asyncio.gather(*(flood(it, data, limit) for data in floods * 4))
            assert counts.longest_turn <= INPUT_BYTES
            assert counts.most_held <= INPUT_BYTES
            assert max(counts.by_connection.values()) <= INPUT_BYTES
            await eventually(lambda: len(it.context.registry) == 0)

    @pytest.mark.parametrize("field", ["%C3%A9" * 80_000 + "=1", "é" * 200_000, "a=1&" * 100_000])
    async def test_the_form_of_the_login(self, path: Path, field: str) -> None:
        """A form that is too large for a token is refused before it is parsed."""
        form = {"content-type": "application/x-www-form-urlencoded"}
        with patch.object(settings_form, "parse_qs", wraps=urllib.parse.parse_qs) as parse:
            async with guarded(path) as it, http(it) as client:
                headers = {**form, "origin": it.server.url}
                answer = await client.post("/login", content=field.encode(), headers=headers)
                assert answer.status_code == 413
                assert not parse.called
                short = await client.post("/login", content=f"token={ADMIN}", headers=headers)
                assert (short.status_code, parse.call_count) == (303, 1)

    async def test_an_authenticated_client_is_not_limited(
        self, path: Path, tls: dict[str, Path]
    ) -> None:
        """A valid token lifts the limits at once: a large body, many requests and a socket with large frames."""
        async with guarded(path, unauthenticated_per_address=1, **tls) as it, http(it) as client:
            payload = {"key": "a", "id": "x", "payload": "x" * 200_000}
            answer = await client.post("/v1/tasks", json=payload, headers=bearer(A))
            assert answer.status_code == 201
            if tls:
                return
            async with it.worker("w1", "a", headers=bearer(A), credit=1) as worker:
                (receipt,) = receipts(await worker.deliveries(1))
                await worker.send("ack", receipts=[receipt, *(f"{n:190}" for n in range(999))])
                assert await worker.settled(1000)
                assert len(it.context.unauthenticated) == 0


class TestTurns:
    """U26 (A1): what makes a turn of the event loop long, whatever its bytes."""

    async def test_requests(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A turn completes the head or the body of one request at most, as each makes the application run."""
        handle_turn, handle_piece = Turns._run, HttpProtocol.handle_piece
        complete = [0]

        def counted_turn(turns: Turns) -> None:
            complete.append(0)
            handle_turn(turns)

        def counted_piece(protocol: HttpProtocol, piece: bytes) -> None:
            handle_piece(protocol, piece)
            complete[-1] += protocol.starts_task()

        form = b"token=" + b"%C3%A9" * 1000
        kind = "Content-Type: application/x-www-form-urlencoded"
        data = head("POST", "/login", kind, f"Content-Length: {len(form)}") + form
        async with guarded(path) as it:
            monkeypatch.setattr(Turns, "_run", counted_turn)
            monkeypatch.setattr(HttpProtocol, "handle_piece", counted_piece)
            limit = asyncio.Semaphore(FLOODS)
            await asyncio.gather(*(flood(it, data, limit) for _ in range(FLOODS)))
        assert max(complete) == 1
        assert sum(complete) >= 2 * FLOODS

    @pytest.mark.fast_clock
    async def test_garbage(self, path: Path, tls: dict[str, Path]) -> None:
        """A connection that has ended is freed at once: the garbage collector would stop the loop for milliseconds."""
        kinds = (HttpProtocol, SocketProtocol, TlsProtocol, ConnectionLimits, ServerSession)
        limit = asyncio.Semaphore(FLOODS)
        floods = [b"", head("GET", "/login"), upgrade("/v1/socket") + FRAMES["pings"]]
        found: list[str] = []
        async with guarded(path, **tls) as it:
            for turn in range(2):  # the first one fills caches
                gc.collect()
                gc.disable()
                if turn:
                    gc.set_debug(gc.DEBUG_SAVEALL)
                try:
                    await asyncio.gather(*(flood(it, data, limit) for data in floods))
                    async with opened(it, encrypted=False) as (_, writer):
                        writer.write(b"half of a head or of a TLS handshake")
                    await eventually(lambda: len(it.context.unauthenticated) == 0)
                    gc.collect()
                    found = [type(one).__name__ for one in gc.garbage if isinstance(one, kinds)]
                finally:
                    gc.set_debug(0)
                    gc.garbage.clear()
                    gc.enable()
            assert not found


SILENT = {
    "nothing": (b"", b""),
    "half of a head": (b"GET /alive HTTP/1.1\r\nHost: x", b""),
    "a dripping head": (b"GET /alive HTTP/1.1\r\nHost: 127.0.0.1\r\n", b"a: b\r\n"),
    "half of a login": (
        head("POST", "/login", "Content-Type: application/x-www-form-urlencoded")[:-2]
        + b"Content-Length: 100\r\n\r\ntoken=",
        b"",
    ),
    "a dripping login": (
        head("POST", "/login", "Content-Type: application/x-www-form-urlencoded")[:-2]
        + b"Content-Length: 1000\r\n\r\ntoken=",
        b"x",
    ),
    "a body after the answer": (head("POST", "/alive", "Content-Length: 60000"), b"x"),
    "chunks after the answer": (
        head("GET", "/alive", "Transfer-Encoding: chunked"),
        b"1\r\nx\r\n",
    ),
    "requests one after another": (head("GET", "/alive"), head("GET", "/alive")),
    "half of a frame": (upgrade("/v1/socket") + frame(bytes(1000))[:500], b""),
    "a dripping frame": (upgrade("/v1/socket") + frame(bytes(1000))[:9], b"x"),
    "pings before the hello": (upgrade("/v1/socket"), frame(b"", PING)),
    "half of a frame for Prefect": (
        upgrade("/api/task_runs/subscriptions/scheduled") + frame(bytes(1000))[:500],
        b"",
    ),
    "a dripping frame of events": (upgrade("/api/events/in") + frame(bytes(1000))[:9], b"x"),
}


class TestSeconds:
    """U26 and fault G11 (A2): a connection without a token lasts at most ten seconds, whatever its client sends."""

    @pytest.mark.fast_clock
    @pytest.mark.parametrize("kind", SILENT)
    async def test_every_kind(self, path: Path, tls: dict[str, Path], kind: str) -> None:
        """Connections that are silent or send a little every half a second are closed in time."""
        first, more = SILENT[kind]
        async with guarded(path, **tls) as it:
            await lasts(it, first, more)

    @pytest.mark.fast_clock
    @pytest.mark.parametrize("first", [b"", b"\x16\x03\x01\x02\x00\x01"])
    async def test_no_handshake(self, path: Path, files: Files, first: bytes) -> None:
        """A TLS connection without a ClientHello, or with half of one, is closed in time."""
        async with guarded(path, tls_certificate=files.good, tls_key=files.key) as it:
            await lasts(it, first, b"", encrypted=False)

    @pytest.mark.fast_clock
    async def test_bodies_after_an_authenticated_request(self, path: Path) -> None:
        """On a connection with a token, a body that nothing reads ends too: a proxy's connection has many clients."""
        async with guarded(path) as it:
            token = f"Authorization: Bearer {ADMIN}"
            known = head("GET", "/v1/queues", token)
            await lasts(it, known + head("POST", "/alive", "Content-Length: 60000"), b"x")


class TestClosed:
    """Fault G11 (A2): input that arrives while the server closes the connection causes no error."""

    @pytest.mark.parametrize("first", ["closed", "received"])
    async def test_input_is_discarded(
        self, path: Path, tls: dict[str, Path], first: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A server that stops closes the connection just before or after input arrives: nothing parses it."""
        received = HttpProtocol.data_received

        def data_received(protocol: HttpProtocol, data: bytes) -> None:
            if first == "closed":
                protocol.shutdown()
            received(protocol, data)
            protocol.shutdown()

        monkeypatch.setattr(HttpProtocol, "data_received", data_received)
        errors: list[object] = []
        async with guarded(path, **tls) as it:
            asyncio.get_running_loop().set_exception_handler(lambda _, error: errors.append(error))
            for request in (head("GET", "/alive"), b"no request at all" + bytes(100)):
                async with opened(it) as (reader, writer):
                    writer.write(request)
                    assert await reader.read() == b""
        assert not errors


async def lasts(it: Running, first: bytes, more: bytes, *, encrypted: bool | None = None) -> None:
    """Check that the server closes a connection within `SECONDS`."""
    loop = asyncio.get_running_loop()
    async with opened(it, encrypted=encrypted) as (reader, writer):
        began = loop.time()
        await say((reader, writer), first)
        dripping = asyncio.create_task(drip(writer, more))
        async with asyncio.timeout(10 * SECONDS):
            with contextlib.suppress(OSError):
                while await reader.read(65536):
                    pass
        took = loop.time() - began
        dripping.cancel()
        await asyncio.gather(dripping, return_exceptions=True)
        assert took <= SECONDS + 1


async def drip(writer: asyncio.StreamWriter, more: bytes) -> None:
    """Send some bytes every half a second."""
    while more:
        await asyncio.sleep(0.5)
        writer.write(more)
