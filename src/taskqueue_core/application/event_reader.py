"""Reading the events of a running task, from the side of its publisher."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec

from taskqueue_core.after import TaskRef
from taskqueue_core.application.encoding import Encoding, decoded_result
from taskqueue_core.application.errors import EventsGone, Undecodable, UnknownTask
from taskqueue_core.capabilities import Event as StoredEvent
from taskqueue_core.capabilities import EventKind, EventPage, streams_of
from taskqueue_core.consumer.outage import OUTAGE_BACKOFF, OUTAGE_ERRORS
from taskqueue_core.errors import CapabilityMissing
from taskqueue_core.limits import check_channel
from taskqueue_core.queue import Queue
from taskqueue_core.task_events import read_events

_WAIT = 20.0
"""seconds for which one call of the store waits for events"""
_PAGE = 100


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something that has happened to a task, in the order in which it happened.

    >>> async for event in handle.events():
    ...     print(event.kind, event.value)
    end done
    """

    id: str
    """number of the attempt, "-", and the number of the event: pass it as ``after`` to continue behind this event"""
    kind: EventKind
    """``data`` was streamed; the others are ``attempt``, ``progress``, ``state``, ``trimmed`` and ``end``"""
    channel: str | None = None
    """the channel of an event of the kind ``data``"""
    value: Any = None
    """the streamed value; else the number of the attempt, the progress, the state, or how many events are missing"""
    at: float
    """time of the event, in Unix seconds"""


async def events_of(
    queue: Queue,
    ref: TaskRef,
    after: str | None,
    channels: Sequence[str],
    *,
    strict: bool,
    encoding: Encoding | None,
) -> AsyncGenerator[Event]:
    """Yield the events of a task, see `Handle.events`."""
    for channel in channels:
        check_channel("channels", channel)
    reader = _Reader(queue, ref.key, ref.task_id, after)
    ended = False
    while not ended:
        page = await reader.next_page()
        for stored in page.events:
            if strict and stored.kind is EventKind.TRIMMED:
                raise EventsGone(
                    f"{stored.value.decode()} events of task {ref.task_id} of {ref.key} before {stored.id} are not "
                    "stored any more: read without strict=True, or keep more of them (stream_events, stream_bytes)"
                )
            if not channels or stored.channel in channels:
                yield _decoded(stored, encoding)
        ended = page.ended


@runtime_checkable
class IssuesTickets(Protocol):
    """The ``streams`` of a connection to a server, which issues tickets."""

    async def ticket(self, key: str, task_id: str, seconds: int) -> str:
        """Return a ticket for the events of a task."""
        ...


async def ticket_of(queue: Queue, ref: TaskRef, seconds: int) -> str:
    """Return a ticket for the events of a task, see `Handle.ticket`."""
    streams = streams_of(queue.backend)
    if not isinstance(streams, IssuesTickets):
        raise CapabilityMissing(
            "a server issues tickets: connect with the backend 'server', or send it "
            f"POST /v1/tasks/{ref.key}/{ref.task_id}/ticket"
        )
    return await streams.ticket(ref.key, ref.task_id, seconds)


def blocking(
    run: Callable[[Coroutine[Any, Any, Event | None]], Event | None],
    events: AsyncGenerator[Event],
) -> Iterator[Event]:
    """Yield events; ``run`` waits for a coroutine in another thread."""

    async def following() -> Event | None:
        return await anext(events, None)

    async def close() -> None:
        await events.aclose()

    try:
        while (event := run(following())) is not None:
            yield event
    finally:
        run(close())


class _Reader:
    """Reads page after page. An outage of the store or the server is waited out."""

    def __init__(self, queue: Queue, key: str, task_id: str, after: str | None) -> None:
        self._queue = queue
        self._key = key
        self._id = task_id
        self._after = after
        self._tries = 0

    async def next_page(self) -> EventPage:
        """Return the next page that has events, or is the last one. Raises `UnknownTask`."""
        while True:
            try:
                page = await read_events(
                    self._queue.backend,
                    self._queue.ends,
                    self._key,
                    self._id,
                    after=self._after,
                    limit=_PAGE,
                    wait=_WAIT,
                )
            except OUTAGE_ERRORS:
                self._tries += 1
                await asyncio.sleep(OUTAGE_BACKOFF.delay(self._tries))
                continue
            self._tries = 0
            if page is None:
                raise UnknownTask(
                    f"task {self._id} of {self._key} is unknown: it was never published, or its record was deleted"
                )
            self._after = page.next or self._after
            if page.events or page.ended:
                return page


def _decoded(stored: StoredEvent, encoding: Encoding | None) -> Event:
    text = stored.value
    if stored.kind is EventKind.DATA:
        try:
            text = decoded_result(encoding, text)
        except Undecodable as error:
            raise Undecodable(f"the event {stored.id}: {error}") from None
    return Event(
        id=stored.id,
        kind=stored.kind,
        channel=stored.channel,
        value=msgspec.json.decode(text),
        at=stored.at,
    )
