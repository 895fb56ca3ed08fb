"""The worker socket under load: the behaviour of one client does not slow down the other clients."""

from __future__ import annotations

import asyncio
import contextlib
import socket as plain
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager

import pytest

from taskqueue_core.capabilities import QueueSettings, control_of
from taskqueue_core.config import Settings
from taskqueue_core.errors import QueueFull
from taskqueue_core.tasks import State
from tests.chaos.proxy import FaultProxy
from tests.server.observed import Observed, eventually_connected, observed
from tests.server.rude import CLOSE, PING, RawSocket, frame
from tests.server.support import Worker, eventually, receipts, running

MB = 1 << 20
PAYLOAD = 50_000
TURN = 0.05
"""maximum processor seconds of one event loop iteration, far less than for all that one client has sent"""


def bodies(count: int, size: int = PAYLOAD) -> list[bytes]:
    """Return ``count`` different payloads of ``size`` bytes."""
    return [b'"%06d' % n + b"x" * (size - 8) + b'"' for n in range(count)]


async def warmed(it: Observed, key: str, count: int) -> None:
    """Deliver ``count`` tasks to a worker and take them back.

    This allocates the memory that the server keeps, before anything is measured.
    """
    async with it.worker("warm", key, credit=count) as worker:
        await worker.deliveries(count)
        await worker.send("bye")
        assert await worker.closed() == 1000
    await it.reaches(key, in_flight=0)


@asynccontextmanager
async def good(it: Observed) -> AsyncIterator[Callable[[int], Awaitable[None]]]:
    """Run a well-behaved worker; yield a function that redelivers its task to it ``count`` times."""
    await it.publish("g", [b"1"])
    async with it.worker("good", "g", credit=1) as worker:

        async def turns(count: int) -> None:
            for _ in range(count):
                (got,) = await worker.deliveries(1)
                await worker.send("redeliver", receipts=[got["receipt"]])
                await worker.send("credit", n=1)

        yield turns


class TestSlowReaders:
    """Faults G1 and G2: workers that read slowly or not at all."""

    @pytest.mark.long
    async def test_never_reading_costs_the_credit(self) -> None:
        """Fault G1: a worker that never reads holds no more tasks and memory than its credit allows.

        After the deadline it is disconnected, and all its tasks return to the queue.
        """
        credit, stuck = 40, 3
        async with observed(lease=2.5, grace=0.05) as it, AsyncExitStack() as sockets:
            await it.publish("k", bodies(200))
            await warmed(it, "k", 100)

            async def stick(name: str) -> None:
                raw = await it.raw(name, socket={"receive_buffer": 4096})
                sockets.enter_context(raw)
                raw.say("credit", n=credit)

            await stick("first")  # The first connection allocates memory that the process keeps.
            await it.reaches("k", waiting=200 - credit, in_flight=credit)
            await it.reaches("k", waiting=200, in_flight=0)
            before = await it.look()
            it.forget_peak()
            await asyncio.gather(*(stick(f"stuck{n}") for n in range(stuck)))
            await it.reaches("k", in_flight=stuck * credit)
            assert (await it.look()).rss - before.rss <= stuck * credit * PAYLOAD + MB
            while in_flight := (await it.ledger("k")).in_flight:
                assert in_flight <= stuck * credit
                await asyncio.sleep(0.05)
            assert it.peak - before.rss <= stuck * credit * PAYLOAD + MB
            assert (await it.ledger("k")).waiting == 200
            await it.settles_to(before, rss=2 * MB)  # Python allocates memory in blocks of 1 MiB.

    async def test_reading_a_byte_at_a_time_disturbs_no_other_client(self) -> None:
        """Fault G2: a worker that reads one byte at a time is disconnected like one that never reads.

        Other workers are served as usual.
        """
        async with observed(lease=1.0, grace=0.05) as it, good(it) as turns:
            await it.publish("k", bodies(100))
            await turns(1)
            before = await it.look()
            async with AsyncExitStack() as sockets:
                for n in range(5):
                    raw = await it.raw(f"slow{n}", credit=20, socket={"receive_buffer": 4096})
                    sockets.enter_context(raw)
                    reading = asyncio.create_task(trickle(raw))
                    sockets.push_async_callback(gone, reading)
                await it.reaches("k", in_flight=100)
                assert await it.longest_turn() < TURN
                await turns(10)
                await it.reaches("k", waiting=100)
            await it.settles_to(before)


