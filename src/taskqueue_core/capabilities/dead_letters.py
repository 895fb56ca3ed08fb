"""``dead_letters``: tasks that will not be tried again, kept until an operator decides. Dead letters never expire."""

from __future__ import annotations

from typing import Protocol

from taskqueue_core.tasks import DeadLetter

__all__ = ["DeadLetters"]


class DeadLetters(Protocol):
    """The operator's side. `DeadLettering.dead_letter` is the consumer's."""

    async def list(
        self, key: str, *, limit: int = 100, after: str | None = None
    ) -> tuple[DeadLetter, ...]:
        """Return dead letters of a queue, oldest first; ``after`` is the last task id of the previous page.

        If that task is no longer dead, the list starts from the beginning, so that a redrive page by page misses none.
        """
        ...

    async def get(self, key: str, task_id: str) -> DeadLetter | None:
        """Return one dead letter; ``None`` for a task that is not dead."""
        ...

    async def redrive(self, key: str, *task_ids: str) -> int:
        """Make dead tasks waiting again, at the end of their lanes; no ids means all. Returns how many moved.

        The attempt stays, `Delivery.prior` is the number of spent attempts, and losses start again from 0.
        Idempotent: ids that are not dead are passed over.
        """
        ...

    async def discard(self, key: str, *task_ids: str) -> int:
        """Give dead tasks up for good: they count as ``discarded``. Otherwise like `redrive`."""
        ...
