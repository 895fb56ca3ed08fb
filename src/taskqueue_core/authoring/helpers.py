"""What every backend would otherwise write again. Using it is optional; the contract is `taskqueue_core.backend`."""

from __future__ import annotations

import asyncio
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from types import TracebackType
from typing import NamedTuple, Protocol, Self, overload

from taskqueue_core.capabilities import Durability, QueueSettings
from taskqueue_core.clock import Clock
from taskqueue_core.errors import InvalidInput, LeaseLost, SubscriptionClosed
from taskqueue_core.limits import LIMITS, check_json, check_name
from taskqueue_core.rate_limit import Bucket
from taskqueue_core.tasks import (
    Confirmation,
    Delivery,
    Published,
    Received,
    Refusal,
    Settled,
    Task,
    WorkerInfo,
)

__all__ = [
    "UNLIMITED",
    "LocalSubscription",
    "QueueRoom",
    "SubscriptionBase",
    "Working",
    "answer",
    "checked_keys",
    "checked_limit",
    "checked_progress",
    "checked_results",
    "checked_settings",
    "encodable",
    "refusal",
    "reject_ordering_keys",
    "room_of",
    "workers_of",
]

_REFUSED_FOR = 1.0
"""seconds after which a refused publisher may try again; the time of the next delivery, which makes room, is unknown"""


class SubscriptionBase(ABC):
    """Iteration and the context manager, on top of `receive` and `close`."""

    @abstractmethod
    async def receive(self, limit: int, timeout: float | None) -> Received:
        """See `taskqueue_core.backend.Subscription.receive`."""

    @abstractmethod
    async def close(self) -> None:
        """See `taskqueue_core.backend.Subscription.close`."""

    async def __aiter__(self) -> AsyncIterator[Delivery]:
        """Iterate over deliveries one by one, until closed."""
        while True:
            try:
                received = await self.receive(1, None)
            except SubscriptionClosed:
                return
            for delivery in received.deliveries:
                yield delivery

    async def __aenter__(self) -> Self:
        """Return the subscription itself."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        await self.close()


class LocalSubscription(SubscriptionBase):
    """A receive that waits without polling, for a store that lives in this process."""

    def __init__(self, clock: Clock, keys: tuple[str, ...], consumer: str) -> None:
        """Start open."""
        self.keys = keys
        self.consumer = consumer
        self.since = clock.now()
        self.closed = False
        self._clock = clock
        self._news = asyncio.Event()

    @abstractmethod
    def take(self, limit: int) -> Received:
        """Take what is there, in one step; ``due_at`` must be set where time alone will bring more.

        After an answer with nothing but ``again`` it is asked once more, when others have had their turn.
        """

    @property
    @abstractmethod
    def in_flight(self) -> int:
        """How many deliveries it owns."""

    def notify(self) -> None:
        """Have a waiting receive look again: there may be something, or it was closed."""
        self._news.set()

    async def receive(self, limit: int, timeout: float | None) -> Received:
        """See `taskqueue_core.backend.Subscription.receive`."""
        checked_limit(limit)
        self._demand_open()
        end = None if timeout is None else self._clock.now() + timeout
        while not self.closed:
            self._news.clear()
            received = self.take(limit)
            over = end is not None and end <= self._clock.now()
            if received.deliveries or received.expired or over:
                return received
            if received.again:
                await asyncio.sleep(0)
                continue
            dates = [date for date in (end, received.due_at) if date is not None]
            timer = self._clock.call_at(min(dates), self.notify) if dates else None
            try:
                await self._news.wait()
            finally:
                if timer is not None:
                    timer.cancel()
        return Received()

    def _demand_open(self) -> None:
        if self.closed:
            raise SubscriptionClosed("the subscription is closed")


class Working(Protocol):
    """What `workers_of` reads of an open subscription."""

    consumer: str
    keys: tuple[str, ...]
    since: float

    @property
    def in_flight(self) -> int:
        """How many deliveries it owns."""
        ...


def workers_of(subscriptions: Iterable[Working]) -> tuple[WorkerInfo, ...]:
    """Return the workers behind open subscriptions, by name; several connections of one count together."""
    by_name: dict[str, list[Working]] = {}
    for subscription in subscriptions:
        by_name.setdefault(subscription.consumer, []).append(subscription)
    return tuple(
        WorkerInfo(
            worker_id=name,
            connections=len(group),
            keys=tuple(sorted({key for item in group for key in item.keys})),
            in_flight=sum(item.in_flight for item in group),
            since=min(item.since for item in group),
        )
        for name, group in sorted(by_name.items())
    )


def answer(outcomes: Iterable[Settled]) -> tuple[Settled, ...]:
    """Return a batch's outcomes; a single stale receipt raises `LeaseLost`."""
    settled = tuple(outcomes)
    if settled == (Settled.LEASE_LOST,):
        raise LeaseLost("the receipt is not current: already settled, revoked, or never issued")
    return settled


def checked_keys(keys: Iterable[str]) -> tuple[str, ...]:
    """Return the keys of a subscription without repeats, in their order, or raise `InvalidInput`."""
    unique = tuple(dict.fromkeys(keys))
    if not 0 < len(unique) <= LIMITS.keys:
        raise InvalidInput("keys", f"{len(unique)} keys", f"1 to {LIMITS.keys}")
    for key in unique:
        check_name("keys", key)
    return unique


