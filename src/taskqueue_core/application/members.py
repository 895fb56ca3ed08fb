"""The results of the members of a batch, which the store does not list: they are found by a tag."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, TypeVar

from taskqueue_core.after import After
from taskqueue_core.application.call import DeclaredTask
from taskqueue_core.application.stored_result import result_of
from taskqueue_core.capabilities import control_of
from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import LIMITS, kind_of
from taskqueue_core.tasks import State

R = TypeVar("R")
_NAME = "batch"
"""name of the tag, which the queue of the members indexes"""
_CALLBACKS = frozenset({"then", "failed", "ended"})
_PAGE = 100
"""number of results that are read at once: together they may have some megabytes"""


def tag_of(function: DeclaredTask[Any], batch_id: str) -> str | None:
    """Return the tag of the members of a batch; ``None`` if the task's declaration does not index it.

    Raises `InvalidInput` if the id of the batch is too long for a tag.
    """
    if _NAME not in function.policies.get("index", ()):
        return None
    tag = f"{_NAME}:{batch_id}"
    if len(tag) > LIMITS.tag:
        most = LIMITS.tag - len(_NAME) - 1
        allowed = f"at most {most}, because {function.name!r} declares index=({_NAME!r},)"
        raise InvalidInput("id", f"{len(batch_id)} characters", allowed)
    return tag


def batch_before(task_id: str, after: After | None) -> str:
    """Return the id of the batch whose callback a task is. Raises `InvalidInput`."""
    batch_id, _, name = task_id.rpartition(".")
    if (
        after is None
        or name not in _CALLBACKS
        or [each.task_id for each in after.tasks] != [batch_id]
    ):
        raise InvalidInput("context.results", "a task that is no callback of a batch", "a callback")
    return batch_id


async def member_results(of: DeclaredTask[R], batch_id: str) -> AsyncIterator[tuple[str, R]]:
    """Yield the ids and the results of the members of a batch that are calls of ``of`` and done.

    Raises `InvalidInput`, and the errors of `result_of`.
    """
    if not isinstance(of, DeclaredTask):
        raise InvalidInput("of", kind_of(of), "a declared task")
    tag = tag_of(of, batch_id)
    if tag is None or not of.policies.get("keep_ended"):
        raise InvalidInput(
            "of",
            f"the task {of.name!r}, whose ended tasks cannot be found by their batch",
            f"a task that is declared with index=({_NAME!r},) and keep_ended=SECONDS",
        )
    queue, after = of.connection(), None
    found, control = queue.tasks(of.queue, state=State.DONE, tag=tag), control_of(queue.backend)
    while True:
        page = await found.page(after=after, limit=_PAGE)
        ids = [task.task_id for task in page.tasks]
        texts = await control.results(of.queue, *ids) if ids else ()
        for task_id, text in zip(ids, texts, strict=True):
            yield task_id, result_of(of.queue, task_id, of.read_result, text)
        after = page.next
        if after is None:
            return
