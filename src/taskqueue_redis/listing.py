"""The capability ``listing`` of the Redis backend: the script `list` reads a page in steps."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from typing_extensions import Unpack

from taskqueue_core.authoring.entries import error_of
from taskqueue_core.authoring.listings import ENDED, Filters, Query, checked_page
from taskqueue_core.capabilities.listing import (
    ERROR_CHARACTERS,
    Erasure,
    TaskDetail,
    TaskPage,
    TaskSummary,
)
from taskqueue_core.errors import InvalidInput
from taskqueue_core.tasks import Failure, State, Task, TaskStatus
from taskqueue_redis.context import RedisContext
from taskqueue_redis.control import RedisControl
from taskqueue_redis.scripts.runner import seconds
from taskqueue_redis.scripts.task_record import (
    NUMBERS,
    cold_of,
    record_of,
    state_of,
    status_of,
    task_in,
)

_STEP = 500
"""maximum number of records that one script call looks at"""
_MOST = 2000
"""maximum number of records that are looked at for one page, which take Redis some tens of milliseconds"""
_MOST_IN_FLIGHT = 1000
"""the same for tasks in flight, of which each record takes Redis longer"""
_SEARCHED = 40
"""maximum number of entries by which a script call finds a time in a list, for 10^12 of them"""
_ERASED = 50
"""maximum number of tasks that one script call erases; each takes some tens of commands"""
_BY_TAG = "tag"
_POSITION = re.compile(
    rb"(?:z\d|J|scheduled|blocked|dead) -?(?:inf|\d{1,17}(?:\.\d{1,17})?(?:e[+-]\d{1,2})?):.{0,400}"
    rb"|[rs]?\d [1-9]\d{0,16}|[rs]\d \d{1,19}-[1-9]\d{0,18}"
    rb"|(?:done|expired|cancelled|discarded) \d{1,17}|tag .{0,400}",
    re.DOTALL,
)
"""the positions that the script returns: the name of a section, and what its pages begin after"""


class RedisListing:
    """The tasks of all queues."""

    def __init__(self, context: RedisContext, control: RedisControl) -> None:
        self._context = context
        self._control = control

    async def tasks(
        self, key: str, *, after: str | None = None, limit: int = 100, **filters: Unpack[Filters]
    ) -> TaskPage:
        query = Query(key=key, **filters)
        limit, by_tag = checked_page(limit), query.tag is not None
        position = query.position(after, bytes) or b""
        if position and not _POSITION.fullmatch(position):
            raise InvalidInput("after", "a damaged cursor", "the field next of a page, unchanged")
        state, worker = query.state, query.worker
        if by_tag or (worker is not None and state in ENDED):
            query.check(await self._control.settings(key))
        tokens = await self._tokens(key, worker) if worker and state is State.IN_FLIGHT else ()
        rest = (
            int(query.newest) or "", query.tenant or "", query.tag or "",
            NUMBERS[state] if by_tag and state is not None else "", worker or "",
            *("" if time is None else round(time * 1_000_000) for time in (query.since, query.until)),
            *tokens,
        )  # fmt: skip
        by_time = query.since is not None or query.until is not None
        tasks: list[TaskSummary] = []
        looked, budget = 0, _MOST_IN_FLIGHT if state is State.IN_FLIGHT else _MOST
        while True:
            at_once = _STEP - _SEARCHED if by_time and not position else _STEP
            most, step = limit - len(tasks), min(at_once, budget - looked)
            found, position, number = await self._run(
                "list", key, _BY_TAG if state is None or by_tag else state, position, most, step, *rest
            )  # fmt: skip
            tasks += [_summary(key, answer) for answer in found]
            looked += number
            if not position or len(tasks) >= limit or looked >= budget:
                break
        following = query.cursor(position) if position else None
        return TaskPage(tasks=tuple(tasks), next=following, looked_at=looked)

    async def task(self, key: str, task_id: str) -> TaskDetail | None:
        reply = await self._run("task", key, task_id)
        status = status_of(key, task_id, reply[0]) if reply else None
        if status is None:
            return None
        answer, body, seq, published, tags, worker, since, tenant = reply
        record = record_of(answer[0])
        priority = 5 if record is None else record.priority
        history, _ = cold_of(answer[2])
        task = Task(
            key=key, id=task_id, priority=priority, tenant=_text(tenant), tags=_tags(tags),
        ) if body is None else task_in(key, task_id, priority, body)  # fmt: skip
        first = published or (
            seq if _since_its_publish(status, task, known=body is not None) else None
        )
        return TaskDetail(
            status=status,
            task=task,
            published_at=None if first is None else seconds(first),
            delivered_at=None if since is None else seconds(since),
            worker_id=_text(worker) or (history[-1].worker if history else None),
            history=tuple(history),
        )

    async def erase(self, key: str, tag: str, *, limit: int = 1000) -> Erasure:
        query, left = Query(key=key, tag=tag), checked_page(limit)
        query.check(await self._control.settings(key))
        states, more = Counter[State](), True
        while more and left > 0:
            numbers, more = await self._run("erase", key, tag, min(_ERASED, left))
            states.update(map(state_of, numbers))
            left -= len(numbers)
        return Erasure(tasks=dict(states), more=bool(more))

    async def _tokens(self, key: str, worker: str) -> tuple[bytes, ...]:
        """Return the consumers of a worker, of those that may have deliveries of a queue."""
        partition = self._context.scripts.partitions.of(key)
        scripts = self._context.scripts
        tokens = [(token,) for token in set(await scripts.run_pages("workers", partition, ""))]
        found = await scripts.run_each("workers", partition, ("of",), tokens)
        return tuple(token for token, name, *_ in found if name == worker.encode())

    async def _run(self, script: str, key: str, *args: Any) -> Any:
        self._context.ensure_open()
        return await self._context.scripts.run(
            script, self._context.scripts.partitions.of(key), key, *args
        )


def _summary(key: str, answer: list[Any]) -> TaskSummary:
    (
        name,
        number,
        attempt,
        losses,
        priority,
        tenant,
        entity,
        at,
        due,
        worker,
        reason,
        error,
        tags,
        delivered,
    ) = answer
    state = state_of(number)
    failure = (
        Failure(attempt=attempt, at=0.0, error=error.decode(errors="ignore")) if error else None
    )
    shown = error_of(state, _text(reason), failure)
    return TaskSummary(
        key=key,
        task_id=name.decode(errors="replace"),
        state=state,
        attempt=attempt,
        losses=losses,
        priority=priority,
        tenant=_text(tenant),
        ordering_key=_text(entity),
        tags=_tags(tags),
        updated_at=seconds(at),
        due_at=float(due) / 1_000_000 if due else None,
        worker_id=_text(worker),
        delivered_at=seconds(delivered) if delivered else None,
        error=None if shown is None else shown[:ERROR_CHARACTERS],
    )


def _text(value: bytes | None) -> str | None:
    return value.decode(errors="replace") or None if value else None


def _tags(packed: bytes | None) -> tuple[str, ...]:
    """Return the tags of a task, of which each follows a NUL."""
    return tuple(packed.decode(errors="replace").split("\0")[1:]) if packed else ()


def _since_its_publish(status: TaskStatus, task: Task, *, known: bool) -> bool:
    """Return whether a task has kept the position that its publish gave it. ``known``: whether its fields are."""
    if not known or status.attempt > 1:
        return False
    if status.state in (State.SCHEDULED, State.BLOCKED):
        return status.state is State.BLOCKED or status.due_at == task.not_before
    return task.not_before is None and task.after is None and task.unique is None
