"""One of several subscriptions that are received from as one; it blocks no other and loses nothing."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from taskqueue_core.backend import Subscription
from taskqueue_core.composite.backend import Member
from taskqueue_core.errors import BackendUnavailable, SubscriptionClosed, TaskQueueError
from taskqueue_core.tasks import Delivery, Expired, Received


class Source:
    """A subscription of one member, with one receive at a time and its deliveries that were not returned yet."""

    def __init__(
        self,
        member: Member,
        number: int,
        keys: tuple[str, ...],
        subscription: Subscription,
        from_member: Callable[[int, Delivery], Delivery],
    ) -> None:
        """Ask ``subscription``, which is the side's of that ``number``, over ``keys``."""
        self.member = member
        self.number = number
        self.keys = keys
        self.subscription = subscription
        self.retired = False
        """no more is received from it; it stays open for what it has out"""
        self.aside = False
        """it covers nothing that no other source does: it is asked first where that is wanted, and else not at all"""
        self.question: asyncio.Task[Received] | None = None
        self.error: TaskQueueError | None = None
        """why it could not answer last"""
        self.again = False
        self.due_at: float | None = None
        self.out: dict[str, str] = {}
        """its unsettled receipts, with their public names"""
        self.kept: deque[Delivery] = deque()
        self.expired: list[Expired] = []
        self.withdrawn = False
        """its question is being cancelled"""
        self._waits = False
        self._outward = from_member

    @property
    def is_askable(self) -> bool:
        """Whether a receive may bring something."""
        return self.question is None and not self.retired and not self.member.down_for

    @property
    def idle_here(self) -> bool:
        """Whether nothing of it is on its way to a receive."""
        return not (self.kept or self.question)

    @property
    def idle(self) -> bool:
        """Whether nothing of it is out, here or on its way."""
        return not (self.out or self.kept or self.question)

    def ask(self, limit: int, timeout: float | None) -> asyncio.Task[Received]:
        """Start a receive; `absorb` takes its result."""
        self._waits, self.withdrawn = timeout != 0, False
        self.question = asyncio.create_task(self.subscription.receive(limit, timeout))
        return self.question

    def give_up_waiting(self) -> None:
        """Cancel a receive that waits. One that does not wait ends by itself."""
        if self.question is not None and self._waits and not self.withdrawn:
            self.withdrawn = self.question.cancel()

    def absorb(self) -> None:
        """Take the result, if it is there."""
        question = self.question
        if question is None or not question.done():
            return
        self.question = None
        if question.cancelled():
            return
        error = question.exception()
        if error is None:
            self.error = None
            self.member.note_up()
            self.take(question.result())
        elif isinstance(error, BackendUnavailable):
            self.error = error
            self.member.note_down()
        elif isinstance(error, SubscriptionClosed):
            self.error = error
        else:
            raise error

    def take(self, received: Received) -> None:
        """Keep what it has received."""
        self.again, self.due_at = received.again, received.due_at
        self.expired += received.expired
        for delivery in received.deliveries:
            result = self._outward(self.number, delivery)
            self.out[delivery.receipt] = result.receipt
            self.kept.append(result)

    def give(self, limit: int) -> list[Delivery]:
        """Return up to this many of the deliveries that were not returned yet."""
        return [self.kept.popleft() for _ in range(min(limit, len(self.kept)))]

    def take_back(self, deliveries: list[Delivery]) -> None:
        """Keep what was taken and not returned after all."""
        self.kept.extendleft(reversed(deliveries))

    def forget(self, receipt: str) -> None:
        """Note that a receipt of the member has ended."""
        self.out.pop(receipt, None)
