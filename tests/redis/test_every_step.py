"""A process that dies before or after each of its calls to the store."""

from __future__ import annotations

from typing import Any

import pytest

from taskqueue_core.capabilities import StoredSchedule
from taskqueue_core.consumer import firing
from taskqueue_core.errors import TaskQueueError
from taskqueue_core.schedules import Every, Schedule, Spec, TaskTemplate
from taskqueue_core.tasks import Settled, Task
from taskqueue_redis import RedisBackend
from tests.redis.backends import KEY, opened, publish, take
from tests.redis.links import settings_for
from tests.redis.servers import RedisServer

TASKS = [f"t{n}" for n in range(4)]


class Died(Exception):
    """Raised in place of a call of the process that died."""


class Mortal:
    """Lets a backend die at its n-th call to the store: before the call, or after it with the answer unread."""

    def __init__(self, backend: RedisBackend, at: int, *, after: bool) -> None:
        self.calls = 0
        self._at = at
        self._after = after
        self._command = backend._context.client.command
        backend._context.client.command = self.command  # type: ignore[method-assign]

    async def command(self, *words: Any, **options: Any) -> Any:
        """Forward a call, or raise `Died`."""
        self.calls += 1
        if self.calls > self._at or (self.calls == self._at and not self._after):
            raise Died
        answer = await self._command(*words, **options)
        if self.calls == self._at:
            raise Died
        return answer


async def live(backend: RedisBackend) -> None:
    """Use every verb once."""
    await publish(backend, *TASKS)
    subscription = backend.subscribe([KEY], "mortal")
    first, second, third, fourth = await take(subscription, 4)
    assert await subscription.ack(first) == (Settled.OK,)
    await subscription.redeliver(second)
    await backend.publisher.schedule_retry(
        third.task, backend.now() - 1, error="failed", traceback="where", settles=third
    )
    await backend.control.reschedule(KEY, third.task.id, backend.now() - 2)
    await subscription.dead_letter(fourth, "enough")
    (second,) = await take(subscription, 1, limit=1)
    await subscription.redeliver(second, lost=True)
    await backend.dead_letters.redrive(KEY)
    (some,) = await take(subscription, 1, limit=1)
    await backend.control.cancel(KEY, some.task.id)
    await backend.control.maintain()


async def bury(backend: RedisBackend) -> None:
    """Close the connections without releasing any delivery."""
    backend._context.closing.set()
    await backend._context.heartbeat.aclose()
    await backend._context.wakeups.aclose()
    await backend._context.client.aclose()


async def survives(server: RedisServer, prefix: str) -> dict[str, str]:
    """Recover the deliveries of the dead process, execute all remaining tasks, and return the final state of each."""
    partition = f"{{{prefix}:0}}"
    async with opened(server.url, prefix) as heir:
        for token in server.call("ZRANGE", f"{partition}:alive", 0, -1):
            # Make the store believe that the consumer has been silent for very long.
            server.call("ZADD", f"{partition}:alive", "XX", 0, token)
        await heir.control.maintain()
        server.call("HSET", f"{partition}:meta", "armed", 1)
        await heir.control.maintain()
        assert (await heir.control.ledger(KEY)).balanced
        assert (await heir.control.ledger(KEY)).in_flight == 0
        known = await heir.control.statuses(KEY, *TASKS)
        lost = [name for name, status in zip(TASKS, known, strict=True) if status is None]
        assert not lost or len(lost) == len(TASKS), "a publish came through in part"
        # The producer does not know whether its publish was stored, so it publishes again.
        await heir.publisher.publish(*(Task(key=KEY, id=name) for name in TASKS))
        async with heir.subscribe([KEY], "heir") as subscription:
            while (received := await subscription.receive(10, 0)).deliveries:
                await subscription.ack(*received.deliveries)
        ledger = await heir.control.ledger(KEY)
        assert ledger.balanced
        assert (ledger.published, ledger.waiting, ledger.in_flight, ledger.scheduled) == (
            4,
            0,
            0,
            0,
        )
        ended = await heir.control.statuses(KEY, *TASKS)
        return {status.task_id: status.state for status in ended if status is not None}


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_a_crash_at_every_step(
    redis_server: RedisServer, redis_prefix: str, *, after: bool
) -> None:
    """Fault M4, law 1: whichever call is the last of a process, every task is accounted for and can be finished."""
    at, died = 0, True
    while died:
        at += 1
        prefix = f"{redis_prefix}-{at}"
        backend = RedisBackend(
            settings=settings_for(redis_server.url, prefix=prefix, lease=1.0, housekeeping=0.25)
        )
        Mortal(backend, at, after=after)
        died = False
        try:
            await live(backend)
        except (Died, TaskQueueError):
            died = True
        await bury(backend)
        states = await survives(redis_server, prefix)
        assert len(states) == len(TASKS)
        assert set(states.values()) <= {"done", "dead", "cancelled"}
    assert at > 15, "the story has more steps than that"


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_a_crash_at_every_step_of_firing(
    redis_server: RedisServer, redis_prefix: str, monkeypatch: pytest.MonkeyPatch, *, after: bool
) -> None:
    """U14, fault A6: whichever call is the last of a process that fires schedules, each instant has one task."""
    monkeypatch.setattr(firing, "_AT_ONCE", 2)
    at, died = 0, True
    while died:
        at += 1
        prefix = f"{redis_prefix}-{at}"
        async with opened(redis_server.url, prefix) as heir:
            due = heir.now() - 1
            for number in range(5):
                schedule = Schedule(f"s{number}", Every(86_400), TaskTemplate(key=KEY))
                stored = StoredSchedule(
                    key=KEY, name=schedule.name, spec=Spec(schedule=schedule).encode(), next_at=due
                )
                await heir.schedules.put(stored)
            backend = RedisBackend(settings=settings_for(redis_server.url, prefix=prefix))
            Mortal(backend, at, after=after)
            died = False
            try:
                await firing.fire_due(backend.schedules, set())
            except (Died, TaskQueueError):
                died = True
            await bury(backend)
            await firing.fire_due(heir.schedules, set())
            assert (await heir.control.ledger(KEY)).published == 5
            for stored in await heir.schedules.list():
                assert [outcome.result for outcome in stored.recent] == ["accepted"]
                assert (stored.next_at or 0.0) > due + 1
    assert at > 4, "firing has more steps than that"
