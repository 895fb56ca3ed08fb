"""The ``listing`` of a composite backend: the lists of the parts of a queue, one part after the other."""

from __future__ import annotations

from collections import Counter
from functools import partial

from msgspec import structs
from typing_extensions import Unpack

from taskqueue_core.authoring.listings import Filters, Query, checked_page
from taskqueue_core.capabilities import (
    Erasure,
    Listing,
    TaskDetail,
    TaskPage,
    TaskSummary,
    listing_of,
)
from taskqueue_core.capabilities.listing import LOOKED_AT
from taskqueue_core.composite.backend import CompositeBackend, renamed
from taskqueue_core.tasks import State


class JointListing:
    """Implementation of `Listing` for a composite backend. The oldest part comes first, or last with ``newest``."""

    def __init__(self, composite: CompositeBackend) -> None:
        self._composite = composite
        self._of_member: list[Listing] = [
            listing_of(member.backend) for member in composite.members
        ]

    async def tasks(
        self, key: str, *, after: str | None = None, limit: int = 100, **filters: Unpack[Filters]
    ) -> TaskPage:
        query = Query(key=key, **filters)
        most = checked_page(limit)
        start = query.position(after, tuple[int, str | None])
        composite, found, looked_at = self._composite, list[TaskSummary](), 0
        parts = await composite.parts(key)
        step, first = (-1, len(parts) - 1) if query.newest else (1, 0)
        number, inner = start or (first, None)
        while 0 <= number < len(parts) and len(found) < most and looked_at < LOOKED_AT:
            part = parts[number]
            call = partial(
                self._of_member[part.member].tasks,
                part.key,
                after=inner,
                limit=most - len(found),
                **filters,
            )
            page = await composite.ask(composite.members[part.member], call)
            found += [structs.replace(task, key=key) for task in page.tasks]
            looked_at += page.looked_at
            inner = page.next
            number += 0 if inner is not None else step
        more = 0 <= number < len(parts)
        following = query.cursor((number, inner)) if more else None
        return TaskPage(tasks=tuple(found), next=following, looked_at=looked_at)

    async def erase(self, key: str, tag: str, *, limit: int = 1000) -> Erasure:
        left, states, more = checked_page(limit), Counter[State](), False
        composite = self._composite
        for part in await composite.parts(key):
            if left == 0:
                more = True
                break
            erase = partial(self._of_member[part.member].erase, part.key, tag, limit=left)
            erased = await composite.ask(composite.members[part.member], erase)
            states.update(erased.tasks)
            left -= erased.count
            more = more or erased.more
        return Erasure(tasks=dict(states), more=more)

    async def task(self, key: str, task_id: str) -> TaskDetail | None:
        (located,) = await self._composite.locate(key, [task_id])
        if located is None:
            return None
        part, status = located
        member = self._composite.members[part.member]
        call = partial(self._of_member[part.member].task, part.key, task_id)
        detail = await self._composite.ask(member, call)
        if detail is None:
            return None
        return structs.replace(detail, status=status, task=renamed(detail.task, key))
