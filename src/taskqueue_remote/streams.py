"""The events of running tasks of a server's backend, read over HTTP."""

from __future__ import annotations

import math

import msgspec

from taskqueue_core.capabilities import Event, EventKind, EventPage, NewEvents, checked_page
from taskqueue_core.errors import CapabilityMissing
from taskqueue_core.server_address import path
from taskqueue_remote.client import HttpClient
from taskqueue_remote.problems import problem_of

_LONGEST_WAIT = 20
"""seconds for which a request waits, less than the timeout of the client"""


class _Event(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    kind: EventKind
    channel: str | None = None
    value: msgspec.Raw
    at: float


class _Page(msgspec.Struct, frozen=True, kw_only=True):
    events: list[_Event]
    next: str | None = None
    ended: bool = False


class _Ticket(msgspec.Struct, frozen=True):
    ticket: str


class RemoteStreams:
    """The events of the server's backend."""

    def __init__(self, client: HttpClient) -> None:
        self._client = client

    async def append(self, *items: NewEvents) -> tuple[bool, ...]:
        """Raise `CapabilityMissing`: a worker sends events over its socket."""
        if not items:
            return ()
        raise CapabilityMissing("the server backend does not append events: a worker's socket does")

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
        query: dict[str, str | int] = {"limit": limit} | ({} if after is None else {"after": after})
        if wait:
            query["wait"] = min(_LONGEST_WAIT, math.ceil(wait))
        target = path("tasks", key, task_id, "events")
        answer = await self._client.fetch("GET", target, query=query)
        if not answer.ok:
            if problem_of(answer.status, answer.body).code == "unknown_task":
                return None
            raise self._client.error(answer)
        found = self._client.decode(answer.body, _Page)
        events = tuple(
            Event(id=e.id, kind=e.kind, channel=e.channel, value=bytes(e.value), at=e.at)
            for e in found.events
        )
        return EventPage(events=events, next=found.next, ended=found.ended)

    async def ticket(self, key: str, task_id: str, seconds: int) -> str:
        """Return a ticket for the events of a task, which is valid for some seconds. Raises `InvalidInput`."""
        target = path("tasks", key, task_id, "ticket")
        return (await self._client.ask("POST", target, _Ticket, body={"seconds": seconds})).ticket
