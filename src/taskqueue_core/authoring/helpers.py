"""Optional helpers for authors of backends: argument checks, waiting in ``receive``, and the limits of a queue."""

from __future__ import annotations

import asyncio
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from types import TracebackType
from typing import NamedTuple, Protocol, Self, overload

from taskqueue_core.capabilities import Durability, QueueSettings
from taskqueue_core.clock import Clock
from taskqueue_core.errors import (
    InvalidInput,
    LeaseLost,
    QueueInUse,
    SubscriptionClosed,
)
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

_REFUSED_FOR = 1.0
"""seconds after which a refused publisher should retry, as it is unknown when the queue will accept tasks again"""


class SubscriptionBase(ABC):
    """A base class that implements iteration and the context manager in terms of `receive` and `close`."""

    @abstractmethod
    async def receive(self, limit: int, timeout: float | None) -> Received:
        """Receive deliveries, as `taskqueue_core.backend.Subscription.receive` requires."""

    @abstractmethod
    async def close(self) -> None:
        """Close the subscription, as `taskqueue_core.backend.Subscription.close` requires."""

    async def __aiter__(self) -> AsyncIterator[Delivery]:
        while True:
            try:
                received = await self.receive(1, None)
            except SubscriptionClosed:
                return
            for delivery in received.deliveries:
                yield delivery

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


class LocalSubscription(SubscriptionBase):
    """A base class for subscriptions to a store in this process: `receive` waits for `notify` instead of polling."""

    def __init__(self, clock: Clock, keys: tuple[str, ...], consumer: str) -> None:
        self.keys = keys
        self.consumer = consumer
        self.since = clock.now()
        self.closed = False
        self._clock = clock
        self._news = asyncio.Event()

    @abstractmethod
    def take(self, limit: int) -> Received:
        """Return up to ``limit`` available deliveries in one step, without waiting.

        Set ``due_at`` if more deliveries will become available at a known time. If the result contains no delivery and
        no expired task, but ``again`` is set, `receive` calls this method again after other coroutines have run.
        """

    @property
    @abstractmethod
    def in_flight(self) -> int:
        """The number of deliveries that the subscription owns."""

    def notify(self) -> None:
        """Wake a waiting `receive`: tasks may have become available, or the subscription was closed."""
        self._news.set()

    async def receive(self, limit: int, timeout: float | None) -> Received:
        """Receive deliveries, as `taskqueue_core.backend.Subscription.receive` requires."""
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
    """An open subscription, with the attributes from which `workers_of` builds a `WorkerInfo`."""

    consumer: str
    keys: tuple[str, ...]
    since: float

    @property
    def in_flight(self) -> int:
        """The number of deliveries that the subscription owns."""


def workers_of(subscriptions: Iterable[Working]) -> tuple[WorkerInfo, ...]:
    """Return the workers that own these open subscriptions, sorted by id, without duplicates."""
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
    """Return the results of a batch as a tuple, or raise `LeaseLost` if the batch was a single stale receipt."""
    settled = tuple(outcomes)
    if settled == (Settled.LEASE_LOST,):
        raise LeaseLost("the receipt is not current: already settled, revoked, or never issued")
    return settled


def checked_keys(keys: Iterable[str]) -> tuple[str, ...]:
    """Return the keys in order, without duplicates. Raises `InvalidInput` if a key or the number of keys is invalid."""
    unique = tuple(dict.fromkeys(keys))
    if not 0 < len(unique) <= LIMITS.keys:
        raise InvalidInput("keys", f"{len(unique)} keys", f"1 to {LIMITS.keys} keys")
    for key in unique:
        check_name("keys", key)
    return unique


def checked_limit(limit: int) -> int:
    """Return the ``limit`` of a receive call, or raise `InvalidInput` if it is not from 1 to `Limits.call`."""
    if not 1 <= limit <= LIMITS.call:
        raise InvalidInput("limit", str(limit), f"1 to {LIMITS.call}")
    return limit


def check_size(field: str, items: Sequence[object]) -> None:
    """Check that a call passes at most `Limits.call` tasks, deliveries or receipts. Raises `InvalidInput`."""
    if len(items) > LIMITS.call:
        raise InvalidInput(field, f"{len(items)} {field}", f"at most {LIMITS.call} in one call")


def checked_progress(value: float | str) -> float | str:
    """Return a number as it is, and text cut to the maximum length. Raises `InvalidInput` for an invalid number."""
    if isinstance(value, str):
        return value[: LIMITS.text]
    if 0 <= value <= 1:
        return value
    raise InvalidInput("progress", "a number out of range", "a number from 0 to 1, or a short text")


