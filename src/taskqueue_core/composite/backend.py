"""What the parts of a composite backend share: its members, the parts of a queue, and inner and public names."""

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
"""seconds for which an unavailable member is not called again by optional calls"""


class Member:
    """One backend of several."""

    def __init__(self, name: str, backend: Backend, *, needed: bool = False) -> None:
        """Raise `CapabilityMissing` if it has no ``control``: closing a queue is a change of its settings.

        One that is ``needed`` is asked whenever there is a question, however often it was out of reach.
        """
        self.name = name
        self.needed = needed
        self.backend = backend
        self.control: Control = control_of(backend)
        self._down_until = -math.inf

    @property
    def dead_letters(self) -> DeadLetters:
        """Its dead letters, or raise `CapabilityMissing`."""
        return dead_letters_of(self.backend)

    @property
    def down_for(self) -> float:
        """Seconds for which optional calls should leave it alone; 0: it may be called."""
        return max(0.0, self._down_until - asyncio.get_running_loop().time())

    def note_down(self) -> None:
        """Note that it was out of reach, or did not answer in time."""
        if not self.needed:
            self._down_until = asyncio.get_running_loop().time() + _PAUSE

    def note_up(self) -> None:
        """Note that it has answered."""
        self._down_until = -math.inf

    async def within(self, seconds: float, call: Callable[[], Awaitable[T]]) -> T:
        """Return what a call answers in time. Raises `BackendUnavailable`, at once if it was down a moment ago."""
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
    """A queue of one of the members."""

    member: int
    key: str


class ReceivePlan(NamedTuple):
    """The parts that a subscription receives from."""

    parts: tuple[QueuePart, ...]
    refresh_seconds: float | None = None
    """seconds after which another plan may hold; ``None``: this one holds for ever"""


class CompositeSubscription(Protocol):
    """A subscription over several parts, as its backend knows it."""

    closed: bool

    def refresh_now(self) -> None:
        """Read the plan again at once."""
        ...

    async def close(self) -> None:
        """See `taskqueue_core.backend.Subscription.close`."""
        ...


class CompositeBackend(ABC):
    """Several backends or queues as one: what subscriptions, publishers and controls call."""

    publisher: Publisher
    control: Control

    def __init__(self, *members: Member) -> None:
        """Own the backends of ``members``. A subclass sets `publisher` and `control`."""
        self.members = members
        self._subscriptions: set[CompositeSubscription] = set()

    def remember(self, subscription: S) -> S:
        """Return a subscription that is to be closed with the backend."""
        self._subscriptions = {item for item in self._subscriptions if not item.closed}
        self._subscriptions.add(subscription)
        return subscription

    async def aclose(self) -> None:
        """Close every subscription and every member."""
        for subscription in tuple(self._subscriptions):
            with contextlib.suppress(BackendUnavailable):  # its deliveries come back by themselves
                await subscription.close()
        for member in reversed(self.members):
            await member.backend.aclose()

    @abstractmethod
    def now(self) -> float:
        """Return the store's time."""

    @abstractmethod
    async def parts(self, key: str) -> Sequence[QueuePart]:
        """Return every part of a queue, the oldest first."""

    @abstractmethod
    def public_key(self, part: QueuePart) -> str | None:
        """Return the name of the queue that a part belongs to; ``None`` for a hidden one."""

    @abstractmethod
    def first_plan(self, keys: tuple[str, ...]) -> ReceivePlan:
        """Return what can be received from before any store was called."""

    @abstractmethod
    async def plan(self, keys: tuple[str, ...]) -> ReceivePlan:
        """Return what to receive from now."""

    @abstractmethod
    def from_member(self, member: int, delivery: Delivery) -> Delivery:
        """Return a member's delivery as the consumer sees it: its receipt says where it came from."""

    @abstractmethod
    def to_member(self, delivery: Delivery) -> tuple[int, Delivery]:
        """Return a consumer's delivery as its member knows it."""

    @abstractmethod
    def member_receipts(self, receipt: str) -> Sequence[tuple[QueuePart, str]]:
        """Return where a receipt may come from, the likeliest first, each with its name there.

        The key of such a part may be empty: any of the member's.
        """

    @abstractmethod
    def adopted(self, member: int, receipt: str, delivery: Delivery) -> Delivery:
        """Return a delivery that a member gave for this receipt: as `from_member`, with the receipt unchanged."""

    @abstractmethod
    def renamed(self, part: QueuePart, task: Task) -> Task:
        """Return a member's task under its public name."""

    async def at_leisure(self, member: Member, call: Callable[[], Awaitable[T]], otherwise: T) -> T:  # noqa: ARG002 - overridden
        """Return the answer of a member, or ``otherwise`` if it is unavailable and optional."""
        return await call()

    @abstractmethod
    def in_turn(self) -> bool:
        """Whether sources are asked in turn; if not, the oldest first."""


def shared_capabilities(backends: Sequence[Backend]) -> Capabilities:
    """Return what all backends can do."""
    all_of = [backend.capabilities for backend in backends]
    names = frozenset(Capability).intersection(*(capabilities.names for capabilities in all_of))
    return Capabilities(
        names=names,
        shared=all(capabilities.shared for capabilities in all_of),
        durable=all(capabilities.durable for capabilities in all_of),
        atomic_retry=all(capabilities.atomic_retry for capabilities in all_of),
    )


class CombinedSignal:
    """See `taskqueue_core.capabilities.RoomSignal`."""

    def __init__(self, backends: Sequence[Backend], keys: Sequence[Sequence[str]]) -> None:
        """Listen to some queues of each backend that has signals."""
        publishers: list[Any] = [backend.publisher for backend in backends]
        self._signals: list[RoomSignal] = [
            publisher.room_signal(*key)
            for publisher, key in zip(publishers, keys, strict=True)
            if key and hasattr(publisher, "room_signal")
        ]
        self._open = AsyncExitStack()

    async def wait(self, timeout: float) -> None:
        """Wait until one is notified, up to ``timeout`` seconds."""
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
        """Open all."""
        async with AsyncExitStack() as opened:
            for signal in self._signals:
                await opened.enter_async_context(signal)
            self._open = opened.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close all."""
        await self._open.aclose()
