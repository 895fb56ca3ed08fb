"""What every implementation of `Listing` shares: the checks of a query, its cursors, and what is shown of a task.

A cursor is opaque text for clients, and comes back from them unchanged, damaged or forged. It contains the position at
which a page ended, in the form that the backend chose, and a digest of the query that it belongs to. `Query.position`
refuses everything that `Query.cursor` cannot have made. A position gives access to nothing: a forged one that has the
right form shows another page of the same query.
"""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Collection
from hashlib import blake2b
from typing import TypedDict, TypeVar

import msgspec
from msgspec.structs import force_setattr

from taskqueue_core.authoring.entries import Entry
from taskqueue_core.capabilities import QueueSettings, TaskDetail, TaskSummary
from taskqueue_core.capabilities.listing import ERROR_CHARACTERS
from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import check_name, check_number, check_tag, check_time, kind_of
from taskqueue_core.tasks import State

CURSOR_CHARACTERS = 2000
"""maximum number of characters of a cursor"""
_MOST = 1000
_DIGEST = 8
ENDED = (State.DONE, State.EXPIRED, State.CANCELLED, State.DISCARDED)
"""the states of ended tasks"""
BY_TIME = (State.SCHEDULED, State.DEAD, *ENDED)
"""the states whose lists are in the order of a time, which ``since`` and ``until`` limit"""
_WITH_WORKER = (
    "none, or the state in_flight, dead, or one of ended tasks, of which a worker is known"
)
_WITH_TIMES = f"none, or one of these states and no tag, for a list by time: {', '.join(BY_TIME)}"

T = TypeVar("T")
_encoder = msgspec.msgpack.Encoder()


def tag_name(tag: str) -> str:
    """Return the name of a tag, by which queues index it: the part before the first colon, or all of it.

    >>> tag_name("user:42"), tag_name("urgent")
    ('user', 'urgent')
    """
    return tag.partition(":")[0]


def indexed_tags(index: Collection[str], tags: tuple[str, ...]) -> tuple[str, ...]:
    """Return those tags of a task that the setting ``index`` of its queue names."""
    return tuple([tag for tag in tags if tag_name(tag) in index]) if index and tags else ()


class Filters(TypedDict, total=False):
    """What a list shows of a queue, and in which order: keyword arguments of `Listing.tasks` and `Queue.tasks`."""

    state: State | None
    """required without a tag"""
    tenant: str | None
    tag: str | None
    worker: str | None
    since: float | None
    """the first time, in Unix seconds"""
    until: float | None
    """the time before which the last one is, in Unix seconds"""
    newest: bool
    """whether the order is the exact reverse"""


class Query(msgspec.Struct, frozen=True, kw_only=True):
    """What a list shows, and in which order. The constructor checks all fields, and raises `InvalidInput`."""

    key: str
    state: State | None = None
    tenant: str | None = None
    tag: str | None = None
    worker: str | None = None
    since: float | None = None
    until: float | None = None
    newest: bool = False

    def __post_init__(self) -> None:
        check_name("key", self.key)
        if self.state is None and self.tag is None:
            raise InvalidInput("state", "none", "a state, because the list has no tag either")
        if self.state is not None and not isinstance(self.state, State):
            raise InvalidInput("state", kind_of(self.state), f"one of: {', '.join(State)}")
        if self.tenant is not None:
            check_name("tenant", self.tenant)
        if self.tag is not None:
            check_tag("tag", self.tag)
        if self.worker is not None:
            check_name("worker", self.worker)
            if self.state is not State.IN_FLIGHT and self.state not in (State.DEAD, *ENDED):
                raise InvalidInput("worker", "a worker and another state", _WITH_WORKER)
        self._check_times()

    def _check_times(self) -> None:
        for name in ("since", "until"):
            time = getattr(self, name)
            if time is None:
                continue
            check_time(name, time)
            if self.tag is not None or self.state not in BY_TIME:
                raise InvalidInput(name, "a time and another list", _WITH_TIMES)
            force_setattr(self, name, float(time))  # the same cursor for 5 and 5.0
        if self.since is not None and self.until is not None and self.until <= self.since:
            raise InvalidInput("until", "a time that is not after since", "a later one than since")

    def check(self, settings: QueueSettings) -> None:
        """Raise `InvalidInput` if the settings of the queue do not allow this list."""
        if self.tag is not None and tag_name(self.tag) not in settings.index:
            raise InvalidInput(
                "tag",
                "a tag that the queue does not index",
                f"one whose name, before the first colon, is in the queue's setting index "
                f"({', '.join(settings.index) or 'which is empty'})",
            )
        if self.worker is not None and self.state in ENDED and not settings.keep_ended:
            raise InvalidInput(
                "worker",
                "a worker of ended tasks",
                "none, because the queue does not have the setting keep_ended",
            )

    def cursor(self, position: object) -> str:
        """Return the cursor of a position, which may consist of anything that MessagePack can encode."""
        return urlsafe_b64encode(self._digest + _encoder.encode(position)).rstrip(b"=").decode()

    def position(self, after: str | None, form: type[T]) -> T | None:
        """Return the position in a cursor; ``None`` for no cursor. Raises `InvalidInput`."""
        if after is None:
            return None
        check_cursor(after)
        try:
            text = urlsafe_b64decode(after + "=" * (-len(after) % 4))
            position = msgspec.msgpack.decode(text[_DIGEST:], type=form)
        except (ValueError, RecursionError) as error:
            raise _damaged(after) from error
        if text[:_DIGEST] != self._digest:
            raise InvalidInput(
                "after",
                "the cursor of another query",
                "one of a page with the same queue, filters and order",
            )
        return position

    def matches(self, entry: Entry) -> bool:
        """Return whether the list shows an entry of its queue, if the time of the entry is within the limits."""
        return (
            entry.replaced is None
            and self.state in (None, entry.state)
            and self.tenant in (None, entry.task.tenant)
            and self.worker in (None, entry.known_worker)
        )

    @property
    def _digest(self) -> bytes:
        return blake2b(_encoder.encode(self), digest_size=_DIGEST).digest()


def check_cursor(after: object) -> None:
    """Raise `InvalidInput` if a value is no text, or longer than any cursor."""
    if not isinstance(after, str) or len(after) > CURSOR_CHARACTERS:
        raise _damaged(after)


def _damaged(after: object) -> InvalidInput:
    return InvalidInput("after", kind_of(after), "the field next of a page, unchanged")


def checked_page(limit: int) -> int:
    """Return the ``limit`` of a page, or raise `InvalidInput` if it is not from 1 to 1000."""
    check_number("limit", limit, 1, _MOST)
    return limit


def summary_of(entry: Entry) -> TaskSummary:
    """Return an entry as a list shows it."""
    task, status = entry.task, entry.status
    worker = entry.known_worker
    return TaskSummary(
        key=task.key,
        task_id=task.id,
        state=status.state,
        attempt=status.attempt,
        losses=status.losses,
        priority=task.priority,
        tenant=task.tenant,
        ordering_key=task.ordering_key,
        tags=task.tags,
        updated_at=status.updated_at,
        due_at=status.due_at,
        worker_id=worker,
        delivered_at=None if worker is None else entry.delivered_at or None,
        error=status.error and status.error[:ERROR_CHARACTERS],
    )


def detail_of(entry: Entry) -> TaskDetail:
    """Return all that an entry says of its task."""
    return TaskDetail(
        status=entry.status,
        task=entry.task,
        published_at=entry.published_at or None,
        delivered_at=entry.delivered_at or None,
        worker_id=entry.worker,
        history=tuple(entry.history),
    )