def checked_settings(
    settings: QueueSettings,
    durabilities: Collection[Durability],
    *,
    journal: bool = False,
    flow: bool = False,
    fair_order: bool = False,
    floor_share: bool = False,
    fan_out: bool = False,
    listing: bool = False,
) -> QueueSettings:
    """Return the settings, or raise `InvalidInput` if the backend does not support one of them.

    The arguments describe the backend: the supported ``durabilities``, whether it has a ``journal``, and whether it has
    the capabilities ``flow``, ``fair_order``, ``floor_share``, ``fan_out`` and ``listing``.
    """
    promised = settings.durability
    if promised is not None and promised not in durabilities:
        allowed = ", ".join(sorted(durabilities)) or "none"
        raise InvalidInput(
            "durability", f"{promised.value!r}", f"one that this backend supports: {allowed}"
        )
    if settings.journal and not journal:
        raise InvalidInput("journal", "true", "only false, because this backend has no journal")
    for name in () if flow else settings.flow:
        raise InvalidInput(
            name,
            "a value other than the default",
            "only the default, because this backend has no flow control",
        )
    for name in () if fair_order else settings.fair_order:
        raise InvalidInput(
            name,
            "a value other than the default",
            "only the default, because this backend delivers first in, first out",
        )
    for name in () if listing else settings.listing:
        raise InvalidInput(
            name,
            "a value other than the default",
            "only the default, because this backend does not list tasks",
        )
    if settings.floor_share and not floor_share:
        raise InvalidInput(
            "floor_share",
            "a share",
            "only 0, because this backend reserves no share for lower priorities",
        )
    if settings.shards > 1:
        raise InvalidInput(
            "shards", "more than 1", "only 1, because this backend does not support shards"
        )
    if settings.bound_to and not fan_out:
        raise InvalidInput(
            "bound_to", "queues", "none, because this backend does not support fan-out"
        )
    return settings


def refusal(
    task: Task, settings: QueueSettings, waiting: int, of_tenant: int = 0
) -> Confirmation | None:
    """Return the confirmation for a new task that the queue refuses; ``None`` if the queue accepts it.

    ``waiting`` is the number of the queue's tasks that were never delivered; ``of_tenant`` is the number of these tasks
    that belong to the task's tenant. Check for duplicates first: a task that is already stored must not be refused.
    """
    depth: int | None = None
    retry_after: float | None = _REFUSED_FOR
    if settings.moved_to is not None:
        code, reason = Refusal.MOVED, f"the queue has moved to {settings.moved_to!r}"
        retry_after = None
    elif settings.intake_paused:
        code, reason = Refusal.INTAKE_PAUSED, "the intake is paused"
    elif settings.capacity is not None and waiting >= settings.capacity:
        reason = f"tasks waiting for their first delivery: {waiting}; capacity: {settings.capacity}"
        code, depth = Refusal.QUEUE_FULL, waiting
    elif settings.tenant_capacity is not None and of_tenant >= settings.tenant_capacity:
        reason = (
            f"the tenant's tasks waiting for their first delivery: {of_tenant}; "
            f"capacity for each tenant: {settings.tenant_capacity}"
        )
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
    """How many more deliveries a queue's limits allow now."""

    left: int
    """number of further deliveries that are allowed"""
    opens_at: float | None = None
    """time at which the rate limit allows the next delivery, if it allows none now"""


UNLIMITED = QueueRoom(sys.maxsize)
"""the room of a queue without limits"""


def room_of(
    settings: QueueSettings, bucket: Bucket | None, in_flight: int, now: float
) -> QueueRoom:
    """Return how many deliveries the queue's limits allow in addition to those in flight. Updates the ``bucket``."""
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
    """Return a result or ``None`` for each delivery. Raises `InvalidInput` if an argument of the ack is invalid."""
    check_size("deliveries", deliveries)
    if not results:
        return (None,) * len(deliveries)
    if len(results) != len(deliveries):
        got = f"a sequence of length {len(results)}"
        raise InvalidInput("results", got, f"none, or one per delivery ({len(deliveries)})")
    for result in results:
        if result is not None:
            check_json("results", result, "result")
    return results


@overload
def encodable(text: str) -> str: ...
@overload
def encodable(text: str | None) -> str | None: ...
def encodable(text: str | None) -> str | None:
    """Return the text with lone surrogates, which cannot be encoded in UTF-8, replaced by question marks."""
    return None if text is None else text.encode(errors="replace").decode()


def demand_unused(
    key: str,
    *,
    waiting: int,
    scheduled: int,
    running: int,
    dead: int,
    consumers: int,
    blocked: int = 0,
) -> None:
    """Raise `QueueInUse` if a queue that is to be deleted has tasks, dead letters or subscriptions."""
    uses = {
        "blocked tasks": blocked,
        "waiting tasks": waiting,
        "scheduled tasks": scheduled,
        "running tasks": running,
        "dead letters": dead,
        "consumers": consumers,
    }
    counts = ", ".join(f"{use}: {number}" for use, number in uses.items() if number)
    if counts:
        raise QueueInUse(
            f"queue {key!r} is in use ({counts}): purge its tasks, let running tasks end, discard its dead letters "
            "and stop its consumers before you delete it"
        )
