"""The base of composite backends, which present several backends, or several queues of one backend, as one backend."""

from __future__ import annotations

import asyncio
import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, NamedTuple, Protocol, Self, TypeVar

from taskqueue_core.backend import Backend, Capabilities, Capability, Publisher
from taskqueue_core.capabilities import (
    Control,
    DeadLetters,
    RoomSignal,
    control_of,
    dead_letters_of,
)
from taskqueue_core.errors import BackendUnavailable
from taskqueue_core.tasks import Delivery, Task

S = TypeVar("S", bound="CompositeSubscription")
T = TypeVar("T")

_PAUSE = 1.0
"""seconds after a failed call for which optional calls to the same member are skipped"""


class Member:
    """One of the backends in a composite backend, with a record of whether it is available."""

    def __init__(self, name: str, backend: Backend, *, needed: bool = False) -> None:
        """Raise `CapabilityMissing` if ``backend`` has no ``control``: queues are closed through their settings.

        A ``needed`` member is called every time, even if its last call failed.
        """
        self.name = name
        self.needed = needed
        self.backend = backend
        self.control: Control = control_of(backend)
        self._down_until = -math.inf

    @property
    def dead_letters(self) -> DeadLetters:
        """The dead letters of the member's backend. Raises `CapabilityMissing` if it has none."""
        return dead_letters_of(self.backend)

    @property
    def down_for(self) -> float:
        """Seconds for which optional calls to this member are still skipped; 0 if it may be called."""
        return max(0.0, self._down_until - asyncio.get_running_loop().time())

    def note_down(self) -> None:
        """Record that a call failed or timed out, so that optional calls are skipped for a while."""
        if not self.needed:
            self._down_until = asyncio.get_running_loop().time() + _PAUSE

    def note_up(self) -> None:
        """Record that a call succeeded."""
        self._down_until = -math.inf

    async def within(self, seconds: float, call: Callable[[], Awaitable[T]]) -> T:
        """Return the result of ``call``. Raises `BackendUnavailable` if it takes too long or a recent call failed."""
        if self.down_for:
            raise BackendUnavailable(f"the {self.name} backend is unavailable")
        try:
            async with asyncio.timeout(seconds):
                answer = await call()
        except TimeoutError:
            self.note_down()
            raise BackendUnavailable(f"the {self.name} backend does not answer") from None
        except BackendUnavailable:
            self.note_down()
            raise
        self.note_up()
        return answer


class QueuePart(NamedTuple):
    """A queue of one member: the number of the member, and the key of the queue in that member's backend."""

    member: int
    key: str


class ReceivePlan(NamedTuple):
    """The queues that a composite subscription receives from."""

    parts: tuple[QueuePart, ...]
    refresh_seconds: float | None = None
    """seconds after which the plan must be computed again; ``None``: never"""


class CompositeSubscription(Protocol):
    """The methods of a subscription that its composite backend calls."""

    closed: bool

    def refresh_now(self) -> None:
        """Compute the receive plan again at once."""
        ...

    async def close(self) -> None:
        """Close the subscription."""
        ...


