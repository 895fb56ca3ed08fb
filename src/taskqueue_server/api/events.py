"""The events of a running task: as server-sent events while it runs, and page by page."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Any, TypeVar

import msgspec
from msgspec import Raw
from starlette.responses import Response

from taskqueue_core.capabilities import Event, EventPage
from taskqueue_core.concurrency import Interruptible
from taskqueue_core.consumer.outage import OUTAGE_ERRORS
from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import LIMITS, check_channel
from taskqueue_core.task_events import read_events
from taskqueue_server.api.listing import unknown_task
from taskqueue_server.api.rights import READING
from taskqueue_server.context.waiters import MAX_WAIT
from taskqueue_server.routing.event_stream import EVENT_STREAM, EventStream
from taskqueue_server.routing.operations import Operation, Query, RequestContext, answer
from taskqueue_server.routing.parameters import LIMIT

R = TypeVar("R", bound=Response)
_PAGE = 100
_SILENCE = 15.0
"""seconds without an event after which a comment is sent, so that proxies keep the connection"""
_CHUNK = 64 * 1024
"""number of bytes after which a chunk of server-sent events takes no more"""
_MOST_CHANNELS = 20
_COMMENT = b": no events\n\n"
_LAST_EVENT_ID = "Last-Event-ID"
_encoder = msgspec.json.Encoder()


class EventOut(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An event of a task: ``id`` is the number of the attempt, a hyphen, and the number of the event.

    ``value`` is what the task has streamed (``data``), the number of the attempt (``attempt``), the reported progress
    (``progress``), the new state (``state``, ``end``), or how many events are not stored any more (``trimmed``).
    """

    id: str
    kind: str
    channel: str | None = None
    value: Raw
    at: float

    @classmethod
    def of(cls, event: Event) -> EventOut:
        """Convert an event. The bytes of the value are shared."""
        return cls(
            id=event.id,
            kind=event.kind,
            channel=event.channel,
            value=Raw(event.value),
            at=event.at,
        )


