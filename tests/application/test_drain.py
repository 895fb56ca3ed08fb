"""`TestQueue`: draining, the clock, crashes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

import pytest

from taskqueue_core import (
    Context,
    Depends,
    NotConnected,
    QueueFull,
    QueueLimits,
    TaskDead,
    TaskExpired,
    Tasks,
    gather,
)
from taskqueue_core.application.errors import TaskFailed, WouldBlock
from taskqueue_core.capabilities import control_of, dead_letters_of
from taskqueue_core.errors import ConfigurationError, InvalidInput, TaskQueueError
from taskqueue_core.queue_settings import change_settings
from taskqueue_core.retry import RetryPolicy
from taskqueue_core.tasks import State
from taskqueue_worker import Reject, Retry, Snooze
from taskqueue_worker.testing import NotIdle, TestQueue
from tests.application.shop import Failure, Shop


async def test_drain(shop: Shop, taskqueue: TestQueue) -> None:
    """U11: a drain runs what was published and what that publishes, in a thread or in the loop; results are decoded."""
    handle = await shop.charge.publish(17, amount=8)
    assert shop.log == []
    drained = await taskqueue.drain()
    assert shop.log == ["charge 17", "mail to buyer of 17"]
    assert [(run.task, run.attempt, run.end) for run in drained.runs] == [
        ("shop.charge", 1, "done"),
        ("shop.mail", 1, "done"),
    ]
    assert await handle.result() == 8
    (mail,) = taskqueue.published(shop.mail)
    assert (await mail.handle.result()).startswith("taskqueue-handler")
    assert (await taskqueue.drain()).runs == ()


async def test_only_what_waits_now(shop: Shop, taskqueue: TestQueue) -> None:
    """U11: with until_idle=False, what a handler publishes waits for the next drain."""
    await shop.tasks.publish_many(shop.charge.call(number) for number in range(3))
    assert (await taskqueue.drain(until_idle=False)).count("shop.charge") == 3
    assert (await taskqueue.drain(until_idle=False)).count("shop.mail") == 3


async def test_one_at_a_time() -> None:
    """U11: handlers run one call at a time, in the order of the store, also functions in threads."""
    tasks, log = Tasks(), list[str]()

    @tasks.task
    async def slow(number: int) -> None:
        log.append(f"begin {number}")
        await asyncio.sleep(0)
        log.append(f"end {number}")

    async with TestQueue(tasks) as taskqueue:
        for number in range(3):
            await slow.publish(number)
        await taskqueue.drain()
    assert log == [f"{what} {number}" for number in range(3) for what in ("begin", "end")]


async def test_batches() -> None:
    """U6, U11: a batch handler gets as many tasks as wait, up to its size; each handle reads the result of its task."""
    tasks, sizes = Tasks(), list[int]()

    @tasks.task(batch=3)
    def measure(texts: list[str]) -> list[int]:
        sizes.append(len(texts))
        return [len(text) for text in texts]

    async with TestQueue(tasks) as taskqueue:
        handles = [await measure.publish(["x" * number]) for number in range(5)]
        assert (await taskqueue.drain()).count() == 5
        assert sizes == [3, 2]
        assert await gather(*handles) == [0, 1, 2, 3, 4]
        taskqueue.assert_published(measure, texts=["xx"], times=1)


async def test_errors_are_raised(shop: Shop, taskqueue: TestQueue) -> None:
    """U11: a drain raises the exception of a handler itself, after the other tasks have run."""
    await shop.fail.publish(1)
    await shop.fail.publish(1)
    await shop.mail.publish("Ada")
    with pytest.raises(Failure, match="attempt 1") as caught:
        await taskqueue.drain()
    assert "1 more runs failed" in caught.value.__notes__[0]
    assert shop.log == ["mail to Ada", "fail 1", "fail 1"]
    assert (await taskqueue.advance(60)).count("shop.fail", "done") == 2


async def test_errors_are_recorded() -> None:
    """U3, U11: with errors="record", exceptions are in the result; retries are due exactly as the task declares."""
    tasks = Tasks()

    @tasks.task(retry=RetryPolicy(base=10, cap=30, max_attempts=4))
    def fail() -> None:
        raise Failure

    async with TestQueue(tasks, errors="record") as taskqueue:
        handle = await fail.publish()
        (error,) = (await taskqueue.drain()).errors
        assert isinstance(error, Failure)
        assert (await taskqueue.advance(9.9)).runs == ()
        assert [run.attempt for run in (await taskqueue.advance(0.1)).runs] == [2]
        assert [run.attempt for run in (await taskqueue.advance(20 + 30)).runs] == [3, 4]
        with pytest.raises(TaskDead) as caught:
            await handle.result()
        assert caught.value.attempts == 4


async def test_failures_without_an_exception(shop: Shop) -> None:
    """U11: a payload that does not fit, an invalid result and a timeout are errors too."""

    @shop.tasks.task
    def odd() -> object:
        return object()

    @shop.tasks.task(timeout=0.01)
    async def hangs() -> None:
        await asyncio.Event().wait()

    async with TestQueue(shop.tasks) as taskqueue:
        await taskqueue.queue.publish("shop.mail", {"to": 5, "more": 1})
        with pytest.raises(TaskFailed, match="to should be"):
            await taskqueue.drain()
        await odd.publish()
        with pytest.raises(TaskFailed, match="got object"):
            await taskqueue.drain()
        await hangs.publish()
        with pytest.raises(TimeoutError, match=r"timeout after 0.01 s"):
            await taskqueue.drain()
        taskqueue.assert_published(shop.mail)


async def test_requests_of_handlers_are_no_errors() -> None:
    """U11: `Retry`, `Snooze` and `Reject` are raised on purpose, so a drain does not raise them."""
    tasks = Tasks()

    @tasks.task
    def picky(context: Context) -> None:
        requests = {1: Retry(5), 2: Snooze(5), 3: Reject("no_such_order")}
        raise requests[context.attempt]

    async with TestQueue(tasks) as taskqueue:
        await picky.publish()
        assert (await taskqueue.drain()).count(end="retry") == 1
        assert (await taskqueue.advance(5)).count(end="snoozed") == 1
        assert (await taskqueue.advance(5)).count(end="rejected") == 1
        (dead,) = await dead_letters_of(taskqueue.queue.backend).list("picky")
        assert dead.reason == "no_such_order"


async def test_the_clock(shop: Shop, taskqueue: TestQueue) -> None:
    """U11: what falls due while the clock advances runs in order, each task at its time."""
    start, seen = taskqueue.now, list[float]()

    @shop.tasks.task
    def note(again: int) -> None:
        seen.append(taskqueue.now - start)
        if again:
            note.using(delay=10).publish_sync(again - 1)

    when = datetime.fromtimestamp(start, UTC) + timedelta(hours=2)
    await note.using(not_before=when).publish(0)
    await note.using(delay=30).publish(2)
    await taskqueue.advance(24 * 3600)
    assert seen == pytest.approx([30, 40, 50, 7200], abs=1e-3)
    assert taskqueue.now == start + 24 * 3600


async def test_deadlines(shop: Shop, taskqueue: TestQueue) -> None:
    """U11: a task whose deadline passes expires at that time, and releases its ordering key to the next."""

    @shop.tasks.task(limits=QueueLimits(order="fair"))
    def note(what: str) -> None:
        shop.log.append(what)

    handle = await note.using(delay=1000, expires_in=500, ordering_key="a").publish("late")
    await note.using(ordering_key="a").publish("next")
    drained = await taskqueue.advance(600)
    assert [expired.task_id for expired in drained.expired] == [handle.id]
    with pytest.raises(TaskExpired):
        await handle.result()
    assert shop.log == ["next"]


async def test_limits_apply(shop: Shop, taskqueue: TestQueue) -> None:
    """U3, U11: declared limits and an operator's pause hold tasks back, as in production."""

    @shop.tasks.task(limits=QueueLimits(rate="1/10s", capacity=3))
    def slow() -> None: ...

    for _ in range(3):
        await slow.publish()
    with pytest.raises(QueueFull):
        await slow.publish()
    assert (await taskqueue.drain()).count() == 1
    assert (await taskqueue.advance(10)).count() == 1
    control = control_of(taskqueue.queue.backend)
    await change_settings(control, "shop.slow", lambda it: it.model_copy(update={"paused": True}))
    assert (await taskqueue.advance(3600)).runs == ()
    await change_settings(control, "shop.slow", lambda it: it.model_copy(update={"paused": False}))
    assert (await taskqueue.drain()).count() == 1


