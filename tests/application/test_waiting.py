"""Waits for results on a store: how many polls they need, and how they end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from taskqueue_core import InvalidInput, Queue, Tasks, as_completed, gather
from taskqueue_core.errors import BackendUnavailable
from taskqueue_core.tasks import TaskStatus
from taskqueue_memory import MemoryBackend
from taskqueue_worker import LocalWorker
from tests.application.running import working
from tests.worker.local import until

tasks = Tasks()
Answer = tuple[TaskStatus | None, ...]


@tasks.task
async def same(value: int) -> int:
    """Return the argument."""
    return value


@tasks.task
async def other(value: int) -> int:
    """Return the argument, from another queue."""
    return value


def polls_of(
    backend: MemoryBackend,
    monkeypatch: pytest.MonkeyPatch,
    then: Callable[[int], Awaitable[None]] | None = None,
) -> list[tuple[str, int]]:
    """Return a list that gets the key and the number of ids of each poll. ``then`` is called with the poll's number."""
    polls: list[tuple[str, int]] = []
    statuses = type(backend.control).statuses

    async def counted(control: object, key: str, *ids: str) -> Answer:
        polls.append((key, len(ids)))
        if then is not None:
            await then(len(polls))
        return await statuses(control, key, *ids)  # type: ignore[arg-type]  # it is that class

    monkeypatch.setattr(type(backend.control), "statuses", counted)
    return polls


async def test_waits_share_their_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """U6: any number of waits on a store need one poll per queue and round, and none when nothing waits."""
    backend = MemoryBackend()
    fifth = asyncio.Event()

    async def then(number: int) -> None:
        if number == 5:
            fifth.set()

    polls = polls_of(backend, monkeypatch, then)
    before = asyncio.all_tasks()
    async with tasks.connect(Queue(backend)):
        handles = await tasks.publish_many(same.call(number) for number in range(1500))
        results = asyncio.create_task(gather(*handles, timeout=30))
        await fifth.wait()
        assert {count for _, count in polls[:4]} == {1000, 500}
        async with working(LocalWorker(tasks, backend=backend)):
            assert await results == list(range(1500))
    assert sum(count for _, count in polls) >= 2 * 1500
    assert len(polls) < 100
    await until(lambda: not asyncio.all_tasks() - before)


async def test_a_cancelled_wait_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """U6: a wait that ends early takes nothing away from the waits for the same task and for others."""
    backend = MemoryBackend()
    polls = polls_of(backend, monkeypatch)
    async with tasks.connect(Queue(backend)):
        handle, second = await same.publish(1), await other.publish(2)
        with pytest.raises(TimeoutError):
            await handle.result(timeout=0)
        waits = [asyncio.create_task(one.result()) for one in (handle, handle, second)]
        await until(lambda: polls)
        waits[0].cancel()
        async with working(LocalWorker(tasks, backend=backend)):
            assert await asyncio.gather(*waits[1:]) == [1, 2]
        with pytest.raises(asyncio.CancelledError):
            await waits[0]


async def test_each_wait_gets_the_error_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """U6: if the store is unavailable, all waits raise its error, and a later wait works again."""
    backend = MemoryBackend()

    async def then(number: int) -> None:
        if number == 1:
            raise BackendUnavailable("the store is away")

    polls_of(backend, monkeypatch, then)
    async with tasks.connect(Queue(backend)):
        handles = [await same.publish(1), await same.publish(2)]
        errors = await asyncio.gather(*[one.result() for one in handles], return_exceptions=True)
        assert [str(error) for error in errors] == ["the store is away"] * 2
        async with working(LocalWorker(tasks, backend=backend)):
            assert await gather(*handles, timeout=30) == [1, 2]


@pytest.mark.parametrize("timeout", [float("nan"), "5", True])
async def test_a_timeout_that_is_no_number(timeout: Any) -> None:
    """U6: NaN, which would confuse the timers of the event loop, and values of other types are refused by name."""
    async with tasks.connect(Queue(MemoryBackend())):
        handle = await same.publish(1)
        with pytest.raises(InvalidInput, match=r"^timeout"):
            await handle.result(timeout)
        with pytest.raises(InvalidInput, match=r"^timeout"):
            await gather(handle, timeout=timeout)
        with pytest.raises(InvalidInput, match=r"^timeout"):
            await anext(as_completed([handle], timeout))
        with pytest.raises(TimeoutError):
            await handle.result(-1)
