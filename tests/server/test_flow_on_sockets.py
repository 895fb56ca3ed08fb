"""Queue limits and pauses over real sockets: they apply at once, and to the workers of all servers together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx2

from taskqueue_core.limits import LIMITS
from taskqueue_core.tasks import State
from taskqueue_memory import MemoryBackend
from tests.server.support import SECONDS, Running, Worker, http, receipts, running

_SETTINGS = "/v1/queues/k/settings"
_MOMENT = 0.1
"""seconds to wait before checking that nothing happened; an event would take a few milliseconds"""


class Shared(MemoryBackend):
    """A memory backend that stays open when one of two servers closes it."""

    async def aclose(self) -> None:
        """Do nothing, because the other server still uses the backend."""


@asynccontextmanager
async def two_servers() -> AsyncIterator[tuple[Running, Running, httpx2.AsyncClient]]:
    """Run two servers on one store; yield both and an HTTP client of the first."""
    store = Shared()
    async with running(store) as one, running(store) as other, http(one) as api:
        yield one, other, api


async def held(worker: Worker, count: int) -> list[str]:
    """Wait for ``count`` deliveries and return their receipts."""
    return receipts(await worker.deliveries(count))


async def test_a_pause_reaches_the_workers_of_every_server() -> None:
    """F6, F7, OPEN-F1: once a pause is confirmed, no server delivers tasks of the queue.

    Workers stay connected, can settle, and receive tasks again after the resume.
    """
    async with (
        two_servers() as (one, other, api),
        one.worker("w1", credit=2) as w1,
        other.worker("w2", credit=2) as w2,
    ):
        await one.publish("a", "b")
        await one.reaches(in_flight=2)
        assert (await api.post("/v1/queues/k/pause")).json()["paused"]
        await one.publish("c", "d")
        await asyncio.sleep(_MOMENT)
        await one.reaches(in_flight=2, waiting=2)
        for worker in (w1, w2):
            async with asyncio.timeout(SECONDS):
                await worker.send("ping", n=1)
                await worker.frame("pong")
        delivered = [f for w in (w1, w2) for f in w.passed_over if f["type"] == "deliver"]
        (receipt, *_) = receipts(delivered[0]["deliveries"])
        holder = w1 if delivered[0] in w1.passed_over else w2
        await holder.send("ack", receipts=[receipt])
        assert await holder.settled(1) == ([receipt], [])
        await api.post("/v1/queues/k/resume")
        await one.reaches(in_flight=3, done=1)


async def test_a_limit_in_flight_holds_over_all_servers() -> None:
    """F2: the limit on tasks in flight applies to all servers together.

    Another task is delivered when one is settled, or when a worker dies.
    """
    async with two_servers() as (one, other, api), one.worker("w1", credit=5) as dying:
        await api.put(_SETTINGS, json={"max_inflight": 1})
        await one.publish("a")
        await held(dying, 1)
        async with other.worker("w2", credit=5) as alive:
            await one.publish("b", "c")
            await asyncio.sleep(_MOMENT)
            await one.reaches(in_flight=1, waiting=2)
            dying.break_off()
            (receipt,) = await held(alive, 1)
            await one.reaches(in_flight=1, waiting=2)
            await alive.send("ack", receipts=[receipt])
            await held(alive, 1)
            await one.reaches(in_flight=1, waiting=1, done=1)


async def test_a_rate_is_kept_and_can_be_changed() -> None:
    """F3, F7: no more than one burst is delivered at once.

    A changed rate also applies to a worker that is already waiting.
    """
    async with running() as one, http(one) as api, one.worker(credit=5) as worker:
        limit = {"max_tokens": 2, "interval": 1, "interval_unit": "HOURS"}
        await api.put(_SETTINGS, json={"rate_limit": limit})
        await one.publish("a", "b", "c")
        await held(worker, 2)
        await asyncio.sleep(_MOMENT)
        await one.reaches(in_flight=2, waiting=1)
        quick = {"max_tokens": 1000, "interval": 1, "interval_unit": "SECONDS"}
        await api.put(_SETTINGS, json={"version": 1, "rate_limit": quick})
        await held(worker, 1)


async def test_room_that_a_worker_makes_lets_a_publisher_in() -> None:
    """B13: a publish to a full queue is refused at once; a delivered task no longer counts against the capacity."""
    async with running() as one, http(one) as api:
        await api.put(_SETTINGS, json={"capacity": 1})

        async def publish() -> int:
            return (await api.post("/v1/tasks", json={"key": "k"})).status_code

        assert [await publish() for _ in range(3)] == [201, 429, 429]
        async with one.worker(credit=1) as worker:
            await held(worker, 1)
            assert [await publish() for _ in range(2)] == [201, 429]


async def test_bytes_that_a_worker_holds() -> None:
    """Row A5: whatever its credit, a worker holds at most `Limits.held` bytes, and gets more once it settles some."""
    payload = b'"' + b"x" * (LIMITS.payload - 2) + b'"'
    most = LIMITS.held // LIMITS.payload
    async with running() as it, it.worker("w1", credit=2 * most) as worker:
        await it.publish(*(f"t{n}" for n in range(most + 50)), payload=payload)
        taken = await held(worker, most - 2)
        await worker.send("ping", n=1)
        await worker.frame("pong")
        assert await it.count(State.IN_FLIGHT) <= most
        await worker.send("ack", receipts=taken[:40])
        await worker.settled(40)
        await held(worker, 40)
        assert await it.count(State.IN_FLIGHT) <= most