async def test_deliver_twice(shop: Shop, taskqueue: TestQueue) -> None:
    """U11: each handler runs again after it succeeded and before its ack; the store counts a loss."""
    losses = []

    @shop.tasks.task
    def note(context: Context) -> None:
        losses.append(context.losses)

    handle = await note.publish()
    drained = await taskqueue.drain(deliver_twice=True)
    assert [run.end for run in drained.runs] == ["repeated", "done"]
    assert losses == [0, 1]
    status = await handle.status()
    assert status is not None
    assert status.state is State.DONE
    await shop.fail.publish(1)
    with pytest.raises(Failure):
        await taskqueue.drain(deliver_twice=True)
    assert shop.log == ["fail 1"]


async def test_handlers_wait_for_tasks(shop: Shop, taskqueue: TestQueue) -> None:
    """U11: handlers wait for tasks that they publish, 20 deep, and for several at once."""

    @shop.tasks.task
    async def total(depth: int) -> int:
        if not depth:
            return 1
        return 1 + int(sum(await gather(await total.publish(depth - 1))))

    @shop.tasks.task
    async def fan() -> int:
        return len(await gather(*[await shop.mail.publish(str(number)) for number in range(5)]))

    deep, wide = await total.publish(20), await fan.publish()
    await taskqueue.drain()
    assert await gather(deep, wide) == [21, 5]


