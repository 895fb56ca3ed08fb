"""The ended tasks that queues keep for their lists: the oldest of more than their settings allow are deleted.

The store keeps a link ``keeps KEY`` for each queue with the setting ``keep_ended``, and counts for each queue how many
records of ended tasks were deleted.
"""

from __future__ import annotations

from collections.abc import Callable

from taskqueue_core.authoring.listings import ENDED
from taskqueue_core.recordstore.store import Record, RecordStore
from taskqueue_core.tasks import State

_LOOKED_AT = 500
"""maximum number of records of one state that are looked at in one step"""


class KeptTasks:
    """The ended tasks in a store. All methods are called within a step.

    ``drop`` deletes a record, and what belongs to it.
    """

    def __init__(self, store: RecordStore, drop: Callable[[Record], None]) -> None:
        self._store = store
        self._drop = drop
        self._looked_at: dict[tuple[str, State], int] = {}
        """by queue and state, the position up to which surplus records were looked at"""

    def configured(self, key: str, *, keeps: bool) -> None:
        """Note whether a queue keeps ended tasks."""
        if keeps:
            self._store.save_link(f"keeps {key}", b"")
        else:
            self._store.drop_link(f"keeps {key}")

    def removed(self, record: Record) -> None:
        """Count a record that is deleted, or that another one with its id takes the place of."""
        if record.ended and record.replaced is None and record.state is not None:
            self._store.count(record.task.key, _removed(record.state))

    def trim(self, after: str, now: float) -> tuple[str, int]:
        """Delete records of the next queue that are more than `QueueSettings.keep_ended_most` allows.

        Return the name of the queue, to be passed as ``after``, and the number of records; an empty name at the end.
        """
        found = self._store.links(f"keeps {after} ", "keeps!", 1)
        if not found:
            return "", 0
        key = found[0][0].removeprefix("keeps ")
        counters, most = self._store.counters(key), self._store.settings(key).keep_ended_most
        surplus = {s: counters[s.value] - counters[_removed(s)] - most for s in ENDED}
        return key, sum(self._trim(key, state, number, now) for state, number in surplus.items())

    def _trim(self, key: str, state: State, surplus: int, now: float) -> int:
        after = self._looked_at.pop((key, state), 0)
        if surplus <= 0:
            return 0
        found = self._store.in_state(key, state, _LOOKED_AT, after)
        if len(found) == _LOOKED_AT:
            # The next call continues from here, because the first ones may still be needed.
            self._looked_at[key, state] = found[-1].seq
        over = [each for each in found if each.replaced is None and each.needed_until <= now]
        for record in over[:surplus]:
            self._drop(record)
        return len(over[:surplus])


def _removed(state: State) -> str:
    """Return the name of the counter of the records of a state that were deleted."""
    return f"removed_{state.value}"
