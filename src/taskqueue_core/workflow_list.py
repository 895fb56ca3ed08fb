"""The workflows of a store, page by page: the tasks of the internal queue that hold their steps."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from taskqueue_core.capabilities import Listing
from taskqueue_core.concurrency import gather_all
from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import check_number, kind_of
from taskqueue_core.tasks import State
from taskqueue_core.workflows import WORKFLOWS, WorkflowState, WorkflowStatus, is_workflow

__all__ = ["LISTED", "check_page", "read_page"]

LISTED = 50
"""maximum number of workflows on a page, because the state of each of their steps is read"""
_CALLS = 50
"""number of pages of tasks after which a page of workflows ends, although it is not full"""
_AT_ONCE = 5
"""number of workflows that are read at once"""
_STEPS = 5000
"""number of steps after which a page ends, although it is not full"""
_NOT_PUBLISHED = (State.IN_FLIGHT, State.WAITING, State.SCHEDULED, State.BLOCKED, State.DEAD)
_IN_ORDER = (*_NOT_PUBLISHED, State.DONE, State.DISCARDED, State.CANCELLED)
"""the states of tasks that hold the steps of workflows, in the order of a list"""


def check_page(after: str | None, limit: int) -> None:
    """Check the arguments of `read_page`. Raises `InvalidInput`."""
    check_number("limit", limit, 1, LISTED)
    _position(after)


async def read_page(
    listing: Listing,
    get: Callable[[str], Awaitable[WorkflowStatus | None]],
    after: str | None,
    limit: int,
    is_shown: Callable[[WorkflowStatus], bool],
) -> tuple[tuple[WorkflowStatus, ...], str | None]:
    """Return a page of workflows, and where the next one begins; ``None`` after the last page.

    First come those whose steps are not all published, then the others; in each of the two, the newest first. A page
    may have fewer workflows than ``limit``, even none. ``get`` returns the status of a workflow, and ``is_shown``
    whether the page has it. Raises `InvalidInput`.
    """
    check_page(after, limit)
    place, cursor = _position(after)
    found: dict[str, WorkflowStatus] = {}
    calls = steps = 0
    while place < len(_IN_ORDER) and len(found) < limit and calls < _CALLS and steps < _STEPS:
        most = min(limit - len(found), _AT_ONCE)
        page = await listing.tasks(
            WORKFLOWS, state=_IN_ORDER[place], after=cursor, limit=most, newest=True
        )
        names = [each.task_id for each in page.tasks if is_workflow(each.task_id)]
        read = await gather_all(_status(get, name) for name in names)
        known = [status for status in read if status is not None]
        found |= {status.id: status for status in known if is_shown(status)}
        steps += sum([len(status.steps) for status in known])
        cursor, calls = page.next, calls + 1
        place += cursor is None
    following = None if place == len(_IN_ORDER) else f"{place}.{cursor or ''}"
    return tuple(found.values()), following


async def _status(
    get: Callable[[str], Awaitable[WorkflowStatus | None]], name: str
) -> WorkflowStatus | None:
    try:
        return await get(name)
    except InvalidInput as error:  # it is damaged, or was stored by a later version
        return WorkflowStatus(id=name, state=WorkflowState.HELD, problem=str(error))


def _position(after: object) -> tuple[int, str | None]:
    """Return where a list continues: a place in `_IN_ORDER`, and the cursor in it. Raises `InvalidInput`."""
    if after is None:
        return 0, None
    place, dot, cursor = after.partition(".") if isinstance(after, str) else ("", "", "")
    if not dot or place not in map(str, range(len(_IN_ORDER))):
        raise InvalidInput("after", kind_of(after), "the next of a page of workflows")
    return int(place), cursor or None
