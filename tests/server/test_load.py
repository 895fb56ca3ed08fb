"""The socket under load, against a server in a process of its own: what one peer does costs the others nothing."""

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
"""processor seconds that one turn of a server's loop may take: all that one peer has sent would take many times that"""


def bodies(count: int, size: int = PAYLOAD) -> list[bytes]:
    """Payloads of which no two are alike."""
    return [b'"%06d' % n + b"x" * (size - 8) + b'"' for n in range(count)]


async def warmed(it: Observed, key: str, count: int) -> None:
    """Have a well-behaved worker take so many and hand them back, so that what is loaded once is loaded."""
    async with it.worker("warm", key, credit=count) as worker:
        await worker.deliveries(count)
        await worker.send("bye")
        assert await worker.closed() == 1000
    await it.reaches(key, in_flight=0)


@asynccontextmanager
async def good(it: Observed) -> AsyncIterator[Callable[[int], Awaitable[None]]]:
    """A worker with manners, which hands its task back and gets it again as often as it is asked to."""
    await it.publish("g", [b"1"])
    async with it.worker("good", "g", credit=1) as worker:

        async def turns(count: int) -> None:
            for _ in range(count):
                (got,) = await worker.deliveries(1)
                await worker.send("redeliver", receipts=[got["receipt"]])
                await worker.send("credit", n=1)

        yield turns


class TestSlowReaders:
    """Faults G1 and G2."""

    @pytest.mark.long
    async def test_never_reading_costs_the_credit(self) -> None:
        """Fault G1: no more than the credit is out or in memory; after the deadline it is closed, and all is back."""
        credit, stuck = 40, 3
        async with observed(lease=2.5, grace=0.05) as it, AsyncExitStack() as sockets:
            await it.publish("k", bodies(200))
            await warmed(it, "k", 100)

            async def stick(name: str) -> None:
                raw = await it.raw(name, socket={"receive_buffer": 4096})
                sockets.enter_context(raw)
                raw.say("credit", n=credit)

            await stick("first")  # what the very first one costs stays with the process
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
            await it.settles_to(before, rss=2 * MB)  # Python takes its memory by pieces of one

    async def test_reading_a_byte_at_a_time_disturbs_no_other_client(self) -> None:
        """Fault G2: who reads a byte now and then is as good as one that never reads; others are served as before."""
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
    """Read a byte now and then, until the server has enough of it."""
    with contextlib.suppress(TimeoutError, OSError):
        heard = b"?"
        while heard:
            heard, _ = await asyncio.gather(raw.heard(1), asyncio.sleep(0.2))


async def gone(task: asyncio.Task[None]) -> None:
    """End a task."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.fast_clock
class TestDeadPeers:
    """Faults G3 and G4."""

    async def test_a_link_that_leads_nowhere(self) -> None:
        """Fault G3: all sockets stay open and nothing passes: it is found within a lease, and its task is back soon."""
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
        """Fault G4: who answers and never settles keeps a task for max_processing_time; then it counts as lost."""
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
    """Fault G13: the server sends at full speed meanwhile."""

    @pytest.mark.parametrize(("farewell", "losses"), ENDS)
    async def test_each_is_back_once(self, farewell: bytes | None, losses: int) -> None:
        """Fault G13: what is unsettled goes back once, as lost or not; nothing is doubled."""
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
                # What never left the server was not lost with the peer.
                assert max(one.get("losses", 0) for one in got) == losses
                await heir.send("ack", receipts=receipts(got))
                assert len((await heir.settled(120))[0]) == 120


@contextmanager
def flood(port: int, data: bytes) -> Iterator[None]:
    """Send the same at full speed, over and over, and read whatever comes."""
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
    """Fault G10: frames at full speed."""

    async def test_a_flood_starves_no_other_client(self) -> None:
        """Fault G10: whatever is sent without a pause, others have their turn, and no memory is taken."""
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
        """E7, REV-E6: as many tasks of the loop as for one key; each key has its turn; all is settled on one socket."""
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
        """REV-E4: who retries or hands back is neither refused nor dropped, though nothing more may be published."""
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
