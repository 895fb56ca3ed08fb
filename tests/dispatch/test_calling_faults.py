"""Tests of the endpoint client with faulty GPU servers: each call ends in time and returns the kind of failure."""

from __future__ import annotations

import asyncio
import gzip
import socket
import tracemalloc

import pytest

from taskqueue_core.limits import LIMITS
from taskqueue_dispatch.endpoint_client import client, exchange
from taskqueue_dispatch.endpoint_client.answers import (
    Answer,
    Busy,
    Done,
    EndpointUnreachable,
    JobFailedAnswer,
)
from taskqueue_dispatch.models import ModelConfig, ModelType
from tests.dispatch.gpu_support import (
    ASYNC,
    SYNC,
    Talk,
    calling,
    endpoint_of,
    lease_of,
    response,
    said,
    task_of,
    trap,
)
from tests.dispatch.patience import PATIENCE

CANARY = "canary-7f3a"
SHORT = SYNC.model_copy(update={"max_poll_time": 0.3})
GIGABYTE = 1024**3
BLOCK = b"x" * 65536


async def never(_: asyncio.StreamReader, __: asyncio.StreamWriter) -> None:
    """Send nothing, and wait forever."""
    await asyncio.get_running_loop().create_future()


async def drips(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send a body one byte at a time, without end."""
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n")
    while True:
        writer.write(b" ")
        await writer.drain()
        await asyncio.sleep(0.02)


async def drips_headers(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send response headers one at a time, without end."""
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        writer.write(b"a: b\r\n")
        await writer.drain()
        await asyncio.sleep(0.02)


async def not_yet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send interim responses without end."""
    while True:
        writer.write(b"HTTP/1.1 102 Processing\r\n\r\n")
        await writer.drain()
        await asyncio.sleep(0.02)


async def posted(talk: Talk | bytes, config: ModelConfig = SYNC) -> Answer:
    """Send a job to a server that behaves like ``talk``, and return the client's answer."""
    async with trap(talk) as server, calling() as caller, asyncio.timeout(PATIENCE):
        return await caller.send(lease_of(server.url), task_of(), config, attempt=1)


class TestTime:
    """Servers that never finish their response."""

    @pytest.mark.parametrize("talk", [never, drips, drips_headers, not_yet])
    async def test_sync(self, talk: Talk) -> None:
        """A synchronous model must send its complete response within ``max_poll_time`` (fault H5)."""
        answer = await posted(talk, SHORT)
        assert answer == JobFailedAnswer("no complete response within the max_poll_time of 0.3 s")

    @pytest.mark.parametrize("talk", [never, drips])
    async def test_async(self, talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
        """If an asynchronous model does not accept a job in time, it may or may not have the job (fault H5)."""
        monkeypatch.setattr(client, "_ACCEPT_SECONDS", 0.3)
        answer = await posted(talk, ASYNC)
        assert answer == EndpointUnreachable("no complete response within 0.3 s", sent=True)

    @pytest.mark.parametrize("talk", [never, drips])
    async def test_questions(self, talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
        """A poll that times out does not fail the job (fault H5)."""
        monkeypatch.setattr(client, "_POLL_SECONDS", 0.3)
        async with trap(talk) as server, calling() as caller, asyncio.timeout(PATIENCE):
            answer = await caller.ask(server.url, "r-1", SYNC)
            assert answer == EndpointUnreachable("no complete response within 0.3 s", sent=True)

    @pytest.mark.parametrize("talk", [never, drips])
    async def test_health(self, talk: Talk) -> None:
        """A health check takes at most ``health_interval`` (C22, fault H5)."""
        async with (
            trap(talk) as server,
            calling(health_interval=0.3) as caller,
            asyncio.timeout(4),  # seconds; by default a health check may take five
        ):
            assert await caller.health(endpoint_of(server.url), ModelConfig()) is None

    async def test_a_server_that_never_reads(self) -> None:
        """A server that accepts the connection but never reads cannot exceed ``max_poll_time`` either (fault H5)."""
        listener = socket.create_server(("127.0.0.1", 0), backlog=1)
        with listener:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
            async with calling() as caller, asyncio.timeout(PATIENCE):
                big = task_of(payload="x" * (LIMITS.payload - 10))
                answer = await caller.send(lease_of(url), big, SHORT, attempt=1)
                assert isinstance(answer, JobFailedAnswer)


class TestSize:
    """Servers that send too much."""

    @pytest.mark.parametrize("told", [True, False], ids=["told", "chunked"])
    @pytest.mark.parametrize("status", [200, 500, 503])
    async def test_a_gigabyte(self, told: bool, status: int) -> None:  # noqa: FBT001 - pytest passes it by name
        """The client stops reading soon after the limit, and keeps none of an oversized response (fault H5)."""
        written = 0

        async def talk(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal written
            size = f"content-length: {GIGABYTE}" if told else "transfer-encoding: chunked"
            writer.write(f"HTTP/1.1 {status} OK\r\n{size}\r\n\r\n".encode())
            while written < GIGABYTE:
                writer.write(BLOCK if told else b"10000\r\n" + BLOCK + b"\r\n")
                written += len(BLOCK)
                await writer.drain()

        tracemalloc.start()
        try:
            answer = await posted(talk)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        too_long = (
            f"HTTP 200: the response is longer than the answer_limit of {LIMITS.result} bytes"
        )
        assert (
            answer
            == {
                200: JobFailedAnswer(too_long, final=True, reason="unusable_answer"),
                500: JobFailedAnswer("HTTP 500 with 0 bytes", by_server=True),
                503: Busy(),
            }[status]
        )
        assert written < 32 * 1024**2, "more was sent than socket buffers can hold"
        assert peak < 8 * 1024**2

    async def test_at_the_limit(self) -> None:
        """A response of exactly the limit is accepted, and one byte more is not (fault H5)."""
        for size, good in [(2000, True), (2001, False)]:
            body = b'"' + b"x" * (size - 2) + b'"'
            for answer in (response(200, body), chunked(body)):
                async with trap(answer) as server, calling(answer_limit=2000) as caller:
                    sent = await caller.send(lease_of(server.url), task_of(), SYNC, attempt=1)
                    assert isinstance(sent, Done if good else JobFailedAnswer)

    async def test_a_question(self) -> None:
        """A polled result that is too large fails the job for good: the next one would not be smaller (fault H5)."""
        big = said(status="done", result="x" * LIMITS.result)
        async with trap(big) as server, calling() as caller:
            answer = await caller.ask(server.url, "r-1", SYNC)
            assert isinstance(answer, JobFailedAnswer)
            assert "answer_limit" in answer.error
            assert answer.final

    @pytest.mark.parametrize("coding", ["gzip", "br", "GZIP", "deflate, gzip"])
    async def test_a_compressed_bomb(self, coding: str) -> None:
        """A compressed response is refused and never unpacked (fault H5)."""
        bomb = gzip.compress(b"[" + b" " * (16 * 1024**2) + b"]", compresslevel=1)
        tracemalloc.start()
        try:
            answer = await posted(response(200, bomb, f"Content-Encoding: {coding}"))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert answer == JobFailedAnswer(
            "HTTP 200: the response is compressed, which was not requested",
            final=True,
            reason="unusable_answer",
        )
        assert peak < 4 * 1024**2

    @pytest.mark.parametrize("line", [b"a: b\r\n", b"a" * 1000, b" folded\r\n", b"\x00"])
    async def test_endless_headers(self, line: bytes) -> None:
        """A response whose headers never end is given up long before the timeout (fault H5)."""
        written = 0

        async def talk(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal written
            writer.write(b"HTTP/1.1 200 OK\r\n")
            while written < GIGABYTE:
                writer.write(line * 1000)
                written += len(line) * 1000
                await writer.drain()

        answer = await posted(talk)
        assert isinstance(answer, EndpointUnreachable)
        assert answer.sent
        assert written < 32 * 1024**2

    @pytest.mark.parametrize(
        "depth", [LIMITS.depth, LIMITS.depth + 1, 50_000], ids=["good", "deep", "abyss"]
    )
    async def test_deep(self, depth: int) -> None:
        """A result that is nested deeper than the limit fails the job (fault H5)."""
        answer = await posted(response(200, b"[" * depth + b"]" * depth))
        assert isinstance(answer, Done if depth == LIMITS.depth else JobFailedAnswer)


class TestGarbage:
    """Servers that send invalid JSON or invalid HTTP."""

    @pytest.mark.parametrize(
        "body",
        [
            b"", b"{", b'{"status":"success","result":', b"<html>canary-7f3a</html>", b"NaN", b"[1,]", b"\xff\xfe[]",
            b'{"status":"success","result":1}{}', b'{"status":"success","result":"\xff"}', b'{"a":NaN}', b"\x00" * 500,
            '{"canary-7f3a"'.encode("utf-16"),
        ],
    )  # fmt: skip
    async def test_no_json(self, body: bytes) -> None:
        """A response 200 without valid JSON fails the attempt, and the error contains none of it (fault H5)."""
        for config in (SYNC, ASYNC):
            answer = await posted(response(200, body), config)
            assert isinstance(answer, JobFailedAnswer)
            assert f"length {len(body)}" in answer.error
            assert CANARY not in answer.error
            assert not answer.final

    @pytest.mark.parametrize(
        "raw",
        [
            b"canary-7f3a\r\n\r\n", b"\x16\x03\x01\x02\x00" * 50, b"HTTP/1.1 abc OK\r\n\r\n", b"HTTP/2 200\r\n\r\n",
            b"HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\n", b"HTTP/1.1 200 OK\r\n bad\r\n\r\n",
            b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n",
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        ],
    )  # fmt: skip
    async def test_no_http(self, raw: bytes) -> None:
        """After a response that is not HTTP, the server may have the job; the error shows none of it (fault H5)."""

        async def talk(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(raw)
            await writer.drain()
            writer.close()

        answer = await posted(talk)
        assert isinstance(answer, EndpointUnreachable)
        assert answer.sent
        assert CANARY not in answer.error

    @pytest.mark.parametrize(
        "raw",
        [
            b"",
            b"HTTP/1.1 200 OK\r\ncontent-",
            b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\n{",
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\n{",
        ],
        ids=["nothing", "in the head", "in the body", "in a chunk"],
    )
    @pytest.mark.parametrize("reset", [True, False], ids=["reset", "closed"])
    async def test_cut_off(self, raw: bytes, reset: bool) -> None:  # noqa: FBT001 - pytest passes it by name
        """After a response that is cut off, the server may have run the job (fault H5)."""

        async def talk(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(raw)
            await writer.drain()
            if reset:
                writer.transport.abort()
            else:
                writer.close()

        answer = await posted(talk)
        assert isinstance(answer, EndpointUnreachable)
        assert answer.sent

    @pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
    async def test_redirects(self, status: int) -> None:
        """No redirect is followed, and its target is not shown (fault H5)."""
        async with trap(said(status="done", result=1, active_jobs=0)) as other:
            leads = response(status, b"", f"Location: {other.origin}/{CANARY}")
            async with trap(leads) as server, calling() as caller:
                answer = await caller.send(lease_of(server.url), task_of(), SYNC, attempt=1)
                assert answer == JobFailedAnswer(
                    f"HTTP {status} with 0 bytes: redirects are not followed", by_server=True
                )
                assert isinstance(await caller.ask(server.url, "r", SYNC), EndpointUnreachable)
                assert await caller.health(endpoint_of(server.url), SYNC) is None
            assert not other.connections

    async def test_cookies(self) -> None:
        """Cookies that a server sets are not sent back (fault H5)."""
        async with (
            trap(response(200, b"1", "Set-Cookie: a=canary; Path=/")) as server,
            calling() as caller,
        ):
            for _ in range(2):
                await caller.send(lease_of(server.url), task_of(), SYNC, attempt=1)
            assert b"cookie" not in server.requests[1].lower()


class TestNotThere:
    """Servers that cannot be reached."""

    async def test_refused(self, unused_port: int) -> None:
        """If the connection is refused, the job was not sent, and the answer shows no part of the URL (fault H5)."""
        async with calling() as caller:
            url = f"http://user:{CANARY}@127.0.0.1:{unused_port}/{CANARY}"
            answer = await caller.send(lease_of(url), task_of(), SYNC, attempt=1)
            assert answer == EndpointUnreachable(
                "no connection (ConnectionRefusedError)", sent=False
            )
            assert await caller.ask(url, "r", SYNC) == answer
            assert await caller.health(endpoint_of(url), SYNC) is None

    @pytest.mark.parametrize(
        "url",
        [
            "http://nothing.invalid/", "http://" + "a" * 64 + ".example/", "ftp://127.0.0.1/", "http://[::1/",
            "http://127.0.0.1:99999/", "nonsense", "http:///x", "http://a..b/",
        ],
    )  # fmt: skip
    async def test_no_address(self, url: str) -> None:
        """An unusable URL gives an answer like an unreachable server, not an exception (fault H5)."""
        async with calling() as caller, asyncio.timeout(PATIENCE):
            answer = await caller.send(lease_of(url), task_of(), SYNC, attempt=1)
            assert isinstance(answer, EndpointUnreachable)
            assert not answer.sent
            assert not (await caller.ask(url, "r", SYNC)).sent  # type: ignore[union-attr]
            assert await caller.health(endpoint_of(url), SYNC) is None

    async def test_no_connection_in_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A connection that is not established in time means that the job was not sent (fault H5)."""
        monkeypatch.setattr(exchange, "_CONNECT_SECONDS", 0.2)
        with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
            address = listener.getsockname()
            with socket.socket() as one, socket.socket() as two:
                # fill the backlog, so that the next connection is not accepted
                for full in (one, two):
                    full.setblocking(False)  # noqa: FBT003 - this method accepts no keyword
                    full.connect_ex(address)
                async with calling() as caller, asyncio.timeout(PATIENCE):
                    url = f"http://127.0.0.1:{address[1]}/"
                    answer = await caller.send(lease_of(url), task_of(), SYNC, attempt=1)
                    assert answer == EndpointUnreachable("no connection (TimeoutError)", sent=False)


async def test_a_hundred_bad_servers_in_turn() -> None:
    """After calls to many faulty servers, the same client still works with a good one (fault H5)."""
    config = ModelConfig(model_type=ModelType.SYNC, max_poll_time=0.1)
    async with trap(said(status="done", result=1)) as good, calling() as caller:
        for talk in (never, drips, drips_headers, not_yet, b"x\r\n\r\n", response(200, b"{")):
            async with trap(talk) as bad:
                calls = [
                    caller.send(lease_of(bad.url), task_of(), config, attempt=1) for _ in range(20)
                ]
                answers = await asyncio.gather(*calls)
                assert all(
                    isinstance(answer, JobFailedAnswer | EndpointUnreachable) for answer in answers
                )
            sent = await caller.send(lease_of(good.url), task_of(), SYNC, attempt=1)
            assert sent == Done(b"1")


def chunked(body: bytes) -> bytes:
    """Return a chunked response, which does not announce its length."""
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + b"%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n"


@pytest.fixture
def unused_port() -> int:
    """Return a port at which no server listens."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
