"""`LocalWorker` on the Redis backend."""

from __future__ import annotations

import asyncio

from taskqueue_core.capabilities import control_of
from taskqueue_core.loading import load_backend
from taskqueue_worker import Context, LocalWorker
from tests.worker.local import ledger_when, publish, serving, until


async def test_a_drain_with_every_kind_of_handler(redis_url: str) -> None:
    """A17, FIX-C2: two workers on the same queues execute each task once, with single and with batch handlers."""
    backends = [load_backend("redis"), load_backend("redis")]
    seen: list[int] = []
    workers = [LocalWorker(backend=backend, concurrency=50) for backend in backends]
    for worker in workers:

        @worker.task("work")
        async def note(n: int) -> int:
            seen.append(n)
            await asyncio.sleep(0)
            return n

        @worker.task("batch", batch=20)
        async def note_all(numbers: list[int]) -> list[int]:
            seen.extend(numbers)
            return numbers

    assert redis_url
    await publish(backends[0], *range(500))
    await publish(backends[0], *range(500, 1000), key="batch")
    try:
        async with serving(workers[0]), serving(workers[1]):
            await ledger_when(backends[0], lambda ledger: ledger.done == 500)
            await ledger_when(backends[0], lambda ledger: ledger.done == 500, "batch")
        assert sorted(seen) == list(range(1000))
    finally:
        for backend in backends:
            await backend.aclose()


async def test_stopping_and_cancelling(redis_url: str) -> None:
    """A13, D10: a cancelled task is revoked in its worker, and a stopped worker releases its tasks before it ends."""
    assert redis_url
    backend = load_backend("redis")
    worker = LocalWorker(backend=backend, concurrency=2, grace=0.05)
    contexts: list[Context] = []

    @worker.task("work")
    async def wait(context: Context) -> None:
        contexts.append(context)
        await asyncio.sleep(60)

    first, *_ = await publish(backend, *[None] * 4)
    try:
        async with serving(worker) as ended:
            await until(lambda: len(contexts) == 2)
            await control_of(backend).cancel("work", contexts[0].task_id)
            await until(lambda: len(contexts) == 3)
            assert contexts[0].revoked
            worker.stop()
            await ended
            ledger = await control_of(backend).ledger("work")
            assert (ledger.cancelled, ledger.waiting, ledger.in_flight) == (1, 3, 0)
            assert (await control_of(backend).stats("work")).lost == 0
    finally:
        await backend.aclose()
    assert first == contexts[0].task_id