def checked_limit(limit: int) -> int:
    """Return the number of deliveries to take at the most, or raise `InvalidInput`."""
    if limit < 1:
        raise InvalidInput("limit", str(limit), "at least 1")
    return limit


def checked_progress(value: float | str) -> float | str:
    """Return a share from 0 to 1 as it is and a text cut to its limit, or raise `InvalidInput`."""
    if isinstance(value, str):
        return value[: LIMITS.text]
    if 0 <= value <= 1:
        return value
    raise InvalidInput("progress", "a number out of range", "0 to 1, or a short text")


def checked_settings(
    settings: QueueSettings,
    durabilities: Collection[Durability],
    *,
    journal: bool = False,
    flow: bool = False,
    order: bool = False,
    fan_out: bool = False,
) -> QueueSettings:
    """Return settings whose promises the store keeps, or raise `InvalidInput`.

    A store may have a ``journal``, and may keep limits of the ``flow``, an ``order``, and queues bound to others.
    """
    promised = settings.durability
    if promised is not None and promised not in durabilities:
        allowed = ", ".join(sorted(durabilities)) or "none"
        raise InvalidInput(
            "durability", f"{promised.value!r}", f"one that this backend supports: {allowed}"
        )
    if settings.journal and not journal:
        raise InvalidInput("journal", "true", "false: this backend has no journal")
    for name in () if flow else settings.flow:
        raise InvalidInput(name, "a limit", "the default: this backend does not support limits")
    for name in () if order else settings.ordering:
        raise InvalidInput(
            name, "an order", "the default: this backend delivers first in, first out"
        )
    if settings.shards > 1:
        raise InvalidInput("shards", "several", "1: this backend does not support shards")
    if settings.bound_to and not fan_out:
        raise InvalidInput("bound_to", "queues", "none: this backend does not support fan-out")
    return settings


def reject_ordering_keys(tasks: Iterable[Task]) -> None:
    """Raise `InvalidInput` for a task with an ordering key: a publish where there is no ``order`` asks this first."""
    for task in tasks:
        if task.ordering_key is not None:
            raise InvalidInput(
                "ordering_key", "a key", "none: this backend does not support ordering keys"
            )


def refusal(
    task: Task, settings: QueueSettings, waiting: int, of_tenant: int = 0
) -> Confirmation | None:
    """Return the answer to a new task that is not taken in; ``None``: it is.

    ``waiting`` tasks were never delivered, ``of_tenant`` of them are of its tenant. To be asked after it is clear that
    the task's id is not known.
    """
    depth: int | None = None
    retry_after: float | None = _REFUSED_FOR
    if settings.moved_to is not None:
        code, reason = Refusal.MOVED, f"the queue has moved to {settings.moved_to!r}"
        retry_after = None
    elif settings.intake_paused:
        code, reason = Refusal.INTAKE_PAUSED, "the intake is paused"
    elif settings.capacity is not None and waiting >= settings.capacity:
        reason = f"{waiting} of {settings.capacity} tasks wait for their first delivery"
        code, depth = Refusal.QUEUE_FULL, waiting
    elif settings.tenant_capacity is not None and of_tenant >= settings.tenant_capacity:
        reason = f"{of_tenant} of the tenant's {settings.tenant_capacity} tasks wait for their first delivery"
        code, depth = Refusal.TENANT_FULL, of_tenant
    else:
        return None
    return Confirmation(
        key=task.key,
        task_id=task.id,
        status=Published.REFUSED,
        code=code,
        reason=reason,
        retry_after=retry_after,
        depth=depth,
    )


class QueueRoom(NamedTuple):
    """The number of deliveries that a queue's limits allow now."""

    left: int
    """how many deliveries"""
    opens_at: float | None = None
    """when time alone makes room, where there is none"""


UNLIMITED = QueueRoom(sys.maxsize)
"""of a queue without limits"""


def room_of(
    settings: QueueSettings, bucket: Bucket | None, in_flight: int, now: float
) -> QueueRoom:
    """Return what may be delivered from a queue with this many ``in_flight``. Brings its ``bucket`` up to date."""
    remaining = UNLIMITED.left
    if settings.paused:
        remaining = 0
    elif settings.max_inflight:
        remaining = max(0, settings.max_inflight - in_flight)
    if not remaining or bucket is None or settings.rate_limit is None:
        return QueueRoom(remaining)
    tokens = bucket.fill(settings.rate_limit, now)
    return QueueRoom(
        min(remaining, tokens), None if tokens else bucket.next_at(settings.rate_limit)
    )


def checked_results(
    deliveries: Sequence[Delivery], results: Sequence[bytes | None]
) -> Sequence[bytes | None]:
    """Return one result (or ``None``) per delivery, or raise `InvalidInput`."""
    if not results:
        return (None,) * len(deliveries)
    if len(results) != len(deliveries):
        raise InvalidInput("results", f"{len(results)} results", f"none, or {len(deliveries)}")
    for result in results:
        if result is not None:
            check_json("results", result, LIMITS.result)
    return results


@overload
def encodable(text: str) -> str: ...
@overload
def encodable(text: str | None) -> str | None: ...
def encodable(text: str | None) -> str | None:
    """Return text that every store can take: a lone surrogate, which no encoding has, becomes a question mark."""
    return None if text is None else text.encode(errors="replace").decode()
