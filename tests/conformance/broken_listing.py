# ruff: noqa: D102 - each method replaces a documented method of the correct backend
"""Backends that each break one promise about lists of tasks."""

from __future__ import annotations

from base64 import urlsafe_b64decode
from math import inf, nextafter
from typing import Any

import msgspec

from taskqueue_core.authoring import listings
from taskqueue_core.capabilities import Erasure, TaskPage, TaskSummary
from taskqueue_core.clock import ManualClock
from taskqueue_core.tasks import State
from taskqueue_memory.records import TaskRecord
from tests.conformance.facade import Facade, FacadeListing


class ForgetsTheTask(FacadeListing):
    """Defect: a page that is not the last leaves out its last task."""

    async def tasks(self, key: str, **query: Any) -> TaskPage:
        page: TaskPage = await self.inner.tasks(key, **query)
        return page if page.next is None else msgspec.structs.replace(page, tasks=page.tasks[:-1])


class CountsByNumber(FacadeListing):
    """Defect: a cursor is the number of tasks shown before, so tasks that leave move the others past it."""

    async def tasks(self, key: str, **query: Any) -> TaskPage:
        after, limit = query.pop("after", None), query.pop("limit", 100)
        form = listings.Query(key=key, **query)
        start = form.position(after, int) or 0
        page: TaskPage = await self.inner.tasks(key, **query, limit=1000)
        shown = page.tasks[start : start + limit]
        more = len(page.tasks) > start + limit
        cursor = form.cursor(start + limit) if more else None
        return TaskPage(tasks=shown, next=cursor, looked_at=max(len(shown), page.looked_at - start))


class SharesCursors(FacadeListing):
    """Defect: a cursor is accepted with any query."""

    async def tasks(self, key: str, **query: Any) -> TaskPage:
        if (after := query.get("after")) is not None:
            text = urlsafe_b64decode(after + "=" * (-len(after) % 4))
            plain = {name: query[name] for name in query if name not in ("after", "limit")}
            query["after"] = listings.Query(key=key, **plain).cursor(
                msgspec.msgpack.decode(text[8:])
            )
        page: TaskPage = await self.inner.tasks(key, **query)
        return page


class IgnoresTheTenant(FacadeListing):
    """Defect: the list of a tenant has the tasks of all."""

    async def tasks(self, key: str, **query: Any) -> TaskPage:
        page: TaskPage = await self.inner.tasks(key, **query | {"tenant": None})
        return page


class NewestIsTheSame(FacadeListing):
    """Defect: the order is the same with ``newest``."""

    async def tasks(self, key: str, **query: Any) -> TaskPage:
        page: TaskPage = await self.inner.tasks(key, **query | {"newest": False})
        return page


class IgnoresSince(FacadeListing):
    """Defect: a list by time begins with the first task of all."""

    async def tasks(self, key: str, **query: Any) -> TaskPage:
        page: TaskPage = await self.inner.tasks(key, **query | {"since": None})
        return page


class IncludesUntil(FacadeListing):
    """Defect: a list by time has the tasks at its end as well."""

    async def tasks(self, key: str, **query: Any) -> TaskPage:
        until = query.get("until")
        if until is not None:
            query["until"] = nextafter(until, inf)
        page: TaskPage = await self.inner.tasks(key, **query)
        return page


class SearchesFromTheFront(FacadeListing):
    """Defect: the first page looks at all tasks before the time that was asked for."""

    async def tasks(self, key: str, **query: Any) -> TaskPage:
        page: TaskPage = await self.inner.tasks(key, **query)
        if query.get("since") is None or query.get("newest") or query.get("after"):
            return page
        before: TaskPage = await self.inner.tasks(
            key, **query | {"until": query["since"], "since": None}
        )
        return msgspec.structs.replace(page, looked_at=page.looked_at + before.looked_at)


class ForgetsWhoFailed(FacadeListing):
    """Defect: the worker of a dead letter is not known."""

    async def tasks(self, key: str, **query: Any) -> TaskPage:
        page: TaskPage = await self.inner.tasks(key, **query)
        if query.get("state") is not State.DEAD:
            return page
        tasks = tuple(msgspec.structs.replace(task, worker_id=None) for task in page.tasks)
        return msgspec.structs.replace(page, tasks=tasks)


class ShowsThePublishAsDelivery(FacadeListing):
    """Defect: the time of the delivery is that of the publish."""

    async def tasks(self, key: str, **query: Any) -> TaskPage:
        page: TaskPage = await self.inner.tasks(key, **query)
        tasks = list[TaskSummary]()
        for task in page.tasks:
            at = (await self.inner.task(key, task.task_id)).published_at
            tasks.append(msgspec.structs.replace(task, delivered_at=at))
        return msgspec.structs.replace(page, tasks=tuple(tasks))


class SearchesWithoutIndex(Facade):
    """Defect: all tags are indexed, whatever the settings say at the publish."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        store = self.inner._store

        def index(record: TaskRecord) -> None:
            record.queue.tags.add(record, record.task.tags, next(store._seq))

        store._index = index  # type: ignore[method-assign]


class KeepsTooMany(Facade):
    """Defect: ``keep_ended_most`` has no effect."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.inner._store.trim = lambda: 0  # type: ignore[method-assign]


class KnowsKeptIds(Facade):
    """Defect: the id of a kept task stays a duplicate after the window."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        store = self.inner._store
        whole = store._look_up

        def look_up(task: Any, queue: Any, now: float) -> Any:
            known = queue.records.get(task.id)
            kept = queue.settings.keep_ended and known is not None and known.ended
            return whole(task, queue, known.updated_at if kept else now)

        store._look_up = look_up  # type: ignore[method-assign]


class MixesEnds(FacadeListing):
    """Defect: cancelled tasks are on the list of done ones."""

    async def tasks(self, key: str, **query: Any) -> TaskPage:
        page: TaskPage = await self.inner.tasks(key, **query)
        if query.get("state") is not State.DONE or page.next is not None:
            return page
        more: TaskPage = await self.inner.tasks(key, **query | {"state": State.CANCELLED})
        return msgspec.structs.replace(
            page, tasks=page.tasks + more.tasks, looked_at=page.looked_at + more.looked_at
        )


class KeepsErasedRecords(FacadeListing):
    """Defect: an erasure ends the tasks, but keeps their records."""

    async def erase(self, key: str, tag: str, **options: Any) -> Erasure:
        transitions = self.facade.inner._store
        remove = transitions._remove
        transitions._remove = lambda record: record.queue.clear(record)  # type: ignore[method-assign]
        try:
            erased: Erasure = await self.inner.erase(key, tag, **options)
        finally:
            transitions._remove = remove  # type: ignore[method-assign]
        return erased
