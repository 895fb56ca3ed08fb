"""Large operations run in steps and let other coroutines run in between, even with a store in the same process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest

from taskqueue_core.tasks import Confirmation, Delivery, Task
from taskqueue_memory import MemoryBackend

_MANY = 3000
_IDS = [f"t{n}" for n in range(_MANY)]


class _Turns:
    """Counts how often another coroutine has run."""

    def __init__(self) -> None:
        self.number = 0

    async def take(self) -> None:
        """Count one step after another, and yield to the event loop after each."""
        while True:
            self.number += 1
            await asyncio.sleep(0)


@asynccontextmanager
async def turns() -> AsyncIterator[_Turns]:
    """Run another coroutine until the end of the block, and yield its counter."""
    counted = _Turns()
    other = asyncio.create_task(counted.take())
    await asyncio.sleep(0)
    yield counted
    other.cancel()


async def publish(backend: MemoryBackend) -> None:
    """Publish many tasks."""
    await backend.publisher.publish(*(Task(key="k", id=i) for i in _IDS))


async def receive(backend: MemoryBackend, number: int) -> tuple[Any, Sequence[Delivery]]:
    """Return a subscription and ``number`` deliveries."""
    subscription = backend.subscribe(["k"], "w")
    return subscription, (await subscription.receive(number, 0)).deliveries


@pytest.mark.parametrize("verb", ["redrive", "discard"])
async def test_all_the_dead(backend: MemoryBackend, verb: str) -> None:
    """Fault K6: redrive and discard of many dead letters let other coroutines run in between.

    If two calls run at the same time, each dead letter is processed once.
    """
    await publish(backend)
    subscription, deliveries = await receive(backend, _MANY)
    for delivery in deliveries:
        await subscription.dead_letter(delivery, "no")
    letters = backend.dead_letters
    async with turns() as others:
        before = others.number
        one = asyncio.create_task(getattr(letters, verb)("k"))
        other = asyncio.create_task(getattr(letters, verb)("k"))
        assert await one + await other == _MANY
        assert others.number - before >= 3
    ledger = await backend.control.ledger("k")
    assert (ledger.dead, ledger.waiting + ledger.discarded) == (0, _MANY)
    assert ledger.balanced
    await subscription.close()


async def test_purge(backend: MemoryBackend) -> None:
    """Fault K6: a purge lets other coroutines run in between, and leaves tasks alone that are delivered meanwhile."""
    await publish(backend)
    async with turns() as others:
        before = others.number
        purging = asyncio.create_task(backend.control.purge("k"))
        await asyncio.sleep(0)
        subscription, deliveries = await receive(backend, 10)
        assert await purging == _MANY - 10
        assert others.number - before >= 3
    assert len(deliveries) == 10
    ledger = await backend.control.ledger("k")
    assert (ledger.waiting, ledger.in_flight, ledger.cancelled) == (0, 10, _MANY - 10)
    await subscription.ack(*deliveries)
    await subscription.close()


async def test_a_batch(
    api: httpx2.AsyncClient, backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault K5: the lines of a batch are published in several steps, even if they all arrive at once."""
    published: list[int] = []
    publish_some = backend.publisher.publish
    async with turns() as others:

        async def noted(*tasks: Task) -> list[Confirmation]:
            published.append(others.number)
            return list(await publish_some(*tasks))

        monkeypatch.setattr(backend.publisher, "publish", noted)
        lines = b"".join(b'{"key":"k","id":"%s"}\n' % i.encode() for i in _IDS)
        answer = await api.post(
            "/v1/tasks/batch", content=lines, headers={"content-type": "application/x-ndjson"}
        )
    assert answer.text.count("accepted") == _MANY
    assert len(published) == len(set(published)) == 3
