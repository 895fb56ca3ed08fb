"""Finding tasks again: lists of an application, and the details of a handle."""

from __future__ import annotations

from typing import Any

import pytest

from taskqueue_core import Context, InvalidInput, Queue, Retry, State, Tasks, connect_sync
from taskqueue_core.backend import Capabilities, Capability
from taskqueue_core.capabilities import QueueSettings, control_of
from taskqueue_core.errors import CapabilityMissing
from taskqueue_core.tasks import Task
from taskqueue_memory import MemoryBackend
from taskqueue_worker.testing import TestQueue
from tests.application.running import OpenWorld, working


def shop() -> Tasks:
    """Return a registry with a task that fails once."""
    tasks = Tasks(prefix="shop.")

    @tasks.task(index=("user",), tags=("mail",), keep_ended=3600)
    async def invoice(context: Context, order: int) -> int:
        if order == 2 and context.attempt == 1:
            raise Retry(0, error="the printer is busy")
        return order

    return tasks


async def test_finding_what_was_published(world: OpenWorld) -> None:
    """U18: a list by tag or by state finds the tasks of a function, and a handle tells all of one of them."""
    tasks = shop()
    invoice = tasks.functions["shop.invoice"]
    async with world() as it, tasks.connect(Queue(it.backend)) as queue:
        await tasks.apply()
        handles = [
            await invoice.using(id=f"o{n}", tags=(f"user:{n % 2}",)).publish(n) for n in range(4)
        ]
        waiting = queue.tasks(invoice, state=State.WAITING)
        assert [task.task_id async for task in waiting] == ["o0", "o1", "o2", "o3"]
        of_user = queue.tasks("shop.invoice", tag="user:0", newest=True)
        assert [task.task_id async for task in of_user] == ["o2", "o0"]
        first = await waiting.page(limit=3)
        assert [task.tags for task in first.tasks] == [
            ("mail", "user:0"),
            ("mail", "user:1"),
        ] * 1 + [("mail", "user:0")]
        last = await waiting.page(after=first.next, limit=3)
        assert ([task.task_id for task in last.tasks], last.next) == (["o3"], None)
        with pytest.raises(InvalidInput, match="after: got the cursor of another query"):
            await of_user.page(after=first.next)
        with pytest.raises(InvalidInput, match=r"tag: .*the queue's setting index \(user\)"):
            await queue.tasks(invoice, tag="mail").page()
        async with working(it.worker(tasks)):
            assert await handles[2].result(timeout=30) == 2
            worker = (await handles[2].details() or pytest.fail("no details")).worker_id
            done = queue.tasks(invoice, state=State.DONE, worker=worker, tag="user:0")
            assert "o2" in [task.task_id async for task in done]
        details = await handles[2].details()
        assert details is not None
        assert (details.status.state, details.status.attempt) == (State.DONE, 2)
        assert [failure.error for failure in details.history] == ["the printer is busy"]
        assert details.task.tags == ("mail", "user:0")
        assert 0 < (details.published_at or 0) <= (details.delivered_at or 0)
        assert await invoice.handle("unknown").details() is None


async def test_a_walk_over_many_pages() -> None:
    """U18: the iterator reads page by page, and has each task once, also in code without an event loop."""
    backend = MemoryBackend()
    await backend.publisher.publish(*(Task(key="k", id=f"t{n}") for n in range(1000)))
    await backend.publisher.publish(*(Task(key="k", id=f"u{n}") for n in range(300)))
    queue = Queue(backend)
    found = [task.task_id async for task in queue.tasks("k", state=State.WAITING)]
    assert len(set(found)) == len(found) == 1300
    assert [task async for task in queue.tasks("never-used", state=State.DEAD)] == []


def test_blocking_lists() -> None:
    """U18: `SyncQueue.tasks` and `SyncHandle.details` give the same as their async counterparts."""
    tasks = shop()
    invoice = tasks.functions["shop.invoice"]
    with connect_sync("memory") as queue, tasks.connect_sync(queue):
        control = control_of(queue.queue.backend)
        queue.run(control.configure(invoice.queue, QueueSettings(index=("user",))))
        handle = invoice.using(tags=("user:1",)).publish_sync(1)
        assert [task.task_id for task in queue.tasks(invoice, tag="user:1")] == [handle.id]
        assert queue.tasks(invoice, state=State.WAITING).page(limit=1).next is None
        details = handle.details()
        assert details is not None
        assert details.task.tags == ("mail", "user:1")
        assert handle.cancel()


async def test_lists_in_tests_of_an_application() -> None:
    """U18: a `TestQueue` applies `index` and `keep_ended`, and lists what ran by its clock."""
    tasks = shop()
    invoice = tasks.functions["shop.invoice"]
    async with TestQueue(tasks) as taskqueue:
        await invoice.using(id="a", tags=("user:7",)).publish(7)
        await taskqueue.drain()
        await taskqueue.advance(1000)
        (task,) = [task async for task in taskqueue.queue.tasks(invoice, tag="user:7")]
        assert (task.task_id, task.state) == ("a", State.DONE)
        await taskqueue.advance(3600)
        assert [task async for task in taskqueue.queue.tasks(invoice, tag="user:7")] == []


@pytest.mark.parametrize(
    ("of", "options", "fault"),
    [
        (3, {"state": State.DEAD}, "of: got int; allowed: the name of a queue, or a declared task"),
        ("k", {}, "state: got none; allowed: a state, because the list has no tag either"),
        ("k", {"state": "dead or alive"}, "state: got str"),
        ("k", {"state": State.WAITING, "worker": "w"}, "worker: "),
        ("k", {"tag": " x"}, "tag: "),
    ],
    ids=range(5),
)
def test_wrong_lists(of: Any, options: dict[str, Any], fault: str) -> None:
    """U18: a list that is not possible is refused where it is made, and the error names the argument."""
    with pytest.raises(InvalidInput, match=fault):
        Queue(MemoryBackend()).tasks(of, **options)


def test_a_backend_without_lists() -> None:
    """U18: a backend without the capability is named at once."""

    class WithoutLists(MemoryBackend):
        capabilities = Capabilities(names=frozenset({Capability.CONTROL}))

    with pytest.raises(CapabilityMissing, match="listing"):
        Queue(WithoutLists()).tasks("k", state=State.DEAD)
