"""The capabilities that add methods to a subscription."""

from __future__ import annotations

from typing import Protocol

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
