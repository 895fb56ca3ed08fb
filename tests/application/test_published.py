"""`TestQueue`: publishing in tests, in both modes, and assertions about what was published."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from taskqueue_core import (
    Call,
    Confirmation,
    Context,
    InvalidArguments,
    Middleware,
    TaskQueueError,
    Tasks,
)
from taskqueue_worker.testing import TestQueue
from tests.application.shop import Failure, Shop


async def test_inline(shop: Shop) -> None:
    """U11: inline, a publish returns when its tasks have run; what handlers publish runs after them."""
    async with TestQueue(shop.tasks, mode="inline") as taskqueue:
        handle = await shop.charge.publish(17)
        assert shop.log == ["charge 17", "mail to buyer of 17"]
        assert await handle.result() == 5
        await shop.mail.using(delay=60).publish("Ada")
        with pytest.raises(Failure):
            await shop.fail.publish(1)
        await taskqueue.advance(60)
        assert shop.log[2:] == ["fail 1", "fail 2", "mail to Ada"]
        await asyncio.gather(*(shop.charge.publish(number) for number in range(5)))
        assert len(shop.log) == 5 + 2 * 5


async def test_blocking_calls(shop: Shop) -> None:
    """U11: blocking publishes work in the thread of the loop and in others, and in both modes where they can."""
    async with TestQueue(shop.tasks) as taskqueue:
        handle = shop.charge.publish_sync(1)
        await asyncio.to_thread(shop.charge.publish_sync, 2)
        with pytest.raises(TaskQueueError, match=re.escape("await asyncio.to_thread(")):
            handle.result()
        await taskqueue.drain()
        assert handle.result() == 5
        assert sorted(shop.log)[:2] == ["charge 1", "charge 2"]
    async with TestQueue(shop.tasks, mode="inline") as taskqueue:
        with pytest.raises(TaskQueueError, match=re.escape("await asyncio.to_thread(")):
            shop.charge.publish_sync(3)
        taskqueue.assert_not_published(shop.charge)
        done = await asyncio.to_thread(shop.charge.publish_sync, 3)
        assert done.result() == 5


async def test_publishing_from_several_threads(shop: Shop, taskqueue: TestQueue) -> None:
    """U11: code under test may publish from several threads at once, before and during a drain."""

    @shop.tasks.task
    def fan() -> None:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda each: shop.mail.publish_sync(str(each)), range(100)))

    await asyncio.gather(*(asyncio.to_thread(shop.mail.publish_sync, str(n)) for n in range(100)))
    taskqueue.assert_published(shop.mail, times=100)
    await fan.publish()
    assert (await taskqueue.drain()).count("shop.mail", "done") == 200


def test_without_a_loop(shop: Shop) -> None:
    """U11: a test that is not async publishes, drains and advances, too."""
    with TestQueue(shop.tasks) as taskqueue:
        shop.charge.using(delay=9).publish_sync(1)
        taskqueue.assert_published(shop.charge, order=1)
        assert asyncio.run(taskqueue.advance(9)).count() == 2
    with TestQueue(shop.tasks, mode="inline"):
        assert shop.charge.publish_sync(2).result() == 5
    assert shop.log[2:] == ["charge 2", "mail to buyer of 2"]


class Stamp(Middleware):
    """Adds a header to each publish, and notes it around each run."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def publish(
        self, call: Call[Any], send: Callable[[Call[Any]], Awaitable[Confirmation]]
    ) -> Confirmation:
        """Add the header, after other tasks had their turn."""
        await asyncio.sleep(0)
        return await send(call.using(headers={"stamp": call.function.name}))

    async def run(self, context: Context, handle: Callable[[], Awaitable[Any]]) -> Any:
        """Note the header before and after the handler."""
        self.seen.append(f"before {context.headers['stamp']}")
        result = await handle()
        self.seen.append(f"after {context.headers['stamp']}")
        return result


@pytest.mark.parametrize("mode", ["queue", "inline"])
async def test_middleware(mode: Literal["queue", "inline"]) -> None:
    """U9, U11: middleware is called around publishes and runs, in both modes, also of blocking calls in threads."""
    stamp = Stamp()
    tasks = Tasks(middleware=[stamp])

    @tasks.task
    async def outer() -> None:
        await asyncio.to_thread(inner.publish_sync)

    @tasks.task
    def inner() -> None: ...

    async with TestQueue(tasks, mode=mode) as taskqueue:
        await tasks.publish_many([outer.call()])
        await taskqueue.drain()
        assert stamp.seen == ["before outer", "after outer", "before inner", "after inner"]
        (published,) = taskqueue.published(inner)
        assert published.task.headers["stamp"] == "inner"