async def test_a_thread_that_would_wait(shop: Shop, taskqueue: TestQueue) -> None:
    """U7, U11: a synchronous handler that waits for a task is refused in a drain, as it is in a worker."""

    @shop.tasks.task
    def double() -> str:
        return shop.mail.publish_sync("Ada").result()

    await double.publish()
    with pytest.raises(WouldBlock):
        await taskqueue.drain()


async def test_a_wait_that_cannot_end(shop: Shop, taskqueue: TestQueue) -> None:
    """U11: a handler that waits for a task that is not due is named; when the clock advances, it continues."""

    @shop.tasks.task
    async def patient() -> str:
        return await (await shop.mail.using(delay=60).publish("Ada")).result()

    handle = await patient.publish()
    with pytest.raises(NotIdle, match=r"shop.patient: waits for a task that is not due"):
        await taskqueue.drain()
    await taskqueue.advance(60)
    assert (await handle.result()).startswith("taskqueue-handler")


async def test_not_idle(shop: Shop, taskqueue: TestQueue) -> None:
    """U11: tasks that publish each other without end are named, and the drain ends."""

    @shop.tasks.task
    async def ping() -> None:
        await ping.publish()

    await ping.publish()
    await shop.mail.publish("Ada")
    with pytest.raises(
        NotIdle, match=re.escape("after 50 runs; the last ones were: shop.ping (50), shop.mail (1)")
    ):
        await taskqueue.drain(limit=50)
    assert (await taskqueue.queue.ledger()).waiting == 1
    assert (await taskqueue.drain(until_idle=False)).count() == 1


async def test_lifespan() -> None:
    """U9, U11: each drain runs the lifespan around its tasks."""
    tasks, log = Tasks(), list[str]()

    @tasks.lifespan
    async def lifespan() -> AsyncIterator[str]:
        log.append("open")
        yield "state"
        log.append("close")

    @tasks.task
    def work(context: Context[str]) -> None:
        log.append(context.state)

    async with TestQueue(tasks) as taskqueue:
        await work.publish()
        await work.publish()
        await taskqueue.drain()
    assert log == ["open", "state", "state", "close"]


async def test_override() -> None:
    """U9, U11: a fake replaces a dependency; the error of a session that cannot be committed is raised."""
    tasks, used = Tasks(), list[str]()

    @asynccontextmanager
    async def session() -> AsyncIterator[str]:
        yield "real"
        raise Failure("commit")

    @tasks.task
    def work(db: str = Depends(session)) -> None:
        used.append(db)

    async with TestQueue(tasks) as taskqueue:
        with taskqueue.override(session, "fake"):
            await work.publish()
            assert (await taskqueue.drain(deliver_twice=True)).count(end="done") == 1
        await work.publish()
        with pytest.raises(Failure, match="commit"):
            await taskqueue.drain()
        with pytest.raises(
            ConfigurationError, match=r"no task of this TestQueue depends on .*unused"
        ):
            taskqueue.override(unused, "fake")
    assert used == ["fake", "fake", "real"]


def unused() -> None:
    """No dependency of a task."""


async def test_bad_input(shop: Shop, taskqueue: TestQueue) -> None:
    """U11: wrong options and calls at the wrong place say what to write."""
    with pytest.raises(ConfigurationError, match="mode: got 'eager'; allowed: queue, inline"):
        TestQueue(shop.tasks, mode="eager")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="pass the Tasks object"):
        TestQueue("shop.tasks:tasks")  # type: ignore[arg-type]
    with pytest.raises(NotConnected, match="async with TestQueue"):
        await TestQueue(shop.tasks).drain()
    with pytest.raises(InvalidInput, match="seconds"):
        await taskqueue.advance(-1)

    @shop.tasks.task
    async def drains() -> None:
        await taskqueue.drain()

    await drains.publish()
    with pytest.raises(TaskQueueError, match="a handler cannot drain the queue"):
        await taskqueue.drain()


async def test_isolation(shop: Shop) -> None:
    """U11: the queue ends with its block; the next one knows nothing of it."""
    async with TestQueue(shop.tasks):
        await shop.mail.publish("Ada")
    with pytest.raises(NotConnected):
        await shop.mail.publish("Bob")
    async with TestQueue(shop.tasks) as taskqueue:
        taskqueue.assert_not_published(shop.mail)
        assert (await taskqueue.drain()).runs == ()
