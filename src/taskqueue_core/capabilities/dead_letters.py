"""The capability ``dead_letters``: tasks that will not be tried again. They are kept until an operator decides."""

from __future__ import annotations

from typing import Protocol

from taskqueue_core.tasks import DeadLetter


class DeadLetters(Protocol):
    """The operations for operators. A consumer creates dead letters with `DeadLettering.dead_letter`."""

    async def list(
        self, key: str, *, limit: int = 100, after: str | None = None
    ) -> tuple[DeadLetter, ...]:
        """Return up to ``limit`` dead letters of a queue, oldest first, starting after the task id ``after``.

        If the task ``after`` is no longer dead, the list starts from the beginning, so that redriving page by page
        skips no dead letter.
        """

    async def get(self, key: str, task_id: str) -> DeadLetter | None:
        """Return one dead letter; ``None`` for a task that is not dead."""

    async def redrive(self, key: str, *task_ids: str) -> int:
        """Make dead letters available again, at the end of their lanes, and return their number. No ids means all.

        The attempt number stays, `Delivery.prior` becomes the number of earlier attempts, and losses start again from
        0. Idempotent: ids of tasks that are not dead are skipped.
        """

    async def discard(self, key: str, *task_ids: str) -> int:
        """End dead letters permanently, in the state ``discarded``. Arguments and result are those of `redrive`."""
