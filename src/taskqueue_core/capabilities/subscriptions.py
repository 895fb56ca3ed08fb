"""Capabilities that add verbs to a subscription."""

from __future__ import annotations

from typing import Protocol

from taskqueue_core.tasks import Delivery, Settled

__all__ = ["DeadLettering", "Handover", "Revocation"]


class DeadLettering(Protocol):
    """Part of ``dead_letters``."""

    async def dead_letter(
        self, delivery: Delivery, reason: str, error: str | None = None
    ) -> Settled:
        """End a delivery by putting its task among the dead letters, in one step, with reason, error and history.

        Stale receipts raise `LeaseLost`; the same settlement sent again answers ok again.
        """
        ...


class Handover(Protocol):
    """``handover``: a worker that reconnects, to this or another replica, keeps what it runs."""

    async def adopt(self, *receipts: str) -> tuple[Delivery | None, ...]:
        """Move live deliveries of the same worker identity to this subscription, in one step.

        Answers per receipt: the delivery, with the receipt unchanged and valid, or ``None`` where
        the receipt is stale or belongs to another identity. Closing the subscription that held them
        before no longer touches them.
        """
        ...


class Revocation(Protocol):
    """``revocation``: learn at once that a delivery is no longer yours."""

    async def revoked(self) -> tuple[str, ...]:
        """Wait for receipts that ended without a settlement by this subscription.

        They were cancelled, have expired, or another process scheduled a retry.
        Returns an empty tuple once the subscription is closed. Adopted receipts are not revoked,
        they moved.
        """
        ...
