"""`TestQueue`: durations, and the counting of runs by task and end."""

from __future__ import annotations

from datetime import timedelta

import pytest

from taskqueue_core import Context, NotConnected, Tasks
from taskqueue_core.errors import InvalidInput
from taskqueue_worker import Retry, Snooze
from taskqueue_worker.testing import TestQueue
from tests.application.shop import Shop


async def test_counting(shop: Shop, taskqueue: TestQueue) -> None:
    """U11: runs are counted by the task or its name; a name or an end that does not exist is an error."""
    await shop.charge.publish(17)
    drained = await taskqueue.drain()
    assert (drained.count(shop.charge), drained.count("shop.mail", "done")) == (1, 1)
    with pytest.raises(InvalidInput, match=r"task: got 'mail'; allowed: .*shop\.mail"):
        drained.count("mail")
    with pytest.raises(InvalidInput, match="end: got 'finished'; allowed: done"):
        drained.count(shop.charge, "finished")


async def test_durations_may_be_a_timedelta() -> None:
    """U11: wherever a number of seconds is a delay, a timedelta is one, too; text is an error with an example."""
    tasks = Tasks()

    @tasks.task
    def step(context: Context) -> None:
        if context.attempt == 1:
            raise Retry(timedelta(minutes=1))
        if context.attempt == 2:
            raise Snooze(timedelta(minutes=2))

    hour = timedelta(hours=1)
    async with TestQueue(tasks) as taskqueue:
        handle = await step.using(delay=hour, expires_in=3 * hour).publish()
        assert await handle.reschedule(delay=2 * hour)
        assert (await taskqueue.advance(hour)).count() == 0
        ends = [str(run.end) for run in (await taskqueue.advance(hour + timedelta(minutes=3))).runs]
        assert ends == ["retry", "snoozed", "done"]
        with pytest.raises(
            InvalidInput, match=r"delay: got .*allowed: a number of seconds, such as 600"
        ):
            await step.using(delay="10m").publish()  # type: ignore[arg-type]  # that is the case


async def test_a_task_of_another_registry() -> None:
    """U11: a task whose registry the TestQueue does not have is named, also in an assertion, which would pass."""
    other = Tasks()

    @other.task
    def save(order: int) -> None: ...

    async with TestQueue(Tasks()) as taskqueue:
        with pytest.raises(
            NotConnected, match=r"the task 'save' needs a connection.*include its registry"
        ):
            await save.publish(1)
        with pytest.raises(NotConnected, match="the task 'save' needs"):
            save.publish_sync(1)
        with pytest.raises(NotConnected, match="the task 'save' needs"):
            save.handle("one")
        with pytest.raises(InvalidInput, match=r"task: got 'save'.*tasks of this TestQueue: none"):
            taskqueue.assert_not_published(save)