class CompositeBackend(ABC):
    """A backend that consists of several members. Base class of sharding and migration."""

    publisher: Publisher
    control: Control

    def __init__(self, *members: Member) -> None:
        """Take ownership of the members' backends. A subclass sets `publisher` and `control`."""
        self.members = members
        self._subscriptions: set[CompositeSubscription] = set()

    def remember(self, subscription: S) -> S:
        """Register a subscription, so that `aclose` closes it, and return it."""
        self._subscriptions = {item for item in self._subscriptions if not item.closed}
        self._subscriptions.add(subscription)
        return subscription

    async def aclose(self) -> None:
        """Close every subscription and every member."""
        for subscription in tuple(self._subscriptions):
            # If the close fails, the deliveries return when their leases expire.
            with contextlib.suppress(BackendUnavailable):
                await subscription.close()
        for member in reversed(self.members):
            await member.backend.aclose()

    @abstractmethod
    def now(self) -> float:
        """Return the current time of the store, in Unix seconds."""

    @abstractmethod
    async def parts(self, key: str) -> Sequence[QueuePart]:
        """Return every part of the queue ``key``, oldest first."""

    @abstractmethod
    def public_key(self, part: QueuePart) -> str | None:
        """Return the public name of the queue that a part belongs to; ``None`` for a hidden queue."""

    @abstractmethod
    def first_plan(self, keys: tuple[str, ...]) -> ReceivePlan:
        """Return the receive plan of a new subscription, without a call to a store."""

    @abstractmethod
    async def plan(self, keys: tuple[str, ...]) -> ReceivePlan:
        """Return the parts that a subscription to ``keys`` should receive from now."""

    @abstractmethod
    def from_member(self, member: int, delivery: Delivery) -> Delivery:
        """Return a member's delivery as consumers see it, with a receipt that identifies its origin."""

    @abstractmethod
    def to_member(self, delivery: Delivery) -> tuple[int, Delivery]:
        """Return the number of the member that issued a delivery, and the delivery as the member knows it."""

    @abstractmethod
    def member_receipts(self, receipt: str) -> Sequence[tuple[QueuePart, str]]:
        """Return the parts that may have issued a receipt, likeliest first, each with the receipt as it is known there.

        A part with an empty key stands for any queue of the member.
        """

    @abstractmethod
    def adopted(self, member: int, receipt: str, delivery: Delivery) -> Delivery:
        """Return a delivery that a member's `adopt` returned, as consumers see it. Its receipt is still ``receipt``."""

    @abstractmethod
    def renamed(self, part: QueuePart, task: Task) -> Task:
        """Return a member's task with the public name of its queue."""

    async def at_leisure(self, member: Member, call: Callable[[], Awaitable[T]], otherwise: T) -> T:  # noqa: ARG002 - overriding methods use them
        """Return the result of ``call``, or ``otherwise`` if ``member`` is optional and unavailable."""
        return await call()

    @abstractmethod
    def in_turn(self) -> bool:
        """Whether a subscription receives from its sources in rotation; if not, it asks the oldest source first."""


def shared_capabilities(backends: Sequence[Backend]) -> Capabilities:
    """Return the capabilities that all of the backends have."""
    all_of = [backend.capabilities for backend in backends]
    names = frozenset(Capability).intersection(*(capabilities.names for capabilities in all_of))
    return Capabilities(
        names=names,
        shared=all(capabilities.shared for capabilities in all_of),
        durable=all(capabilities.durable for capabilities in all_of),
        atomic_retry=all(capabilities.atomic_retry for capabilities in all_of),
    )


class CombinedSignal:
    """A `RoomSignal` for queues of several backends: a notification from any of them ends the wait."""

    def __init__(self, backends: Sequence[Backend], keys: Sequence[Sequence[str]]) -> None:
        """Use the signals of the backends that have them; ``keys`` has one list of queues per backend."""
        publishers: list[Any] = [backend.publisher for backend in backends]
        self._signals: list[RoomSignal] = [
            publisher.room_signal(*key)
            for publisher, key in zip(publishers, keys, strict=True)
            if key and hasattr(publisher, "room_signal")
        ]
        self._open = AsyncExitStack()

    async def wait(self, timeout: float) -> None:
        """Wait until any of the signals is notified, for at most ``timeout`` seconds."""
        waits = [asyncio.ensure_future(signal.wait(timeout)) for signal in self._signals]
        if not waits:
            await asyncio.sleep(timeout)
            return
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        for waiter in done:
            waiter.result()

    async def __aenter__(self) -> Self:
        """Open all signals."""
        async with AsyncExitStack() as opened:
            for signal in self._signals:
                await opened.enter_async_context(signal)
            self._open = opened.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close all signals."""
        await self._open.aclose()
