"""Slots that calls lend, and the deliveries that a session accepts for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from taskqueue_core import Queue, Tasks, WouldBlock
from taskqueue_core.protocol.frames import Credit, Deliver, RedeliverFrame
from taskqueue_core.retry import Success
from taskqueue_memory import MemoryBackend
from taskqueue_worker import Context
from taskqueue_worker.outcomes import HandlerCall, RunningTask
from taskqueue_worker.slots import SlotLoan, Slots
from taskqueue_worker.worker_scope import WorkerScope
from tests.worker.fake import work
from tests.worker.local import until
from tests.worker.sessions import get, ready, sent


async def handler() -> None:
    """Do nothing."""


tasks = Tasks()
declared = tasks.task("work")(handler)


class Worker:
    """Slots, and calls that take them."""

    def __init__(self, count: int, limit: int = 100) -> None:
        """Create the slots."""
        queue = Queue(MemoryBackend())
        self.queue = queue
        self.running: dict[str, RunningTask] = {}
        self.changes: list[int] = []
        self.slots = Slots(
            count,
            WorkerScope(lambda: queue),
            self.running,
            lambda _: self.changes.append(self.slots.lent),
            limit,
        )

    def start(self, size: int = 1) -> HandlerCall:
        """Start a call with this number of tasks."""
        call = HandlerCall(declared, self.slots)
        call.task = asyncio.current_task()
        for _ in range(size):
            delivery = work()
            context = Context(delivery, lambda _receipt, _value: None)
            job = RunningTask(delivery, context, call)
            call.jobs.append(job)
            self.running[delivery.receipt] = job
        return call

    def end(self, call: HandlerCall) -> None:
        """End a call."""
        for job in call.jobs:
            del self.running[job.delivery.receipt]
        self.slots.ended(call.loan)

    async def wait(self, call: HandlerCall, release: asyncio.Event) -> None:
        """Wait for some task until the event."""
        async with self.waiting(call):
            await release.wait()

    @asynccontextmanager
    async def waiting(self, call: HandlerCall) -> AsyncIterator[None]:
        """Wait for some task."""
        async with call.waiting(self.queue, "other", "x"):
            yield


def loan(call: HandlerCall) -> SlotLoan:
    """Return the loan of a call."""
    return call._loan()


async def test_a_call_gets_its_slots_back_before_others_start() -> None:
    """U7: a call that has waited comes before new tasks, and waits until all slots that it needs are free."""
    worker = Worker(2)
    batch = worker.start(2)
    release = asyncio.Event()
    waiting = asyncio.create_task(worker.wait(batch, release))
    await until(lambda: loan(batch).lent)
    assert worker.slots.free == 2
    first, second = worker.start(), worker.start()
    release.set()
    await until(lambda: loan(batch).turn)
    worker.end(first)
    assert worker.slots.free == 0
    assert loan(batch).lent
    worker.end(second)
    await waiting
    assert worker.changes == [2, 0]
    worker.end(batch)
    assert (worker.slots.free, worker.slots.lent, worker.slots.owners()) == (2, 0, {})


async def test_a_call_that_ends_while_it_waits() -> None:
    """U7: a wait that outlives its call, in a task that the handler left behind, frees nothing twice."""
    worker = Worker(1)
    call = worker.start()
    async with worker.waiting(call):
        assert worker.slots.free == 1
        worker.end(call)
        async with worker.waiting(call):
            assert worker.slots.free == 1
    assert (worker.slots.free, worker.slots.lent, dict(worker.slots.waiting)) == (1, 0, {"work": 0})


async def test_the_last_task_that_a_worker_can_hold() -> None:
    """U7: if everything that a worker can hold would wait, the last wait is refused; the call keeps its slot."""
    worker = Worker(1, limit=2)
    first = worker.start()
    async with worker.waiting(first):
        second = worker.start()
        with pytest.raises(WouldBlock, match="all 2 tasks that this worker can hold wait"):
            async with worker.waiting(second):
                raise AssertionError
        assert (loan(second).lent, worker.slots.free, worker.slots.lent) == (False, 0, 1)
        worker.end(second)
    assert not loan(first).lent


async def test_a_cancelled_wait_for_a_slot() -> None:
    """U7: a call that is cancelled while it waits for its slot goes on at once; it ends, and frees one slot."""
    worker = Worker(1)
    call = worker.start()
    release = asyncio.Event()
    waiting = asyncio.create_task(worker.wait(call, release))
    await until(lambda: loan(call).lent)
    other = worker.start()
    release.set()
    await until(lambda: loan(call).turn)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert (loan(call).lent, loan(call).turn, worker.slots.free) == (False, None, 0)
    worker.end(call)
    assert worker.slots.free == 0
    worker.end(other)
    assert worker.slots.free == 1


async def test_another_wait_of_the_same_call() -> None:
    """U7: a call that begins to wait again, before it has its slot back, does not need it."""
    worker = Worker(1)
    call = worker.start()
    first, second = asyncio.Event(), asyncio.Event()
    waits = [asyncio.create_task(worker.wait(call, first))]
    await until(lambda: loan(call).lent)
    other = worker.start()
    first.set()
    await until(lambda: loan(call).turn)
    waits.append(asyncio.create_task(worker.wait(call, second)))
    await waits[0]
    assert (loan(call).lent, loan(call).turn) == (True, None)
    worker.end(other)
    second.set()
    await waits[1]
    assert (loan(call).lent, worker.slots.free) == (False, 0)


async def test_credit_for_slots_that_are_lent() -> None:
    """U7: a session grants credit for each lent slot; what arrives after the slot is back is released."""
    session = ready(capacity=1)
    get(session, Deliver(deliveries=[work(receipt="a")]))
    assert not sent(session)
    session.lend(1)
    assert sent(session) == [Credit(n=1)]
    get(session, Deliver(deliveries=[work(receipt="b")]))
    session.lend(2)
    assert sent(session) == [Credit(n=1)]
    session.lend(0)
    get(session, Deliver(deliveries=[work(receipt="c")]))
    assert sent(session) == [RedeliverFrame(receipts=["c"])]
    session.lend(2)
    session.resize(0)
    get(session, Deliver(deliveries=[work(receipt="d")]))
    assert sent(session) == [RedeliverFrame(receipts=["d"])]
    session.resize(1)
    session.lend(0)
    session.finish("a", Success())
    session.finish("b", Success())
    assert Credit(n=1) in sent(session)