async def test_connections_of_the_application(shop: Shop, taskqueue: TestQueue) -> None:
    """U11: an application that connects itself, or whose registry includes others, publishes to the test's queue."""
    part = Tasks(prefix="part.")

    @part.task
    def inner() -> None: ...

    shop.tasks.include(part)
    nowhere = "there.is.no.such.backend"
    async with shop.tasks.connect(nowhere) as queue, part.connect(nowhere):
        assert queue is taskqueue.queue
        await shop.mail.publish("Ada")
        await inner.publish()
        await inner.handle("unknown").status()
    with shop.tasks.connect_sync(nowhere):
        inner.publish_sync()
    assert (await taskqueue.drain()).count("part.inner") == 2
    async with TestQueue(shop.tasks) as other:
        await shop.mail.publish("Bob")
        other.assert_published(shop.mail, times=1, to="Bob")
    taskqueue.assert_not_published(shop.mail, to="Bob")


class Parcel(BaseModel):
    """An argument with fields."""

    id: int


async def test_assertions(shop: Shop, taskqueue: TestQueue) -> None:
    """U11: assertions compare decoded arguments, defaults included; a duplicate counts once."""

    @shop.tasks.task
    def ship(parcel: Parcel, when: datetime) -> None: ...

    when = datetime(2030, 1, 1, tzinfo=UTC)
    await ship.publish(Parcel(id=1), when)
    taskqueue.assert_published(ship, times=1, parcel=Parcel(id=1), when=when)
    for _ in range(2):
        await shop.charge.using(id="one").publish(1)
    taskqueue.assert_published(shop.charge, times=1, amount=5)
    taskqueue.assert_not_published(shop.charge, order=2)
    taskqueue.assert_not_published(shop.mail)
    (published,) = taskqueue.published(shop.charge)
    assert (published.task.id, published.arguments) == ("one", {"order": 1, "amount": 5})


async def test_failed_assertions(shop: Shop, taskqueue: TestQueue) -> None:
    """U11: a failed assertion lists what was published, and the nearest miss; a misspelt name is an error."""
    with pytest.raises(AssertionError, match=r"once, found 0\npublished: nothing"):
        taskqueue.assert_published(shop.charge)
    await shop.charge.publish(1, amount=2)
    await shop.charge.publish(3)
    await shop.mail.publish("Ada")
    with pytest.raises(AssertionError) as caught:
        taskqueue.assert_published(shop.charge, order=1, amount=3)
    assert str(caught.value).splitlines() == [
        "expected shop.charge(order=1, amount=3) at least once, found 0",
        "nearest: shop.charge(order=1, amount=2)",
        "  amount: expected 3, got 2",
        "published:",
        "  shop.charge(order=1, amount=2)",
        "  shop.charge(order=3, amount=5)",
        "  shop.mail(to='Ada')",
    ]
    with pytest.raises(AssertionError, match=r"expected shop.charge\(\) 0 times, found 2"):
        taskqueue.assert_not_published(shop.charge)
    with pytest.raises(InvalidArguments, match="'ordr' is not a parameter; it has order, amount"):
        taskqueue.assert_not_published(shop.charge, ordr=1)


async def test_reports_show_calls_and_differences(shop: Shop, taskqueue: TestQueue) -> None:
    """U11: all tasks are shown as calls, unless their payloads do not fit; long values that differ are cut there."""

    @shop.tasks.task
    def pack(numbers: list[int]) -> None: ...

    @shop.tasks.task
    def tidy() -> None: ...

    await pack.publish(list(range(100)))
    await tidy.publish()
    await taskqueue.queue.publish("shop.mail", {"too": "Ada"})
    with pytest.raises(AssertionError) as caught:
        taskqueue.assert_published(pack, numbers=[*range(99), 100])
    lines = str(caught.value).splitlines()
    assert (
        lines[2]
        == "  numbers: expected ...94, 95, 96, 97, 98, 100], got ...94, 95, 96, 97, 98, 99]"
    )
    assert lines[-3:] == [
        "  shop.pack(numbers=[0, 1, 2, 3, 4, 5, ...])",
        "  shop.tidy()",
        """  shop.mail '{"too":"Ada"}'""",
    ]


async def test_long_reports_are_cut(shop: Shop, taskqueue: TestQueue) -> None:
    """U11: the message of a failed assertion has a bound, whatever was published."""
    await shop.tasks.publish_many(shop.mail.call("x" * 1000) for _ in range(200))
    with pytest.raises(AssertionError) as caught:
        taskqueue.assert_published(shop.mail, to="Ada")
    assert "and 180 more" in str(caught.value)
    assert len(str(caught.value)) < 4000
