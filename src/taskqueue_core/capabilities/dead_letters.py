"""The capability ``dead_letters``: tasks that failed for good, kept until an operator redrives or discards them."""

from __future__ import annotations

from typing import Protocol

from taskqueue_core.tasks import DeadLetter


class DeadLetters(Protocol):
    """The methods that operators need. `DeadLettering.dead_letter` creates dead letters, and so do too many losses."""

    async def list(
        self, key: str, *, limit: int = 100, after: str | None = None
    ) -> tuple[DeadLetter, ...]:
        """Return up to ``limit`` dead letters of a queue, oldest first, starting after the task id ``after``.

        If the task ``after`` is no longer a dead letter, the list starts from the beginning, so that redriving page by
        page skips no dead letter.
        """

    async def get(self, key: str, task_id: str) -> DeadLetter | None:
        """Return one dead letter; ``None`` if the task is not a dead letter."""

    async def redrive(self, key: str, *task_ids: str) -> int:
        """Make dead letters available again, behind the tasks that already wait, and return their number.

        Without ids, all dead letters of the queue are redriven. The attempt number does not change, `Delivery.prior`
        becomes the number of earlier attempts, and losses are counted from 0 again. Idempotent: ids of tasks that are
        not dead letters are skipped.
        """

    async def discard(self, key: str, *task_ids: str) -> int:
        """End dead letters in the state ``discarded``. The arguments and the result are as for `redrive`."""
