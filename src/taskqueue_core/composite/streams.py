"""The ``streams`` of a composite backend: the stream of a task is in the part that has the task."""

from __future__ import annotations

from taskqueue_core.capabilities import EventPage, NewEvents, checked_page, streams_of
from taskqueue_core.composite.backend import CompositeBackend, QueuePart
from taskqueue_core.concurrency import gather_all


class JointStreams:
    """Implementation of `Streams` for a composite backend.

    If a retry moves a task to another part, the numbers of its events begin with 1 again, in a new stream.
    """

    def __init__(self, composite: CompositeBackend) -> None:
        """Take a composite backend whose members all have the capability ``streams``."""
        self._composite = composite
        self._of_member = [streams_of(member.backend) for member in composite.members]

    async def append(self, *items: NewEvents) -> tuple[bool, ...]:
        by_member: dict[int, list[tuple[int, NewEvents]]] = {}
        for index, item in enumerate(items):
            number, delivery = self._composite.to_member(item.delivery)
            inner = NewEvents(delivery=delivery, events=item.events, first=item.first)
            by_member.setdefault(number, []).append((index, inner))
        answers = [False] * len(items)

        async def append(number: int, placed: list[tuple[int, NewEvents]]) -> None:
            stored = await self._of_member[number].append(*(item for _, item in placed))
            for (index, _), answer in zip(placed, stored, strict=True):
                answers[index] = answer

        await gather_all(append(number, placed) for number, placed in by_member.items())
        return tuple(answers)

    async def events(
        self,
        key: str,
        task_id: str,
        *,
        after: str | None = None,
        limit: int = 100,
        wait: float = 0,
    ) -> EventPage | None:
        checked_page(after, limit, wait)
        parts = await self._composite.parts(key)
        if len(parts) > 1:
            (located,) = await self._composite.locate(key, [task_id])
            if located is not None:
                parts = [located[0]]
            else:  # only the stream of a task that was forgotten is left, if there is one
                wait = 0
        for part in parts:
            page = await self._page(part, task_id, after, limit, wait)
            if page is not None:
                return page
        return None

    async def _page(
        self, part: QueuePart, task_id: str, after: str | None, limit: int, wait: float
    ) -> EventPage | None:
        streams = self._of_member[part.member]
        return await streams.events(part.key, task_id, after=after, limit=limit, wait=wait)