async def trickle(raw: RawSocket) -> None:
    """Read one byte every 0.2 seconds, until the server closes the connection."""
    with contextlib.suppress(TimeoutError, OSError):
        heard = b"?"
        while heard:
            heard, _ = await asyncio.gather(raw.heard(1), asyncio.sleep(0.2))


async def gone(task: asyncio.Task[None]) -> None:
    """Cancel a task and wait for its end."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.fast_clock
class TestDeadPeers:
    """Faults G3 and G4: workers that no longer respond, or respond without making progress."""

    async def test_a_link_that_leads_nowhere(self) -> None:
        """Fault G3: if the network drops all packets, the server notices within a lease.

        The task of the worker returns to the queue after the grace.
        """
        lease, grace = (
            Settings.model_fields["lease"].default,
            Settings.model_fields["grace"].default,
        )
        assert (lease, grace) <= (15, 0.5)
        loop = asyncio.get_running_loop()
        async with running(lease=lease, grace=grace) as it:
            await it.publish("a")
            async with FaultProxy(("127.0.0.1", it.port)) as link:
                url = f"ws://127.0.0.1:{link.address[1]}/v1/socket"
                worker = Worker(url, {"worker_id": "w", "keys": ["k"], "credit": 1})
                async with worker:
                    await worker.deliveries(1)
                    link.block()
                    began = loop.time()
                    await it.reaches(waiting=1, seconds=30)
                    assert loop.time() - began < lease + grace + 1.0
                    link.heal()
                    worker.break_off()
            await eventually(lambda: len(it.context.registry) == 0)

    async def test_pings_are_no_progress(self) -> None:
        """Fault G4: a worker that answers pings but settles nothing keeps a task for max_processing_time only.

        Then the task counts as lost and is delivered again.
        """
        async with running(lease=5, grace=0.5) as it, it.worker("idle", credit=1) as idle:
            limits = QueueSettings(max_processing_time=12)
            await control_of(it.backend).configure("k", limits)
            await it.publish("a")
            (got,) = await idle.deliveries(1)
            async with it.worker("other", credit=1) as other:
                taken = asyncio.create_task(other.frame("deliver", seconds=60))
                assert (await idle.frame("revoke", seconds=60))["receipts"] == [got["receipt"]]
                (again,) = (await taken)["deliveries"]
                assert (again["attempt"], again["losses"]) == (1, 1)
                await idle.send("ack", receipts=[got["receipt"]])
                assert await idle.settled(1) == ([], [got["receipt"]])
                await other.send("ack", receipts=[again["receipt"]])
                assert await other.settled(1) == ([again["receipt"]], [])


ENDS = [
    pytest.param(None, 1, id="1006 by reset"),
    pytest.param(b"", 1, id="1006 by the end of the stream"),
    pytest.param(frame((1001).to_bytes(2, "big"), CLOSE), 0, id="1001"),
    pytest.param(frame((1000).to_bytes(2, "big"), CLOSE), 0, id="1000"),
    pytest.param(frame((4321).to_bytes(2, "big") + b"reason", CLOSE), 1, id="4321"),
]


class TestEndsUnderFire:
    """Fault G13: connections that end while the server sends at full speed."""

    @pytest.mark.parametrize(("farewell", "losses"), ENDS)
    async def test_each_is_back_once(self, farewell: bytes | None, losses: int) -> None:
        """Fault G13: each unsettled task returns to the queue once, and counts as lost only after an abnormal end."""
        async with running(lease=1.0, grace=0.02) as it:
            await it.publish(*(f"t{n}" for n in range(120)), payload=bodies(1, 60_000)[0])
            with await RawSocket.opened(it.port, receive_buffer=4096) as raw:
                raw.say("hello", worker_id="w", keys=["k"], credit=120)
                await raw.heard()
                await eventually(lambda: it.context.registry.connections("w") == 1)

                async def busy() -> bool:
                    return await it.count(State.IN_FLIGHT) >= 100

                await eventually(busy)
                for _ in range(20):
                    await raw.heard(4096)
                if farewell:
                    await raw.send(farewell)
                    await raw.end()
                raw.close(reset=farewell is None)
            await it.reaches(waiting=120)
            async with it.worker("heir", credit=120) as heir:
                got = await heir.deliveries(120)
                assert len({one["task"]["id"] for one in got}) == 120
                # Deliveries that never left the server do not count as lost.
                assert max(one.get("losses", 0) for one in got) == losses
                await heir.send("ack", receipts=receipts(got))
                assert len((await heir.settled(120))[0]) == 120


@contextmanager
def flood(port: int, data: bytes) -> Iterator[None]:
    """Send the same bytes repeatedly at full speed, and read all responses, until the end of the block."""
    raw = plain.create_connection(("127.0.0.1", port))
    raw.sendall(
        b"GET /v1/socket HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\n"
        b"Connection: Upgrade\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Protocol: taskqueue.v1\r\n\r\n"
    )
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += raw.recv(1)
    raw.sendall(frame(b'{"type":"hello","worker_id":"flood","keys":["k"]}'))

    def send() -> None:
        with contextlib.suppress(OSError):
            while True:
                raw.sendall(data)

    def read() -> None:
        with contextlib.suppress(OSError):
            while raw.recv(MB):
                pass

    threads = [threading.Thread(target=work, daemon=True) for work in (send, read)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            raw.shutdown(plain.SHUT_RDWR)
        for thread in threads:
            thread.join()
        raw.close()


FLOODS = {
    "pings": frame(b'{"type":"ping","n":1}'),
    "pings of the transport": frame(b"", PING),
    "acks": frame(b'{"type":"ack","receipts":["a","b"]}'),
    "progress": frame(b'{"type":"progress","receipt":"a","value":0.5}'),
    "credit and settlements": frame(b'{"type":"credit","n":1}')
    + frame(b'{"type":"redeliver","receipts":["a"]}') * 50,
    "fragments": frame(b'{"type":"pi', fin=False) + frame(b'ng"}', 0),
}


class TestFloods:
    """Fault G10: clients that send frames at full speed."""

    async def test_a_flood_starves_no_other_client(self) -> None:
        """Fault G10: while one client sends without a pause, other clients are served and memory use stays small."""
        async with observed(lease=10) as it, good(it) as turns:
            await turns(1)
            before = await it.look()
            for name, unit in FLOODS.items():
                with flood(it.port, unit * (2 * MB // len(unit) // 10)):
                    await eventually_connected(it, 2)
                    assert await it.longest_turn() < TURN, name
                    await turns(2)
                    assert (await it.look()).rss - before.rss < 6 * MB, name
                await it.settles_to(before, rss=6 * MB)


class TestFanIn:
    """One socket for all keys of a worker."""

    async def test_a_hundred_keys_are_one_socket(self) -> None:
        """E7, REV-E6: a worker with a hundred keys uses one socket, and as many asyncio tasks as a worker with one key.

        All keys are served, and everything is settled on the one socket.
        """
        keys = [f"k{n}" for n in range(100)]
        async with running() as it:
            for key in keys:
                await it.publish("1", "2", "3", key=key)
            async with it.worker("one", "k0", credit=1) as one:
                await one.deliveries(1)
                alone = len(asyncio.all_tasks())
            await eventually(lambda: len(it.context.registry) == 0)
            async with it.worker("many", *keys, credit=100) as many:
                first = await many.deliveries(100)
                assert {got["task"]["key"] for got in first} == set(keys)
                assert len(asyncio.all_tasks()) == alone
                await many.send("credit", n=200)
                both = receipts([*first, *await many.deliveries(200)])
                await many.send("ack", receipts=both)
                assert sorted((await many.settled(300))[0]) == sorted(both)

    async def test_a_full_queue_takes_back_what_it_gave(self) -> None:
        """REV-E4: redelivered and retried tasks return even to a full queue, which refuses new tasks."""
        async with running() as it:
            await control_of(it.backend).configure("k", QueueSettings(capacity=6))
            await it.publish(*(f"t{n}" for n in range(6)))
            async with it.worker(credit=6) as worker:
                got = receipts(await worker.deliveries(6))
                with contextlib.suppress(QueueFull):
                    await it.publish(*(f"new{n}" for n in range(9)))
                assert (await it.ledger()).waiting == 6
                await worker.send("redeliver", receipts=got[:3])
                for receipt in got[3:]:
                    await worker.send("retry", receipt=receipt, error="e", delay=0)
                assert sorted((await worker.settled(6))[0]) == sorted(got)
                await worker.send("credit", n=20)
                again = await worker.deliveries(12)
                assert {f"t{n}" for n in range(6)} <= {one["task"]["id"] for one in again}
