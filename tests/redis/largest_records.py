"""The largest calls about schedules, the audit log and events."""

from __future__ import annotations

import asyncio
from typing import Any

from taskqueue_core.capabilities import (
    AuditEntry,
    Fire,
    NewEvent,
    NewEvents,
    Outcome,
    QueueSettings,
    Run,
    StoredSchedule,
)
from taskqueue_core.capabilities.schedules import RECENT
from taskqueue_core.limits import LIMITS
from taskqueue_core.tasks import Delivery, Task
from taskqueue_redis import RedisBackend

LARGE = b'"' + b"x" * (LIMITS.payload - 2) + b'"'
_HOUR = 3600.0


def _made_up(stored: StoredSchedule, times: int, payload: bytes) -> Fire:
    at = stored.next_at or 0.0
    return Fire(
        key=stored.key,
        name=stored.name,
        version=stored.version,
        planned_for=at,
        runs=tuple(
            Run(at + n, Task(key=stored.key, id=f"{stored.name}.{at + n}", payload=payload))
            for n in range(times)
        ),
        next_at=at + times,
    )


async def received(consumer: Any, number: int) -> list[Delivery]:
    """Receive as often as necessary, each time with the largest limit."""
    taken: list[Delivery] = []
    while len(taken) < number:
        answer = await consumer.receive(LIMITS.call, 0)
        assert answer.deliveries or answer.again
        taken += answer.deliveries
    return taken


async def schedules(backend: RedisBackend) -> None:
    """Put, list, fire and delete as many schedules as a call may have, and large ones."""
    stored_ones, at, name = backend.schedules, backend.now() - _HOUR, "x" * LIMITS.name
    outcome = Outcome(instant=at, at=at, task_id=name, result=name)
    for spec, number in ((b"{}", LIMITS.batch), (LARGE, 20)):
        for n in range(number):
            stored = StoredSchedule(
                key="scheduled", name=f"s{n}", spec=spec, next_at=at, recent=(outcome,) * RECENT
            )
            await stored_ones.put(stored)
        page = await stored_ones.list(limit=LIMITS.batch)
        while page:
            page = await stored_ones.list(limit=LIMITS.batch, after=page[-1].name)
        payload = b"1" if spec == b"{}" else LARGE
        for times in (1, 40):  # every schedule fires once; then each makes up for 40 instants
            due = (await stored_ones.due(LIMITS.batch)).schedules
            await stored_ones.fire(*(_made_up(one, times, payload) for one in due[:100]))
    await stored_ones.delete("scheduled", "s0")
    await backend.control.maintain()


async def audit(backend: RedisBackend) -> None:
    """Record as many entries as a page may have, with the longest texts, and read them."""
    entry = AuditEntry(
        actor="x" * LIMITS.name, action="redrive", key="x" * LIMITS.name, details="\U0001f600" * 500
    )
    for _ in range(LIMITS.batch):
        await backend.audit.record(entry)
    assert len(await backend.audit.entries(limit=LIMITS.batch)) == LIMITS.batch


async def streams(backend: RedisBackend) -> None:
    """Append and read as many events as a call may have, and large ones; an append that cuts nearly all."""
    appended, key = backend.streams, "streams"
    event = NewEvent(value=b"1", channel="c" * LIMITS.channel)
    large = NewEvent(value=b'"' + b"x" * (LIMITS.event - 2) + b'"')
    await backend.publisher.publish(*(Task(key=key, id=f"t{n}") for n in range(400)))
    async with backend.subscribe([key], "c") as consumer:
        taken = await received(consumer, 400)
        for first in range(1, 5 * LIMITS.batch, LIMITS.batch):
            events = (event,) * LIMITS.batch
            await appended.append(NewEvents(delivery=taken[0], events=events, first=first))
        settings = QueueSettings(stream_bytes=1024)  # the next append cuts nearly all of them
        await backend.control.configure(key, settings)
        await appended.append(*[NewEvents(delivery=d, events=(event,) * 3, first=1) for d in taken])
        wide = QueueSettings(version=1, stream_bytes=64 * 1024 * 1024)
        await backend.control.configure(key, wide)
        some = [NewEvents(delivery=d, events=(large,) * 15, first=4) for d in taken[:20]]
        await appended.append(*some)
        reads = [appended.events(key, d.task.id, limit=LIMITS.batch) for d in taken]
        await asyncio.gather(*reads)
        await backend.control.progress(taken[0], "x" * LIMITS.text)
        await consumer.ack(*taken)
