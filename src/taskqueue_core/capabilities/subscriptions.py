"""The capabilities that add methods to a subscription."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from taskqueue_core.tasks import Delivery, Settled


class DeadLettering(Protocol):
    """The part of the capability ``dead_letters`` that consumers use."""

    async def dead_letter(
        self,
        delivery: Delivery,
        reason: str,
        error: str | None = None,
        traceback: str | None = None,
    ) -> Settled:
        """End a delivery and make its task a dead letter, with its reason, error and history, in one atomic step.

        ``error`` is added to the history with the last `Limits.traceback` bytes of ``traceback``, as for a retry.

        Raises `LeaseLost` for a stale receipt. Repeating the same settlement returns the same result again.
        """


class Handover(Protocol):
    """The capability ``handover``: a worker keeps its running tasks when it reconnects, to any server of the store."""

    async def adopt(
        self, *receipts: str, allowed: Callable[[str], bool] = bool
    ) -> tuple[Delivery | None, ...]:
        """Move deliveries that belong to the same worker id to this subscription, in one atomic step.

        Return the delivery for each receipt, or ``None`` if the receipt is stale, belongs to another worker, or is
        for a key for which ``allowed`` returns false; such a delivery does not change. The receipts stay valid.
        Closing the previous subscription no longer releases these deliveries.
        """


class Revocation(Protocol):
    """The capability ``revocation``: the consumer learns at once that a delivery has ended."""

    async def revoked(self) -> tuple[str, ...]:
        """Wait for receipts that ended without a settlement by this subscription, and return them.

        For example, a task was cancelled or timed out, or another process scheduled a retry. Receipts that another
        subscription has adopted are not returned. Once the subscription is closed, the result is an empty tuple.
        """
