"""The largest calls about schedules and the audit log."""

from __future__ import annotations

from taskqueue_core.capabilities import AuditEntry, Fire, Outcome, Run, StoredSchedule
from taskqueue_core.capabilities.schedules import RECENT
from taskqueue_core.limits import LIMITS
from taskqueue_core.tasks import Task
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
