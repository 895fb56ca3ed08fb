"""What every implementation of `Listing` shares: the checks of a query, its cursors, and which tags are indexed.

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

from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import check_name, check_number, check_tag, kind_of
from taskqueue_core.tasks import State

CURSOR_CHARACTERS = 2000
"""maximum number of characters of a cursor"""
_MOST = 1000
_DIGEST = 8
_WITH_WORKER = "a worker is known of tasks in flight, and of ended tasks"

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
    """What a list shows of a queue, and in which order: keyword arguments of `Listing.tasks`."""

    state: State | None
    tenant: str | None
    tag: str | None
    worker: str | None
    newest: bool


class Query(msgspec.Struct, frozen=True, kw_only=True):
    """What a list shows, and in which order. The constructor checks all fields, and raises `InvalidInput`."""

    key: str
    state: State | None = None
    tenant: str | None = None
    tag: str | None = None
    worker: str | None = None
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
            if self.state is not State.IN_FLIGHT and self.state not in ENDED:
                raise InvalidInput("worker", "a worker and another state", f"none: {_WITH_WORKER}")

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

    @property
    def _digest(self) -> bytes:
        return blake2b(_encoder.encode(self), digest_size=_DIGEST).digest()


def check_cursor(after: object) -> None:
    """Raise `InvalidInput` if a value is no text, or longer than any cursor."""
    if not isinstance(after, str) or len(after) > CURSOR_CHARACTERS:
        raise _damaged(after)


def _damaged(after: object) -> InvalidInput:
    return InvalidInput("after", kind_of(after), "the field next of a page, unchanged")


ENDED = (State.DONE, State.EXPIRED, State.CANCELLED, State.DISCARDED)
"""the states of ended tasks"""


def checked_page(limit: int) -> int:
    """Return the ``limit`` of a page, or raise `InvalidInput` if it is not from 1 to 1000."""
    check_number("limit", limit, 1, _MOST)
    return limit
