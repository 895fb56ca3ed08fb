"""One source of a composite subscription: a member's subscription that never blocks the other sources."""

from __future__ import annotations

import asyncio
from collections import deque

from taskqueue_core.composite.backend import CompositeBackend
from taskqueue_core.errors import BackendUnavailable, SubscriptionClosed, TaskQueueError
from taskqueue_core.tasks import Delivery, Expired, Received


class Source:
    """A member's subscription, with at most one receive in progress, and its deliveries that are not passed on yet."""

    def __init__(
        self, composite: CompositeBackend, number: int, keys: tuple[str, ...], consumer: str
    ) -> None:
        self.member = composite.members[number]
        self.number = number
        self.keys = keys
        self.subscription = self.member.backend.subscribe(keys, consumer)
        self.retired = False
        """whether receiving has ended; the subscription stays open until its deliveries are settled"""
        self.aside = False
        """whether this source is used only to prefer one shard; other sources cover the same queues"""
        self.question: asyncio.Task[Received] | None = None
        self.error: TaskQueueError | None = None
        self.again = False
        self.due_at: float | None = None
        self.out: dict[str, str] = {}
        """the public receipt of each unsettled delivery, by the member's receipt"""
        self.kept: deque[Delivery] = deque()
        self.expired: list[Expired] = []
        self._waits = False
        self._composite = composite

    @property
    def is_askable(self) -> bool:
        """Whether a receive can be started now."""
        return self.question is None and not self.retired and not self.member.down_for

    @property
    def idle(self) -> bool:
        """Whether no receive is in progress and all received deliveries have been settled."""
        return not (self.out or self.kept or self.question)

    def ask(self, limit: int, timeout: float | None) -> asyncio.Task[Received]:
        """Start a receive; `absorb` collects its result."""
        self._waits = timeout != 0
        self.question = asyncio.create_task(self.subscription.receive(limit, timeout))
        return self.question

    def give_up_waiting(self) -> None:
        """Cancel a receive that waits for tasks. A receive with a timeout of 0 is left alone, as it ends by itself."""
        if self.question is not None and self._waits and not self.question.cancelling():
            self.question.cancel()

    def absorb(self) -> None:
        """Store the result, or the error, of a finished receive."""
        question = self.question
        if question is None or not question.done():
            return
        self.question = None
        if question.cancelled():
            return
        try:
            self.take(question.result())
        except SubscriptionClosed as error:
            self.error = error
        except BackendUnavailable as error:
            self.error = error
            self.member.note_down()
        else:
            self.error = None
            self.member.note_up()

    def take(self, received: Received) -> None:
        """Store the deliveries and expired tasks that a receive returned, until they are passed on."""
        self.again, self.due_at = received.again, received.due_at
        self.expired += received.expired
        for delivery in received.deliveries:
            result = self._composite.from_member(self.number, delivery)
            self.out[delivery.receipt] = result.receipt
            self.kept.append(result)

    def give(self, limit: int) -> list[Delivery]:
        """Remove and return up to ``limit`` deliveries that have been received, but not passed on."""
        return [self.kept.popleft() for _ in range(min(limit, len(self.kept)))]

    def take_back(self, deliveries: list[Delivery]) -> None:
        """Put deliveries back, ahead of the others that have not been passed on yet."""
        self.kept.extendleft(reversed(deliveries))
