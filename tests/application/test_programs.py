"""The first programs of a new user, on memory, on Redis, and through a server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from taskqueue_core import (
    Context,
    Depends,
    Queue,
    QueueLimits,
    Reject,
    RetryPolicy,
    Shared,
    Snooze,
    TaskDead,
    Tasks,
    as_completed,
    gather,
)
from tests.application.running import OpenWorld, working


async def test_declare_publish_and_wait(world: OpenWorld) -> None:
    """U1, U2, U6: a declared task is published with its arguments and options, and its result awaited.

    U18: the handler sees the tags of the declaration, and then those of the publish.
    """
    tasks = Tasks(prefix="shop.")
    tags: list[tuple[str, ...]] = []

    @tasks.task(tags=("image",))
    def resize(context: Context, image: str, width: int = 320) -> dict[str, int]:
        assert image
        tags.append(context.tags)
        return {"width": width}

    async with world() as it, tasks.connect(Queue(it.backend)), working(it.worker(tasks)):
        using = resize.using(id="cat-320", tenant="acme", delay=0.05, tags=("user:42", "image"))
        handle = await using.publish("cat.png")
        assert (await handle.result(timeout=30))["width"] == 320
        assert tags == [("image", "user:42")]
        assert await resize.handle("cat-320").result() == {"width": 320}
        many = await tasks.publish_many(resize.call(name, width=9) for name in ("a", "b"))
        assert await gather(*many, timeout=30) == [{"width": 9}] * 2
        assert {one.id async for one in as_completed(many)} == {one.id for one in many}


class RateLimited(Exception):
    """The other side is busy for some seconds."""

    def __init__(self, retry_after: float) -> None:
        super().__init__("busy")
        self.retry_after = retry_after


class BadAddress(Exception):
    """There is no such address."""


async def test_policies_at_the_task(world: OpenWorld) -> None:
    """U3, U5, U10: retries, a snooze and a rejection of a declared task; the dead letter has the traceback."""
    tasks, seen = Tasks(), list[tuple[str, int, int]]()

    @tasks.task(
        retry=RetryPolicy(max_attempts=2, base=0.01),
        timeout=30,
        limits=QueueLimits(rate="100/1s", max_inflight=20, order="fair", tenant_max_inflight=5),
        on_error={
            RateLimited: lambda error, _: Snooze(error.retry_after),
            BadAddress: Reject("bad_address"),
        },
    )
    async def send_mail(context: Context, to: str) -> str:
        seen.append((to, context.attempt, context.failures))
        if to == "busy" and context.attempt < 3:
            raise RateLimited(0.01)
        if to == "nobody":
            raise BadAddress(to)
        if to == "broken":
            raise ValueError(to)
        return to

    async with world() as it, tasks.connect(Queue(it.backend)):
        await tasks.apply()
        async with working(it.worker(tasks)):
            assert await (await send_mail.publish("busy")).result(30) == "busy"
            with pytest.raises(TaskDead) as rejected:
                await (await send_mail.publish("nobody")).result(30)
            with pytest.raises(TaskDead) as exhausted:
                await (await send_mail.publish("broken")).result(30)
    assert [each[1:] for each in seen if each[0] == "busy"] == [(1, 0), (2, 0), (3, 0)]
    assert [each[1:] for each in seen if each[0] == "broken"] == [(1, 0), (2, 1)]
    assert (rejected.value.reason, rejected.value.attempts) == ("bad_address", 1)
    assert (exhausted.value.reason, exhausted.value.attempts) == ("max_retries_exceeded", 2)
    assert str(exhausted.value).endswith("max_retries_exceeded (ValueError: broken)")
    assert "in send_mail" in (exhausted.value.traceback or "")


async def test_a_worker_with_state_and_dependencies(world: OpenWorld) -> None:
    """U9: a lifespan's state, a shared pool and a session per call, which commits before the task is acked."""
    tasks, events = Tasks(), list[str]()

    @tasks.lifespan
    async def lifespan() -> AsyncIterator[str]:
        events.append("start")
        yield "state"
        events.append("stop")

    @asynccontextmanager
    async def open_pool() -> AsyncIterator[str]:
        yield "pool"
        events.append("close pool")

    @asynccontextmanager
    async def session(pool: str = Shared(open_pool)) -> AsyncIterator[str]:
        yield f"session of {pool}"
        events.append("commit")

    @tasks.task
    async def charge(context: Context[str], order: int, db: str = Depends(session)) -> str:
        return f"{context.state}, {db}, order {order}"

    async with world() as it, tasks.connect(Queue(it.backend)):
        async with working(it.worker(tasks)):
            handle = await charge.publish(order=17)
            assert await handle.result(30) == "state, session of pool, order 17"
            assert events == ["start", "commit"]
        assert events == ["start", "commit", "close pool", "stop"]
