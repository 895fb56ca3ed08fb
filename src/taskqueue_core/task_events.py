"""Reading the events of a task, of which a task that streams nothing has one: its end."""

from __future__ import annotations

import msgspec

from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import Event, EventKind, EventPage, control_of, streams_of
from taskqueue_core.concurrency import first_completed
from taskqueue_core.task_ends import TaskEnds


async def read_events(
    backend: Backend,
    ends: TaskEnds,
    key: str,
    task_id: str,
    *,
    after: str | None = None,
    limit: int = 100,
    wait: float = 0,
) -> EventPage | None:
    """Return a page of events as `Streams.events` does; wait for the end of a task without a stream as well.

    For such a task, which the store does not tell from one whose events are not kept any more, the page has an event
    ``end`` with the id ``0-1``. Raises the errors of the store.
    """
    streams = streams_of(backend)

    async def read(seconds: float) -> EventPage | None:
        return await streams.events(key, task_id, after=after, limit=limit, wait=seconds)

    async def read_at_end() -> EventPage | None:
        await ends.wait(key, task_id, wait_for_redrive=True)
        return await read(0)

    if after is not None:
        return await read(wait)  # the task has a stream, which its end is in
    page = await read(0)
    if wait and page is not None and not page.events and not page.ended:
        page = await first_completed(read(wait), read_at_end())
    if page is None or page.events or not page.ended:
        return page
    (status,) = await control_of(backend).statuses(key, task_id)
    if status is None:
        return page
    value = msgspec.json.encode(status.state)
    end = Event(id="0-1", kind=EventKind.END, value=value, at=status.updated_at)
    return EventPage(events=(end,), next=end.id, ended=True)
