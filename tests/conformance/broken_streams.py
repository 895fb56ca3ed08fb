# ruff: noqa: D102 - each method replaces a documented method of the correct backend
"""Backends that each break one promise about the events of tasks."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from taskqueue_core.capabilities import EventKind, EventPage, NewEvents
from tests.conformance.broken_limits import queue_of
from tests.conformance.facade import FacadeStreams


class _Appends(FacadeStreams):
    """Streams that append other events than they were given."""

    async def append(self, *items: NewEvents) -> tuple[bool, ...]:
        answers: tuple[bool, ...] = await self.inner.append(*map(self.other, items))
        return answers

    def other(self, item: NewEvents) -> NewEvents:
        """Return what is appended instead."""
        return item


class StoresRepetitions(_Appends):
    """Defect: events that are appended again are stored again."""

    def other(self, item: NewEvents) -> NewEvents:
        record = queue_of(self.facade, item.delivery.task.key).records[item.delivery.task.id]
        taken = 0 if record.stream is None else record.stream.taken
        return structs.replace(item, first=max(taken + 1, item.first))


class HidesWhatIsLeftOut(_Appends):
    """Defect: events that the worker leaves out leave no trace."""

    def other(self, item: NewEvents) -> NewEvents:
        record = queue_of(self.facade, item.delivery.task.key).records[item.delivery.task.id]
        taken = 0 if record.stream is None else record.stream.taken
        return structs.replace(item, first=min(taken + 1, item.first))


class _Pages(FacadeStreams):
    """Streams that return other pages than those of the memory backend."""

    async def events(self, key: str, task_id: str, **options: Any) -> EventPage | None:
        page: EventPage | None = await self.inner.events(key, task_id, **options)
        return None if page is None else self.other(page)

    def other(self, page: EventPage) -> EventPage:
        """Return what is returned instead."""
        return page


class HidesTheCut(_Pages):
    """Defect: a reader does not learn that events were cut."""

    def other(self, page: EventPage) -> EventPage:
        kept = tuple(each for each in page.events if each.kind is not EventKind.TRIMMED)
        return structs.replace(page, events=kept)


class HidesTheEnd(_Pages):
    """Defect: the last event does not learn."""

    def other(self, page: EventPage) -> EventPage:
        kept = tuple(each for each in page.events if each.kind is not EventKind.END)
        return structs.replace(page, events=kept)


class NeverEnds(_Pages):
    """Defect: pages do not tell that the task has ended."""

    def other(self, page: EventPage) -> EventPage:
        return structs.replace(page, ended=False)


class KeepsEverything(_Appends):
    """Defect: events are never cut."""

    async def append(self, *items: NewEvents) -> tuple[bool, ...]:
        for item in items:
            queue = queue_of(self.facade, item.delivery.task.key)
            wide = {"stream_events": 10**6, "stream_bytes": 10**9}
            queue.settings = queue.settings.model_copy(update=wide)
        return await super().append(*items)


class IgnoresWhereToContinue(FacadeStreams):
    """Defect: each page begins with the first event."""

    async def events(self, key: str, task_id: str, **options: Any) -> EventPage | None:
        page: EventPage | None = await self.inner.events(key, task_id, **options | {"after": None})
        return page


class DoesNotWait(FacadeStreams):
    """Defect: a reader that waits gets an empty page at once."""

    async def events(self, key: str, task_id: str, **options: Any) -> EventPage | None:
        page: EventPage | None = await self.inner.events(key, task_id, **options | {"wait": 0})
        return page


class KeepsTheStreamOfAnId(_Appends):
    """Defect: a task that uses the id of an earlier one again continues its events."""

    def __init__(self, inner: Any, facade: Any) -> None:
        super().__init__(inner, facade)
        self._streams: dict[str, Any] = {}

    async def append(self, *items: NewEvents) -> tuple[bool, ...]:
        for item in items:
            record = queue_of(self.facade, item.delivery.task.key).records[item.delivery.task.id]
            record.stream = record.stream or self._streams.get(item.delivery.task.id)
        answers = await super().append(*items)
        for item in items:
            record = queue_of(self.facade, item.delivery.task.key).records[item.delivery.task.id]
            self._streams[item.delivery.task.id] = record.stream
        return answers


CASES: tuple[tuple[type, str, str | None], ...] = (
    (StoresRepetitions, "test_repeated_append", "12"),
    (HidesWhatIsLeftOut, "test_left_out_events", "12"),
    (HidesTheCut, "test_trimmed_by_number", "12"),
    (HidesTheEnd, "test_end_of_a_task", "12"),
    (NeverEnds, "test_end_of_a_task", "12"),
    (KeepsEverything, "test_trimmed_by_number", "12"),
    (KeepsEverything, "test_trimmed_by_size", "12"),
    (IgnoresWhereToContinue, "test_events_in_order", "12"),
    (DoesNotWait, "test_waiting_for_events", "12"),
    (KeepsTheStreamOfAnId, "test_id_used_again", "12"),
)
"""each defect, the test of the kit that must fail, and a law that its docstring names"""
