"""The capabilities that add methods to a subscription or to the publisher."""

from __future__ import annotations

from typing import Protocol, Self

from taskqueue_core.tasks import Delivery, Settled


class DeadLettering(Protocol):
    """The consumer's part of the capability ``dead_letters``."""

    async def dead_letter(
        self, delivery: Delivery, reason: str, error: str | None = None
    ) -> Settled:
        """End a delivery and make its task a dead letter, with reason, error and history, in one step.

        Raises `LeaseLost` for a stale receipt. Repeating the same settlement returns the same result again.
        """


class Handover(Protocol):
    """The capability ``handover``: a worker that reconnects, to any server of the store, keeps its running tasks."""

    async def adopt(self, *receipts: str) -> tuple[Delivery | None, ...]:
        """Move deliveries of the same worker id to this subscription, in one step.

        Returns the delivery for each receipt, which stays valid, or ``None`` if the receipt is stale or belongs to
        another worker. Closing the subscription that owned the deliveries before does not release them any more.
        """


class Revocation(Protocol):
    """The capability ``revocation``: the consumer learns at once that a delivery has ended."""

    async def revoked(self) -> tuple[str, ...]:
        """Wait for receipts that ended without a settlement by this subscription, and return them.

        Their tasks were cancelled or have expired, or another process scheduled a retry. Receipts that another
        subscription has adopted are not returned. Once the subscription is closed, the result is an empty tuple.
        """


class RoomSignal(Protocol):
    """A notification that queues may accept tasks again: an async context manager, which is active while it is open."""

    async def wait(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds for a notification. Return at once if one was sent since the last call.

        A notification is sent when a task leaves a full queue, publishing is resumed or the settings change. It may
        also be sent without a reason, so the caller has to try again and may be refused again.
        """

    async def __aenter__(self) -> Self:
        """Return the signal once it is active: it misses no notification from now on."""

    async def __aexit__(self, *_: object) -> None:
        """Close the signal."""


class RoomSignals(Protocol):
    """The additional method of the publisher, for backends with the capability ``flow``."""

    def room_signal(self, *keys: str) -> RoomSignal:
        """Return a signal for some queues. It does no I/O before it is opened."""
