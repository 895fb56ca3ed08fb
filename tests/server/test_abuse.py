"""Misbehaving clients over HTTP and websockets: the server refuses or disconnects them, and they use few resources."""

from __future__ import annotations

import asyncio
import logging
import os
import socket as plain
from pathlib import Path
from typing import Any

import msgspec
import pytest
from websockets.exceptions import InvalidStatus
from websockets.typing import Subprotocol

from taskqueue_core.tasks import State
from taskqueue_server.context import connections
from taskqueue_server.process.uvicorn_protocols import ANSWER_SECONDS, HEADER_SECONDS
from tests.server.rude import PING, RawSocket, frame
from tests.server.support import Running, eventually, running

pytestmark = pytest.mark.fast_clock


def memory() -> int:
    """Return the memory of this process in bytes."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def refused(it: Running, **options: Any) -> int:
    """Return the HTTP status of a refused handshake."""
    with pytest.raises(InvalidStatus) as caught:
        async with it.socket(**options):
            pass
    assert caught.value.response.headers["content-type"] == "application/problem+json"
    return caught.value.response.status_code


def descriptors() -> int:
    """Return the number of file descriptors that this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


class TestHandshake:
    """Which handshakes the server accepts."""

    @pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:8420", ""])
    async def test_no_page_of_a_browser(self, origin: str) -> None:
        """A handshake with an Origin header comes from a web page and is refused."""
        async with running() as it:
            assert await refused(it, additional_headers={"Origin": origin}) == 403

    async def test_no_name_but_this_machines(self) -> None:
        """A handshake with a foreign Host header is refused, as a web page sends it after DNS rebinding."""
        async with running() as it:
            head = b"GET /v1/socket HTTP/1.1\r\nHost: evil.example\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            key = (
                b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
            )
            assert await it.answers(head + key) == [421]

    async def test_the_subprotocol_is_required(self, caplog: pytest.LogCaptureFixture) -> None:
        """A handshake without the subprotocol is refused with the name of the required one.

        If a client offers several subprotocols, the server chooses its own. No refusal is logged as an error.
        """
        async with running() as it:
            assert await refused(it, subprotocols=None) == 426
            assert await refused(it, subprotocols=[Subprotocol("other")]) == 426
            both = [Subprotocol("other"), Subprotocol("taskqueue.v1")]
            async with it.socket(subprotocols=both) as socket:
                assert socket.subprotocol == "taskqueue.v1"
        assert not [record for record in caplog.records if record.levelno >= logging.ERROR]

    async def test_nothing_is_compressed(self) -> None:
        """Fault G8: the server never negotiates compression, so a compression bomb cannot be sent."""
        async with running() as it, it.socket(compression="deflate") as socket:
            assert "Sec-WebSocket-Extensions" not in socket.response.headers

    async def test_a_head_must_come_in_time(self) -> None:
        """Faults G11 and K5: a connection that sends no request, or half of one, is closed after a timeout."""
        whole = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        async with running() as it:
            reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
            writer.write(whole)
            assert b"200" in await reader.readuntil(b"}}")
            writer.write(whole[:30])
            heads = (b"", whole[:30], b"GET ")
            answers = (it.answers(head, seconds=HEADER_SECONDS + 1) for head in heads)
            assert await asyncio.gather(*answers) == [[], [], []]
            assert await asyncio.wait_for(reader.read(), 3) == b""
            writer.close()

    async def test_connections_are_limited(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The number of sockets is limited; any further one is closed with the code for "try again later"."""
        monkeypatch.setattr(connections.Connections.__init__, "__defaults__", (2, 2))
        async with running() as it, it.worker("w1"), it.worker("w2"), it.socket() as late:
            await asyncio.wait_for(late.wait_closed(), 3)
            assert late.close_code == 1013


class TestSlowReaders:
    """Faults G1 and G2: a client that does not read uses no more memory than its credit, and only until a deadline."""

    async def test_one_that_never_reads_is_dropped(self) -> None:
        """Fault G1: a worker that never reads holds at most its credit and is disconnected after the deadline.

        Other workers are served meanwhile, and all its tasks return to the queue.
        """
        before = memory()
        payload = b'"' + b"x" * 100_000 + b'"'
        async with running(lease=5, grace=2) as it, it.worker("good", "g", credit=1) as good:
            await it.publish(*(f"t{i}" for i in range(200)), payload=payload)
            with await stuck(it, credit=200):
                await it.reaches(in_flight=100)
                await it.publish("quick", key="g")
                (got,) = await good.deliveries(1)
                assert got["task"]["id"] == "quick"
                await it.reaches(waiting=200, in_flight=0, seconds=20)
                async with it.worker("heir", credit=200) as heir:
                    lost = [d.get("losses", 0) for d in await heir.deliveries(200)]
                assert 0 < sum(lost) < 100  # Only deliveries that left the server count as lost.
                # All tasks share one payload object here, so memory grows only by what the server has buffered.
                assert memory() - before < 100 * len(payload) + 16 * 1024 * 1024

    async def test_what_was_never_sent_is_back_at_once(self) -> None:
        """E7: a delivery that was never sent to the worker returns to the queue at once, without the grace period."""
        async with running(lease=5, grace=30) as it:
            payload = b'"' + b"x" * 100_000 + b'"'
            await it.publish(*(f"t{i}" for i in range(100)), payload=payload)
            with await stuck(it, credit=100):
                await it.reaches(in_flight=100)

                async def back() -> bool:
                    return await it.count(State.WAITING) > 10

                await eventually(back, 10)

    async def test_a_flood_of_pings_is_not_answered_into_the_void(self) -> None:
        """Fault G10: pongs do not accumulate in memory if the client does not read them."""
        async with running(lease=30) as it:
            with await stuck(it) as bad:
                before = memory()
                for _ in range(120):
                    await bad.send(frame(b"p" * 125, PING) * 1000)
                assert memory() - before < 6 * 1024 * 1024

    async def test_asking_without_reading_ends_it(self) -> None:
        """A worker that never reads the responses to its requests blocks only itself, until the deadline."""
        flood = frame(b'{"type":"ping","n":1}') * 1000

        async def ask(raw: RawSocket) -> None:
            async with asyncio.timeout(30):
                while True:
                    await raw.send(flood)

        async with running(lease=5, grace=0) as it:
            with await stuck(it) as bad, pytest.raises((BrokenPipeError, ConnectionResetError)):
                await ask(bad)
            await eventually(lambda: len(it.context.registry) == 0)


class TestAnswers:
    """HTTP clients that never read the response."""

    async def test_an_answer_that_is_never_read(self) -> None:
        """Fault G1, over HTTP: a client that never reads its response is disconnected after a timeout."""
        async with running() as it:
            ids = [f"t{i}" for i in range(40)]
            await it.publish(*ids)
            async with it.backend.subscribe(["k"], "w") as subscription:
                got = (await subscription.receive(40, 0)).deliveries
                await subscription.ack(*got, results=[b'"' + b"x" * 250_000 + b'"'] * 40)
            before = descriptors()
            body = msgspec.json.encode({"ids": ids})
            bad = plain.create_connection(("127.0.0.1", it.port))
            bad.setsockopt(plain.SOL_SOCKET, plain.SO_RCVBUF, 4096)
            bad.sendall(
                b"POST /v1/queues/k/results HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
            )
            await eventually(lambda: descriptors() == before + 2)
            await eventually(lambda: descriptors() == before + 1, ANSWER_SECONDS + 1)
            bad.close()


class TestFrames:
    """Faults G8, G9 and G10: bad frames over a real socket."""

    async def test_an_error_is_named_before_the_close(self) -> None:
        """Fault G9: the error frame says what was wrong; the close that follows contains only the error code."""
        async with running() as it, it.worker() as worker:
            # A newer worker may send frames that this server does not know.
            await worker.send("from_the_future")
            assert (await worker.frame("error"))["code"] == "unknown_type"
            await worker.socket.send('{"type":"ack"}')
            error = await worker.frame("error")
            assert await worker.closed() == 4400
            assert worker.socket.close_reason == error["code"] == "invalid_frame"

    async def test_hundreds_that_come_and_go_leave_nothing(self) -> None:
        """Fault G10: after hundreds of short connections no task, descriptor or subscription of them remains."""
        async with running(grace=0) as it:
            await it.publish("a")
            start = descriptors()

            async def visit(n: int) -> None:
                async with it.worker(f"w{n % 7}", credit=1) as worker:
                    if n % 3 == 0:
                        worker.break_off()
                    elif n % 3 == 1:
                        await worker.send("nonsense")
                        await worker.socket.send("}")

            for start_at in range(0, 200, 50):
                await asyncio.gather(*(visit(n) for n in range(start_at, start_at + 50)))
            await eventually(lambda: len(it.context.registry) == 0)
            await eventually(lambda: descriptors() <= start)
            assert await it.backend.control.workers() == ()  # type: ignore[attr-defined]
            await it.reaches(in_flight=0)


async def stuck(it: Running, credit: int = 0) -> RawSocket:
    """Connect a worker with a tiny receive buffer that sends a hello and never reads."""
    raw = await RawSocket.opened(it.port, receive_buffer=4096)
    raw.say("hello", worker_id="stuck", keys=["k"], credit=credit)
    await eventually(lambda: it.context.registry.connections("stuck") == 1)
    return raw
