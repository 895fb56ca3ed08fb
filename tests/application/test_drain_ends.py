"""`TestQueue`: waits before a drain, and the dead letters that a drain makes."""

from __future__ import annotations

import asyncio

import pytest

from taskqueue_core import Tasks, gather
from taskqueue_core.capabilities import control_of
from taskqueue_core.errors import TaskQueueError
from taskqueue_core.queue_settings import change_settings
from taskqueue_core.retry import RetryPolicy
from taskqueue_worker import Reject, Retry
from taskqueue_worker.testing import NotDrained, TestQueue, calls
from tests.application.shop import Failure, Shop
from tests.docs.programs import python


async def test_a_wait_before_the_drain(
    shop: Shop, taskqueue: TestQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """U11: a test that waits for a task that nothing runs gets an error that says what to call first."""
    handle = await shop.charge.publish(17)
    with pytest.raises(TimeoutError):  # as in production, whether or not other code runs
        await handle.result(timeout=0.01)
    waiting = [asyncio.create_task(handle.result()), asyncio.create_task(gather(handle))]
    await asyncio.sleep(0.05)  # they may wait for a drain that another task starts
    await taskqueue.drain()
    assert await asyncio.gather(*waiting) == [5, [5]]
    monkeypatch.setattr(calls, "_LOOKS", 2)
    handle = await shop.charge.publish(18)
    for timeout in (None, 60):
        with pytest.raises(NotDrained, match=r"is waiting, .* call 'await taskqueue\.drain\(\)'"):
            await handle.result(timeout)
    later = await shop.charge.using(delay=60).publish(18)
    with pytest.raises(NotDrained, match=r"is scheduled, .*'await taskqueue\.advance\(seconds\)'"):
        await gather(later)
    with pytest.raises(TaskQueueError, match="no drain is running"):
        await asyncio.to_thread(shop.charge.handle_sync(handle.id).result)


def test_a_wait_in_the_only_task() -> None:
    """U11: if no other code runs that could start a drain, the error comes at the first look."""
    printed = python(_ALONE)
    assert printed.splitlines() == ["not_drained"] * 2


_ALONE = """
import asyncio
from taskqueue_core import Tasks
from taskqueue_worker.testing import NotDrained, TestQueue, calls

calls._LOOKS = 1_000_000
tasks = Tasks()

@tasks.task
def work() -> None: ...

async def main():
    async with TestQueue(tasks):
        handle = await work.publish()
        try:
            await handle.result()
        except NotDrained as error:
            print(error.code)

asyncio.run(main())
with TestQueue(tasks):
    handle = work.publish_sync()
    try:
        handle.result()
    except NotDrained as error:
        print(error.code)
"""


async def test_dead_letters() -> None:
    """U11: a drain shows which run made a dead letter, and why: failed, asked for, or too often lost."""
    tasks = Tasks()

    @tasks.task(retry=RetryPolicy(base=10, max_attempts=2))
    def fail(how: str) -> int:
        if how == "reject":
            raise Reject("no_such_order", "order 17")
        if how == "retry":
            raise Retry(5, error="not yet")
        raise Failure(how)

    async with TestQueue(tasks, errors="record") as taskqueue:
        for how in ("boom", "retry", "reject"):
            await fail.using(id=how).publish(how)
        await taskqueue.queue.publish("fail", {"hwo": 1}, id="misfit")
        first = await taskqueue.drain()
        assert [(run.id, run.end) for run in first.dead] == [
            ("reject", "rejected"),
            ("misfit", "rejected"),
        ]
        second = await taskqueue.advance(10)
        found = {
            run.id: (run.attempt, run.dead.reason, run.dead.history[-1].error)
            for run in (*first.dead, *second.dead)
            if run.dead is not None
        }
        assert found["boom"] == (2, "max_retries_exceeded", "Failure: boom")
        assert found["retry"] == (2, "max_retries_exceeded", "not yet")
        assert found["reject"] == (1, "no_such_order", "order 17")
        assert found["misfit"][1] == "invalid_payload"


async def test_dead_letters_at_an_error(shop: Shop, taskqueue: TestQueue) -> None:
    """U11: the exception that a drain raises names the dead letters, and so does the drain that a crash ended."""
    await shop.fail.using(id="one", max_attempts=1).publish(1)
    with pytest.raises(Failure) as caught:
        await taskqueue.drain()
    notes = ["task one of shop.fail is a dead letter now: max_retries_exceeded"]
    assert caught.value.__notes__ == notes
    control = control_of(taskqueue.queue.backend)
    await change_settings(control, "shop.hang", lambda it: it.model_copy(update={"max_losses": 0}))
    begun = asyncio.Event()

    @shop.tasks.task
    async def hang() -> None:
        begun.set()
        await asyncio.Event().wait()

    await hang.publish()
    draining = asyncio.create_task(taskqueue.drain())
    await begun.wait()
    await taskqueue.crash()
    (run,) = (await draining).dead
    assert run.dead is not None
    assert (run.end, run.dead.reason) == ("lost", "max_losses_exceeded")
