"""Peers without manners: they are shown the door, and cost little."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket as plain
from pathlib import Path
from typing import Any

import msgspec
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.typing import Subprotocol

from taskqueue_core.hooks import Hooks, Identity, hookimpl
from taskqueue_core.observed import ObservedBackend
from taskqueue_core.server.sockets import registry
from taskqueue_core.tasks import State
from taskqueue_memory import MemoryBackend
from tests.server.support import Running, eventually, running


def memory() -> int:
    """Bytes that this process has in memory."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def refused(it: Running, **options: Any) -> int:
    """The status with which a handshake is refused."""
    with pytest.raises(InvalidStatus) as caught:
        async with it.socket(**options):
            pass
    assert caught.value.response.headers["content-type"] == "application/problem+json"
    return caught.value.response.status_code


def descriptors() -> int:
    """How many this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


class TestHandshake:
    """Who gets as far as a socket."""

    @pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:8420", ""])
    async def test_no_page_of_a_browser(self, origin: str) -> None:
        """A request that tells an origin comes from a page, and is refused before the handshake."""
        async with running() as it:
            assert await refused(it, additional_headers={"Origin": origin}) == 403

    async def test_no_name_but_this_machines(self) -> None:
        """A page that had its own name rebound to this machine still tells its name."""
        async with running() as it:
            _, port = it.server.url.rsplit(":", 1)
            reader, writer = await asyncio.open_connection("127.0.0.1", int(port))
            writer.write(
                b"GET /v1/socket HTTP/1.1\r\nHost: evil.example\r\nUpgrade: websocket\r\n"
                b"Connection: Upgrade\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
                b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Protocol: taskqueue.v1\r\n\r\n"
            )
            assert b" 421 " in await asyncio.wait_for(reader.readline(), 3)
            writer.close()

    async def test_the_subprotocol_is_required(self, caplog: pytest.LogCaptureFixture) -> None:
        """Who does not ask for it is told which one; among several it is chosen. No refusal is logged as an error."""
        async with running() as it:
            assert await refused(it, subprotocols=None) == 426
            assert await refused(it, subprotocols=[Subprotocol("other")]) == 426
            both = [Subprotocol("other"), Subprotocol("taskqueue.v1")]
            async with it.socket(subprotocols=both) as socket:
                assert socket.subprotocol == "taskqueue.v1"
        assert not [record for record in caplog.records if record.levelno >= logging.ERROR]

    async def test_nothing_is_compressed(self) -> None:
        """Fault G8: a bomb of 1000:1 cannot be sent, whatever the client offers."""
        async with running() as it, it.socket(compression="deflate") as socket:
            assert "Sec-WebSocket-Extensions" not in socket.response.headers

    async def test_a_hello_must_come_in_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Fault G11: who says nothing, or not enough, is sent away."""
        monkeypatch.setattr("taskqueue_core.server.sockets.greeting.HELLO_SECONDS", 0.1)
        async with running() as it, it.socket() as socket, it.socket() as chatty:
            await chatty.send('{"type":"from_the_future"}')
            await asyncio.wait_for(socket.wait_closed(), 3)
            await asyncio.wait_for(chatty.wait_closed(), 3)
            assert (socket.close_code, socket.close_reason) == (4408, "no_hello")
            assert chatty.close_code == 4408
            await eventually(lambda: len(it.hub.registry) == 0)

    async def test_a_head_must_come_in_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Faults G11 and K5: a connection without a request, or with half of one, is cut."""
        monkeypatch.setattr("taskqueue_core.server.running.programs.HEADER_SECONDS", 0.1)
        async with running() as it:
            _, port = it.server.url.rsplit(":", 1)
            whole = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
            for first, then in ((b"", b""), (b"", whole[:30]), (whole, whole[:30]), (b"", b"GET ")):
                reader, writer = await asyncio.open_connection("127.0.0.1", int(port))
                if first:
                    writer.write(first)
                    assert b"200" in await asyncio.wait_for(reader.readuntil(b"}}"), 3)
                writer.write(then)
                with contextlib.suppress(ConnectionResetError):
                    assert await asyncio.wait_for(reader.read(), 3) == b""
                writer.close()

    async def test_strangers_are_few(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Fault G11: so many sockets may wait without a hello, and workers get in again as soon as one is gone."""
        room = registry.Registry.__init__.__defaults__
        monkeypatch.setattr(registry.Registry.__init__, "__defaults__", (1000, 3))
        async with running() as it:
            strangers = [await it.socket() for _ in range(3)]
            async with it.socket() as late:
                await asyncio.wait_for(late.wait_closed(), 3)
                assert (late.close_code, late.close_reason) == (1013, "too_many")
            await strangers.pop().close()
            await eventually(lambda: it.hub.registry.has_room)
            async with it.worker():
                pass
            for stranger in strangers:
                await stranger.close()
        assert room == (registry.MAX_CONNECTIONS, registry.MAX_STRANGERS)

    async def test_connections_are_limited(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """So many sockets in all, and one more is sent away with the code for later."""
        monkeypatch.setattr(registry.Registry.__init__, "__defaults__", (2, 2))
        async with running() as it, it.worker("w1"), it.worker("w2"), it.socket() as late:
            await asyncio.wait_for(late.wait_closed(), 3)
            assert late.close_code == 1013


class TestAuthentication:
    """Where a plugin authenticates, it decides."""

    async def test_the_plugin_says_who_may_consume(self) -> None:
        """Fault K1: a token without the right to consume is as good as none."""

        class Plugin:
            @hookimpl
            def authenticate(self, token: str | None) -> Identity | None:
                verbs = {"good": {"consume"}, "weak": {"publish"}}.get(token or "")
                return None if verbs is None else Identity(name="n", verbs=frozenset(verbs))

        hooks = Hooks()
        hooks.register(Plugin())
        async with running(ObservedBackend(MemoryBackend(), hooks)) as it:
            async with it.worker(token="good") as worker:
                assert worker.welcome["lease"]
            for token in ("weak", "bad", None):
                with pytest.raises(ConnectionClosed) as caught:
                    async with it.worker(token=token):
                        pass
                assert caught.value.rcvd is not None
                assert caught.value.rcvd.code == 4401
                assert caught.value.rcvd.reason == "unauthenticated"


class TestSlowReaders:
    """Faults G1 and G2: who does not read costs no more than its credit, and not for ever."""

    async def test_one_that_never_reads_is_dropped(self) -> None:
        """Fault G1: at most its credit is out, others are served, and after the deadline all is back."""
        before = memory()
        payload = b'"' + b"x" * 100_000 + b'"'
        async with running(lease=0.5, grace=0.05) as it, it.worker("good", "g", credit=1) as good:
            await it.publish(*(f"t{i}" for i in range(200)), payload=payload)
            bad = await stuck(it, credit=200)
            await it.reaches(in_flight=100)
            await it.publish("quick", key="g")
            (got,) = await good.deliveries(1)
            assert got["task"]["id"] == "quick"
            await it.reaches(waiting=200, in_flight=0)
            async with it.worker("heir", credit=200) as heir:
                lost = [d.get("losses", 0) for d in await heir.deliveries(200)]
            assert 0 < sum(lost) < 100  # what never left the server was not lost
            # One payload is shared by all tasks here, so what grows is what was buffered.
            assert memory() - before < 100 * len(payload) + 16 * 1024 * 1024
            bad.close()

    async def test_what_was_never_sent_is_back_at_once(self) -> None:
        """E7: it need not wait for a worker that cannot have it, whatever the grace."""
        async with running(lease=0.3, grace=30) as it:
            payload = b'"' + b"x" * 100_000 + b'"'
            await it.publish(*(f"t{i}" for i in range(100)), payload=payload)
            bad = await stuck(it, credit=100)
            await it.reaches(in_flight=100)

            async def back() -> bool:
                return await it.count(State.WAITING) > 10

            await eventually(back)
            bad.close()

    async def test_a_flood_of_pings_is_not_answered_into_the_void(self) -> None:
        """Fault G10: pongs that nobody reads do not pile up."""
        async with running(lease=30) as it:
            bad = await stuck(it)
            before = memory()
            bad.settimeout(20)
            flood = (b"\x89\xfd" + bytes(4) + b"p" * 125) * 1000

            def send() -> None:
                for _ in range(120):
                    bad.sendall(flood)

            await asyncio.to_thread(send)
            assert memory() - before < 6 * 1024 * 1024
            bad.close()

    async def test_asking_without_reading_ends_it(self) -> None:
        """A worker that asks for answers and never reads them blocks itself only, until the deadline."""
        async with running(lease=0.4, grace=0) as it:
            bad = await stuck(it)
            frame = (
                b'{"type":"ack","receipts":['
                + b",".join(b'"' + b"r" * 190 + b'"' for _ in range(2))
                + b"]}"
            )
            flood = masked(frame) * 100

            def send() -> None:
                bad.settimeout(20)
                try:
                    for _ in range(2000):
                        bad.sendall(flood)
                except OSError:
                    return
                raise AssertionError("it was never cut off")

            await asyncio.to_thread(send)
            await eventually(lambda: len(it.hub.registry) == 0)
            bad.close()


class TestAnswers:
    """Those who ask over HTTP and never read."""

    async def test_an_answer_that_nobody_reads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Fault G1, over HTTP: the connection is broken after a while, and what it kept in memory is free."""
        monkeypatch.setattr("taskqueue_core.server.running.programs.ANSWER_SECONDS", 0.2)
        async with running() as it:
            ids = [f"t{i}" for i in range(40)]
            await it.publish(*ids)
            async with it.backend.subscribe(["k"], "w") as subscription:
                got = (await subscription.receive(40, 0)).deliveries
                await subscription.ack(*got, results=[b'"' + b"x" * 250_000 + b'"'] * 40)
            before = descriptors()
            body = msgspec.json.encode({"ids": ids})
            bad = plain.create_connection(("127.0.0.1", int(it.server.url.rsplit(":", 1)[1])))
            bad.setsockopt(plain.SOL_SOCKET, plain.SO_RCVBUF, 4096)
            bad.sendall(
                b"POST /v1/queues/k/results HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
            )
            await eventually(lambda: descriptors() == before + 2)
            await eventually(lambda: descriptors() == before + 1)
            bad.close()


class TestFrames:
    """Faults G8, G9 and G10: on the wire."""

    async def test_a_frame_that_never_ends(self) -> None:
        """A length of 1 GiB is refused as soon as it is declared."""
        async with running() as it:
            bad = await stuck(it)
            bad.settimeout(0)
            bad.send(b"\x81\xff" + (1 << 30).to_bytes(8, "big") + bytes(4))
            await eventually(lambda: len(it.hub.registry) == 0)
            bad.close()

    async def test_a_message_that_never_ends(self) -> None:
        """Fragments add up: a message beyond the limit is refused, and an unfinished one is silence."""
        async with running(lease=0.4, grace=0) as it:
            async with it.worker("endless") as worker:

                async def endless() -> Any:
                    while True:
                        yield "x" * 100_000

                with pytest.raises(ConnectionClosed):
                    await worker.socket.send(endless())
                assert worker.socket.close_code == 1009
            bad = await stuck(it, worker_id="unfinished")
            bad.send(masked(b'{"type":"pi', first=0x01))
            await eventually(lambda: len(it.hub.registry) == 0)
            bad.close()

    async def test_a_message_of_nothing(self) -> None:
        """Fault G10: empty fragments never reach the limit of a message's size; their number has one too."""
        async with running(lease=60) as it:
            bad = await stuck(it)
            bad.send(masked(b"{", first=0x01) + 2000 * masked(b"", first=0x00))
            await eventually(lambda: len(it.hub.registry) == 0)
            bad.close()

    @pytest.mark.parametrize(
        "frame",
        ['{"type":"hello","worker_id":"w","keys":["k"]}', "[" * 10_000, '{"type":"ack"}', ""],
        ids=["second hello", "deep", "missing field", "empty"],
    )
    async def test_an_error_is_named_before_the_close(self, frame: str) -> None:
        """Fault G9: the error frame says what was wrong, the close repeats its code and nothing else."""
        async with running() as it, it.worker() as worker:
            await worker.socket.send(frame)
            error = await worker.frame("error")
            assert await worker.closed() == 4400
            assert worker.socket.close_reason == error["code"]
            assert len(error["code"].encode()) <= 123

    async def test_an_unknown_type_is_no_reason_to_part(self) -> None:
        """A newer worker may say more than this server understands."""
        async with running() as it, it.worker() as worker:
            await worker.send("from_the_future")
            assert (await worker.frame("error"))["code"] == "unknown_type"
            await worker.send("ping", n=4)
            assert (await worker.frame("pong"))["n"] == 4

    async def test_hundreds_that_come_and_go_leave_nothing(self) -> None:
        """Fault G10: no task, descriptor or subscription is left of them."""
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
            await eventually(lambda: len(it.hub.registry) == 0)
            await eventually(lambda: descriptors() <= start)
            assert await it.backend.control.workers() == ()  # type: ignore[attr-defined]
            await it.reaches(in_flight=0)


def masked(payload: bytes, first: int = 0x81) -> bytes:
    """A client's frame with a mask of zeros."""
    size = len(payload)
    head = (
        bytes([first, 0x80 | size])
        if size < 126
        else bytes([first, 0xFE]) + size.to_bytes(2, "big")
    )
    return head + bytes(4) + payload


async def stuck(it: Running, credit: int = 0, worker_id: str = "stuck") -> plain.socket:
    """A worker that says hello on a raw socket with a tiny buffer, reads its welcome and nothing after."""
    _, port = it.server.url.rsplit(":", 1)
    raw = plain.socket()
    raw.setsockopt(plain.SOL_SOCKET, plain.SO_RCVBUF, 4096)
    raw.settimeout(0)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(raw, ("127.0.0.1", int(port)))
    hello = f'{{"type":"hello","worker_id":"{worker_id}","keys":["k"],"credit":{credit}}}'
    await loop.sock_sendall(
        raw,
        b"GET /v1/socket HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\n"
        b"Connection: Upgrade\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Protocol: taskqueue.v1\r\n\r\n",
    )
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += await loop.sock_recv(raw, 1)
    await loop.sock_sendall(raw, masked(hello.encode()))
    await eventually(lambda: it.hub.registry.connections(worker_id) == 1)
    return raw
