"""Handlers that process several tasks in one call, in a local worker and over a socket."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel

from taskqueue_core.capabilities import control_of, dead_letters_of
from taskqueue_core.errors import ConfigurationError
from taskqueue_core.protocol.frames import AckFrame
from taskqueue_core.queue import Queue
from taskqueue_core.tasks import State
from taskqueue_memory import MemoryBackend
from taskqueue_worker import Context, LocalWorker, Reject, Worker
from tests.worker.fake import FakeServer, running, work
from tests.worker.local import ledger_when, publish, serving, status, until


class Image(BaseModel):
    """A model as the type of a payload."""

    name: str


@pytest.mark.parametrize("sync", [True, False])
async def test_one_call_takes_several_tasks(*, sync: bool) -> None:
    """One call gets several payloads and contexts in the same order, and each task gets its own result."""
    backend = MemoryBackend()
    worker = LocalWorker(backend=backend)
    sizes: list[int] = []

    def name(images: list[Image], contexts: list[Context]) -> list[str]:
        sizes.append(len(images))
        return [f"{i.name} {c.task_id}" for i, c in zip(images, contexts, strict=True)]

    if sync:
        worker.task("work", batch=10)(name)
    else:

        @worker.task("work", batch=10)
        async def name_async(images: list[Image], contexts: list[Context]) -> list[str]:
            return name(images, contexts)

    ids = await publish(backend, *[{"name": f"n{n}"} for n in range(95)])
    async with serving(worker):
        await ledger_when(backend, lambda ledger: ledger.done == 95)
    queue = Queue(backend)
    assert [await queue.result("work", one) for one in ids] == [
        f"n{n} {one}" for n, one in enumerate(ids)
    ]
    assert max(sizes) == 10
    assert sum(sizes) == 95
    assert len(sizes) <= 15


async def test_each_task_of_a_batch_may_end_in_its_own_way() -> None:
    """Each task of a batch has its own outcome.

    An exception in the list of results or an invalid payload fails only its own task.
    """
    backend = MemoryBackend()
    worker = LocalWorker(backend=backend)

    @worker.task("work", batch=10)
    async def act(numbers: list[int]) -> list[object]:
        ends: dict[int, object] = {1: None, 2: ValueError("two"), 3: Reject("three"), 4: 4}
        return [ends[n] for n in numbers]

    ids = await publish(backend, 1, 2, 3, 4, "none")
    async with serving(worker):
        await ledger_when(
            backend, lambda ledger: (ledger.done, ledger.scheduled, ledger.dead) == (2, 1, 2)
        )
    assert (await status(backend, ids[1])).error == "ValueError: two"
    reasons = {one.task.id: one.reason for one in await dead_letters_of(backend).list("work")}
    assert reasons == {ids[2]: "three", ids[4]: "invalid_payload"}


@pytest.mark.parametrize("end", ["raises", "too few", "no list", "hangs"])
async def test_a_failed_call_fails_each(end: str) -> None:
    """If the call of a batch handler fails as a whole, each of its tasks is retried on its own."""
    backend = MemoryBackend()
    worker = LocalWorker(backend=backend)

    @worker.task("work", batch=10, timeout=0.05)
    async def act(items: list[int]) -> Any:
        match end:
            case "raises":
                raise ValueError("all")
            case "too few":
                return items[1:]
            case "no list":
                return "abc"
        await asyncio.sleep(60)
        return None

    ids = await publish(backend, 1, 2, 3)
    async with serving(worker):
        await ledger_when(backend, lambda ledger: ledger.scheduled == 3)
    found = [await status(backend, one) for one in ids]
    assert [(one.state, one.attempt) for one in found] == [(State.SCHEDULED, 2)] * 3
    word = {"raises": "ValueError: all", "hangs": "timeout"}.get(end, "one result per task (3)")
    assert all(one.error is not None and word in one.error for one in found)


async def test_batches_are_full_under_load_and_never_wait_for_company() -> None:
    """A single task starts at once; while it runs, the next tasks are collected into a full batch.

    Tasks of other handlers run meanwhile.
    """
    backend = MemoryBackend()
    worker = LocalWorker(backend=backend, concurrency=8)
    gate = asyncio.Event()
    sizes: list[int] = []
    singles: list[int] = []

    @worker.task("work", batch=4)
    async def act(items: list[int]) -> None:
        sizes.append(len(items))
        await gate.wait()

    @worker.task("single")
    async def single(n: int) -> None:
        singles.append(n)

    async with serving(worker):
        await publish(backend, 0)
        await until(lambda: sizes == [1])
        await publish(backend, *range(3))
        await publish(backend, *range(5), key="single")
        await until(lambda: len(singles) == 5)
        assert sizes == [1]
        await publish(backend, *range(3))
        await until(lambda: sizes == [1, 4])
        gate.set()
        await ledger_when(backend, lambda ledger: ledger.done == 7)
    assert sizes[:2] == [1, 4]
    assert sum(sizes) == 7


async def test_a_revoked_task_leaves_its_batch_running() -> None:
    """The coroutine of a batch is cancelled only when all tasks of the batch have been revoked."""
    backend = MemoryBackend()
    worker = LocalWorker(backend=backend)
    gate = asyncio.Event()
    seen: list[Context] = []
    cancelled: list[int] = []

    @worker.task("work", batch=2)
    async def act(items: list[int], contexts: list[Context]) -> None:
        seen.extend(contexts)
        try:
            await gate.wait()
        except asyncio.CancelledError:
            cancelled.append(len(items))
            raise

    first, _ = await publish(backend, 1, 2)
    async with serving(worker):
        await until(lambda: len(seen) == 2)
        await control_of(backend).cancel("work", first)
        await until(lambda: seen[0].revoked)
        assert not cancelled
        gate.set()
        await ledger_when(backend, lambda ledger: (ledger.cancelled, ledger.done) == (1, 1))
        gate.clear()
        for one in await publish(backend, 3, 4):
            await ledger_when(backend, lambda ledger: ledger.in_flight)
            await control_of(backend).cancel("work", one)
        await ledger_when(backend, lambda ledger: ledger.cancelled == 3)
    assert sum(cancelled) == 2


async def test_stopping_releases_batches() -> None:
    """D10: a stopping worker releases the tasks of waiting and running batches, and none counts as lost."""
    backend = MemoryBackend()
    worker = LocalWorker(backend=backend, concurrency=6, grace=0.02)
    hang = threading.Event()

    @worker.task("work", batch=4)
    def act(_items: list[int]) -> None:
        hang.wait(30)

    await publish(backend, *range(12))
    async with serving(worker) as ended:
        await ledger_when(backend, lambda ledger: ledger.in_flight == 6)
        worker.stop()
        await ended
        ledger = await control_of(backend).ledger("work")
        assert (ledger.waiting, (await control_of(backend).stats("work")).lost) == (12, 0)
    hang.set()


async def test_batches_over_a_socket(server: FakeServer) -> None:
    """The websocket worker also runs batches, and acks each task of a batch."""
    worker = Worker(url=server.url)

    @worker.task("work", batch=5)
    async def add(numbers: list[int]) -> list[int]:
        return [n + len(numbers) for n in numbers]

    async with running(worker):
        peer = await server.welcomed()
        tasks = [work(n) for n in range(5)]
        await peer.deliver(*tasks)
        results: dict[str, bytes] = {}
        while len(results) < 5:
            ack = await peer.next(AckFrame)
            results |= {receipt: bytes(result) for receipt, result in ack.results.items()}
        assert results == {one.receipt: str(n + 5).encode() for n, one in enumerate(tasks)}


def _pair(_a: list[int], _b: list[int]) -> None: ...
def _single(_a: int) -> None: ...
def _spread(*_a: list[int]) -> None: ...
def _contexts(_a: list[Context]) -> None: ...
def _right(_a: list[int]) -> None: ...


@pytest.mark.parametrize(
    ("function", "size", "fault"),
    [
        (_pair, 2, "one parameter for payloads, but has 2"),
        (_contexts, 2, "one parameter for payloads, but has 0"),
        (_single, 2, r"as list\[...\]"),
        (_spread, 2, "by name"),
        (_right, 0, "from 1 to 1000"),
        (_right, 1001, "from 1 to 1000"),
    ],
)
def test_registrations_that_are_refused(
    function: Callable[..., Any], size: int, fault: str
) -> None:
    """An invalid batch handler is refused when it is registered, with a clear error."""
    with pytest.raises(ConfigurationError, match=fault):
        Worker(url="http://h").task("work", batch=size)(function)