class EventsOut(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A page of events. Pass ``next`` as ``after`` for the events that follow, until ``ended`` is true."""

    events: list[EventOut]
    next: str | None = None
    ended: bool = False


async def events(call: RequestContext) -> Response:
    """Return the events of a task, in order, while it runs and for a time after its end.

    A request that accepts ``text/event-stream`` gets them as server-sent events, until the task has ended: ``id`` is
    the id of the event, ``event`` its kind, ``data`` the JSON object. A client that connects again sends the last id in
    the header ``Last-Event-ID``, and misses nothing that is still stored. If the task has ended and nothing follows
    the id, the response is 204, which stops an ``EventSource``. A client that does not read is disconnected.

    A `ticket` in the query takes the place of a token; then pages of the origins in the server's settings may read the
    response, which ends when the ticket expires.

    Any other request gets a page as JSON, at the latest after ``wait`` seconds.
    """
    reading = _Reading(call)
    last = call.request.headers.get(_LAST_EVENT_ID) or None
    # The header has priority: a browser repeats its query when it connects again.
    after = last or call.request.query_params.get("after")
    limit = call.number("limit", _PAGE, LIMITS.batch)
    wait = call.number("wait", 0, MAX_WAIT, lowest=0)
    streams = EVENT_STREAM in call.request.headers.get("accept", "")
    page = await reading.page(after, limit)
    if page is None:
        raise unknown_task()
    if streams:
        if page.ended and not page.events:
            return reading.shared(Response(status_code=204))
        return reading.shared(EventStream(reading.slot(), reading.sent(page)))
    if wait and not page.events and not page.ended:
        with reading.slot():
            async with reading.interruptible() as calls:
                page = await calls.make(reading.page(after, limit, wait)) or page
    shown = [EventOut.of(event) for event in reading.chosen(page)]
    return reading.shared(answer(EventsOut(events=shown, next=page.next, ended=page.ended)))


class _Reading:
    """The task whose events a request reads."""

    def __init__(self, call: RequestContext) -> None:
        self._call = call
        self._key, self._id = call.name("key"), call.name("id")
        self._channels = _channels(call.text("channels"))

    def slot(self) -> AbstractContextManager[None]:
        """Hold a slot for a reader during the block. Raises `ProblemError` if none is free."""
        ticket = self._call.expires is not None
        client = f"ticket for {self._key}/{self._id}" if ticket else self._call.client_name
        return self._call.context.readers.acquire(client)

    def shared(self, response: R) -> R:
        """Let a page of another origin read the response, if it came with a ticket. Its origin was checked before."""
        if self._call.expires is not None and (origin := self._call.request.headers.get("origin")):
            response.headers["access-control-allow-origin"] = origin
            response.headers["vary"] = "origin"
        return response

    def chosen(self, page: EventPage) -> Iterable[Event]:
        """Return the events of a page without those in channels for which the client does not ask.

        The beginning of an attempt, events that are missing, and the end concern the reader of any channel.
        """
        names = self._channels
        return (
            event
            for event in page.events
            if not names or event.channel is None or event.channel in names
        )

    async def page(self, after: str | None, limit: int, wait: float = 0) -> EventPage | None:
        """Return a page; ``None`` if the task is unknown."""
        backend, ends = self._call.context.backend, self._call.context.queue.ends
        return await read_events(
            backend, ends, self._key, self._id, after=after, limit=limit, wait=wait
        )

    @asynccontextmanager
    async def interruptible(self) -> AsyncIterator[Interruptible]:
        """Let calls in the block end if the client's rights change or the server drains, even if there are events."""
        with self._call.watch_access() as revoked:
            async with Interruptible(revoked, self._call.context.draining) as calls:
                yield calls

    async def sent(self, page: EventPage) -> AsyncGenerator[bytes]:
        """Yield the events until the task has ended, the client's rights change, or the server drains."""
        after: str | None = None
        async with self.interruptible() as calls:
            while True:
                for chunk in self._chunks(page):
                    yield chunk
                after = page.next or after
                if page.ended:
                    return
                try:
                    found = await calls.make(self.page(after, _PAGE, _SILENCE))
                except OUTAGE_ERRORS:
                    return  # the client connects again, to a server whose store is available
                if found is None:
                    return
                if not found.events and not found.ended:
                    yield _COMMENT
                page = found

    def _chunks(self, page: EventPage) -> Iterator[bytes]:
        """Yield the chosen events of a page, few enough at a time that little waits for a client that is slow."""
        chunk = bytearray()
        for event in self.chosen(page):
            chunk += _event(event)
            if len(chunk) >= _CHUNK:
                yield bytes(chunk)
                chunk.clear()
        if chunk:
            yield bytes(chunk)


def _channels(text: str | None) -> frozenset[str]:
    names = text.split(",") if text else []
    if len(names) > _MOST_CHANNELS:
        raise InvalidInput("channels", f"{len(names)} names", f"at most {_MOST_CHANNELS} names")
    for name in names:
        check_channel("channels", name)
    return frozenset(names)


def _event(event: Event) -> bytes:
    # JSON text has no line breaks outside of its strings' escapes, except between its tokens.
    data = _encoder.encode(EventOut.of(event)).replace(b"\r", b" ").replace(b"\n", b" ")
    return b"id: %b\nevent: %b\ndata: %b\n\n" % (event.id.encode(), event.kind.encode(), data)


_ID: dict[str, Any] = {"type": "string", "pattern": "^[0-9]{1,5}-[0-9]{1,15}$"}
OPERATIONS = (
    Operation(
        "GET",
        "/v1/tasks/{key}/{id}/events",
        events,
        {200: EventsOut, 204: None},
        id="events_events",
        verb=READING,
        tag="tasks",
        query=(
            Query("after", _ID, "the id of the event after which to begin", example="1-57"),
            Query(
                "channels",
                {"type": "string", "maxLength": LIMITS.text},
                "of the events of the kind `data`, only those in these channels, separated by commas",
                example="data,log",
            ),
            LIMIT,
            Query(
                "ticket",
                {"type": "string", "maxLength": 60},
                "a ticket for this task, instead of a token",
            ),
            Query(
                "wait",
                {"type": "integer", "minimum": 0, "maximum": MAX_WAIT, "default": 0},
                "maximum number of seconds to wait for an event, for a page as JSON",
                example=20,
            ),
        ),
        headers=(Query(_LAST_EVENT_ID, _ID, "the same as `after`, and has priority over it"),),
        ticket=True,
        problems=(404, 429),
    ),
)
