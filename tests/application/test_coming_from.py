"""docs/coming-from.md: each cell of the column "here" is code of one of these tests."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest

from taskqueue_core import (
    Context,
    Cron,
    Depends,
    Middleware,
    QueueLimits,
    RetryPolicy,
    TaskCancelled,
    TaskDead,
    Tasks,
    UnknownTask,
    Workflow,
    chain,
    group,
)
from taskqueue_core.tasks import State
from taskqueue_worker import Reject, Retry, Snooze
from taskqueue_worker.testing import TestQueue

PAGE = (Path(__file__).parents[2] / "docs" / "coming-from.md").read_text()


def test_every_cell_is_run() -> None:
    """U25: all code in the last column of the table is in this file, where it runs."""
    rows = [line for line in PAGE.splitlines() if line.startswith("| ")][2:]
    assert len(rows) > 10
    here = Path(__file__).read_text()
    for row in rows:
        cell = row.strip("|").split(" | ")[-1]
        missing = [code for code in re.findall(r"`([^`]+)`", cell) if code not in here]
        assert not missing, row


async def test_publishing() -> None:
    """U25: declaring, publishing with options, calls, handles and results."""
    tasks = Tasks()

    @tasks.task
    def resize(width: int) -> int:
        return 2 * width

    tomorrow = datetime.now(UTC) + timedelta(days=1)
    async with TestQueue(tasks) as taskqueue:
        await resize.publish(7)
        resize.publish_sync(7)
        await resize.using(id="cat", expires_in=60, priority=9).publish(8)
        await resize.using(tenant="acme").publish(7)
        await tasks.publish_many([resize.call(7)])
        await taskqueue.drain()
        assert await resize.handle("cat").result(timeout=30) == 16
        assert resize.handle_sync("cat").result(timeout=30) == 16
        late = [resize.using(delay=5), resize.using(not_before=tomorrow)]
        for each in late:
            await each.publish(9)
        assert (await taskqueue.advance(5)).count() == 1
        assert (await taskqueue.advance(86_400)).count() == 1
        handle = await resize.using(delay=5).publish(1)
        await handle.cancel()
        with pytest.raises(TaskCancelled):
            await handle.result()
        first = taskqueue.published(resize)[2].task
        assert (first.id, first.priority) == ("cat", 9)


async def test_requests_of_handlers() -> None:
    """U25: another attempt, later, never; a time limit; a queue for several tasks."""
    tasks, attempts = Tasks(), list[int]()

    @tasks.task(queue="images")
    def picky(context: Context) -> None:
        attempts.append(context.failures)
        if context.attempt == 1:
            raise Retry(5)
        if context.attempt == 2:
            raise Snooze(60)
        raise Reject("no such image")

    @tasks.task(timeout=30)
    async def quick() -> int:
        await asyncio.sleep(0)
        return 1

    @tasks.task(run="process", timeout=60)
    def heavy() -> int:
        return 2

    async with TestQueue(tasks) as taskqueue:
        handle, done, hard = await picky.publish(), await quick.publish(), await heavy.publish()
        await taskqueue.advance(65)
        assert attempts == [0, 1, 1]
        with pytest.raises(TaskDead) as caught:
            await handle.result()
        assert (handle.key, caught.value.reason) == ("images", "no such image")
        assert (await done.result(), await hard.result()) == (1, 2)


class Timing(Middleware):
    """Notes what runs."""

    runs: ClassVar[list[str]] = []

    async def run(self, context: Context, handle: Callable[[], Awaitable[Any]]) -> Any:
        """Note the queue of the task."""
        self.runs.append(context.key)
        return await handle()


async def test_what_workers_provide() -> None:
    """U25: lifespan, state, middleware, dependencies, and the inline mode for tests."""
    tasks = Tasks(middleware=[Timing()])
    seen = list[str]()

    @tasks.lifespan
    async def lifespan() -> AsyncIterator[str]:
        yield "state"

    @asynccontextmanager
    async def session() -> AsyncIterator[str]:
        yield "session"

    @tasks.task
    def work(context: Context[str], db: str = Depends(session)) -> None:
        seen.extend([context.state, db])

    async with TestQueue(tasks, mode="inline"):
        await work.publish()
    assert (seen, Timing.runs) == (["state", "session"], ["work"])


async def test_policies() -> None:
    """U25: retries, what exceptions mean, limits over all workers, and how long a result is kept."""
    tasks = Tasks()

    class Closed(Exception): ...

    @tasks.task(retry=RetryPolicy(max_attempts=2, base=5))
    def fails() -> None:
        raise OSError

    @tasks.task(on_error={Closed: Snooze(60)})
    def closed(context: Context) -> None:
        if context.attempt == 1:
            raise Closed

    @tasks.task(limits=QueueLimits(rate="1/10s", max_inflight=20))
    def limited() -> None: ...

    async with TestQueue(tasks, errors="record") as taskqueue:
        for each in (fails, closed, limited, limited):
            await each.publish()
        first = await taskqueue.advance(9)
        assert [first.count(each.name) for each in (fails, closed, limited)] == [2, 1, 1]
        later = await taskqueue.advance(60)
        assert [later.count(each.name, "done") for each in (fails, closed, limited)] == [0, 1, 1]


async def test_workflows_and_schedules() -> None:
    """U25: a chain, a result that the next step gets, a group with a callback, and a schedule."""
    tasks, seen = Tasks(), list[int]()

    @tasks.task
    def resize(width: int) -> int:
        return 2 * width

    @tasks.task
    def report(width: int) -> None:
        seen.append(width)

    @tasks.task(schedule=Cron("0 3 * * *"))
    def sweep() -> None:
        seen.append(3)

    async with TestQueue(tasks, start=0) as taskqueue:
        await chain(resize.call(7), report.call(0)).publish()
        await taskqueue.drain()
        assert seen == [0]
        flow = Workflow()
        small = flow.add(resize.call(7))
        flow.add(report.call(small.output))
        await flow.publish()
        await taskqueue.drain()
        assert seen == [0, 14]
        await group(resize.call(7), resize.call(8), then=report.call(0)).publish()
        drained = await taskqueue.drain()
        assert [each.task for each in drained.runs[-3:]] == ["resize", "resize", "report"]
        await taskqueue.advance(3 * 3600)
        assert seen == [0, 14, 0, 3]


async def test_acks_and_results() -> None:
    """U25: a task is acked after its handler has returned; a result is kept for as long as the task declares."""
    tasks = Tasks()

    @tasks.task(result_ttl=3600)
    async def look() -> str:
        status = await look.handle("one").status()
        assert status is not None
        return str(status.state)

    async with TestQueue(tasks) as taskqueue:
        handle = await look.using(id="one").publish()
        await taskqueue.advance(3599)
        assert await handle.result() == State.IN_FLIGHT
        await taskqueue.advance(1)
        with pytest.raises(UnknownTask):
            await handle.result()
