"""What the store's confirmations of a publish mean."""

from __future__ import annotations

from collections.abc import Iterable

from taskqueue_core.errors import IdConflict, NotUnique, QueueFull
from taskqueue_core.tasks import Confirmation, Published, Refusal

__all__ = ["is_absent", "retry_hints", "stored"]


def stored(confirmation: Confirmation) -> Confirmation:
    """Return the confirmation of a stored task. Raises `QueueFull`, `NotUnique` or `IdConflict` for another one."""
    key, task_id = confirmation.key, confirmation.task_id
    if confirmation.code is Refusal.NOT_UNIQUE:
        raise NotUnique(
            f"queue {key!r} refused the task: {confirmation.reason}",
            task_id=task_id,
            existing_id=confirmation.existing_id,
        )
    if confirmation.status is Published.REFUSED:
        raise QueueFull(
            f"queue {key!r} refused the task: {confirmation.reason}",
            task_id=task_id,
            code=confirmation.code,
            retry_after=confirmation.retry_after,
            depth=confirmation.depth,
        )
    if confirmation.status is Published.CONFLICT:
        raise IdConflict(
            f"id {task_id!r} is already used in queue {key!r} by a task with another payload",
            task_id=task_id,
        )
    return confirmation


def is_absent(answer: Confirmation) -> bool:
    """Return whether the store has no task of this name with the published payload."""
    return not answer.stored or answer.existing_id is not None


def retry_hints(confirmations: Iterable[Confirmation]) -> dict[int, float]:
    """Return, by index, the suggested delays of the refused tasks that may be accepted later."""
    return {
        index: confirmation.retry_after
        for index, confirmation in enumerate(confirmations)
        if confirmation.status is Published.REFUSED and confirmation.retry_after is not None
    }
