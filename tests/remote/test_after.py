"""Tasks that wait for others, and batches, through the remote backend and a real server."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from taskqueue_core.after import After, TaskRef
from taskqueue_core.capabilities import dependencies_of
from taskqueue_core.errors import CapabilityMissing
from taskqueue_core.tasks import Published, Refusal, State, Task
from taskqueue_memory import MemoryBackend
from taskqueue_remote import RemoteBackend
from tests.remote.test_real_server import serving


@pytest_asyncio.fixture
async def store() -> MemoryBackend:
    """The store behind the server."""
    return MemoryBackend()


@pytest_asyncio.fixture
async def remote(store: MemoryBackend) -> AsyncIterator[RemoteBackend]:
    """A remote backend that is connected to a real server."""
    async with serving(store) as backend:
        yield backend


async def test_tasks_that_wait(remote: RemoteBackend, store: MemoryBackend) -> None:
    """U16: a task that waits is published through the server with all of its fields; its status names what holds it."""
    parent = TaskRef("k", "parent")
    after = After(tasks=(parent, TaskRef("k", "b")), when="done", on_dead="hold", inputs=(1, 0))
    child = Task(key="k", id="child", after=after)
    tasks = [Task(key="k", id="parent"), Task(key="k", id="b"), child]
    answers = await remote.publisher.publish(*tasks)
    assert {answer.status for answer in answers} == {Published.ACCEPTED}
    assert (await remote.publisher.publish(child))[0].status is Published.DUPLICATE
    assert (await remote.control.ledger("k")).blocked == 1
    async with store.subscribe(["k"], "w") as subscription:
        first, second = (await subscription.receive(9, 0)).deliveries
        await subscription.ack(second, results=[b"2"])
        await subscription.dead_letter(first, "broken")
        (status,) = await remote.control.statuses("k", "child")
        assert status is not None
        assert (status.state, status.held_by) == (State.BLOCKED, (parent,))
        await remote.dead_letters.redrive("k")
        (again,) = (await subscription.receive(9, 0)).deliveries
        await subscription.ack(again, results=[b"1"])
        (delivery,) = (await subscription.receive(9, 0)).deliveries
        assert (delivery.task, delivery.inputs) == (child, (b"2", b"1"))
        await subscription.dead_letter(delivery, "broken")
    (letter,) = await remote.dead_letters.list("k")
    assert letter.task == child
    retried = await remote.publisher.schedule_retry(letter.task, remote.now())
    assert retried.status is Published.ACCEPTED


async def test_batches(remote: RemoteBackend, store: MemoryBackend) -> None:
    """U16: a client adds members to a batch and closes it; the server counts them, and ends the batch."""
    batch, dependencies = TaskRef("k", "batch"), dependencies_of(remote)
    assert not await dependencies.close(batch)
    await remote.publisher.publish(Task(key="k", id="batch", batch=batch))
    names = [f"m{number}" for number in range(30)]
    await remote.publisher.publish(*(Task(key="k", id=name, batch=batch) for name in names))
    assert await dependencies.close(batch)
    async with store.subscribe(["k"], "w") as subscription:
        taken = (await subscription.receive(99, 0)).deliveries
        assert [each.task.id for each in taken] == names
        await subscription.ack(*taken)
    ended = await remote.control.wait_for_end("k", "batch", 20)
    assert ended is not None
    assert ended.state is State.DONE
    (late,) = await remote.publisher.publish(Task(key="k", id="late", batch=batch))
    assert (late.status, late.code) == (Published.REFUSED, Refusal.BATCH_CLOSED)
    assert not await dependencies.close(batch)


async def test_lines_are_carried_by_the_server(remote: RemoteBackend) -> None:
    """U16: a client has no lines to carry, and says so."""
    dependencies = dependencies_of(remote)
    batch = TaskRef("k", "batch")
    assert await dependencies.lines(9) == ()
    await dependencies.changed(0)
    for call in (
        dependencies.register(),
        dependencies.release(),
        dependencies.confirm(),
        dependencies.seal(batch),
        dependencies.tally(),
    ):
        with pytest.raises(CapabilityMissing, match="the server carries"):
            await call
