"""The rules by which batches count their members. See `taskqueue_core.capabilities.dependencies`."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec import structs

from taskqueue_core.after import PARENT_ENDED
from taskqueue_core.authoring.waits import Change
from taskqueue_core.capabilities import Count
from taskqueue_core.task_state import State
from taskqueue_core.tasks import Confirmation, Published, Refusal, Task

KEPT = 86_400.0
"""seconds for which a partition remembers a closed batch whose members have ended, and refuses new members"""


class Tally(msgspec.Struct, kw_only=True, eq=False):
    """What a batch knows of its members: the newest count of each partition."""

    counts: dict[str, Count] = {}
    sealed: bool = False
    """whether the counts of all partitions are known"""

    def hear(self, counts: Iterable[Count], *, sealed: bool) -> Change | None:
        """Record counts. Return what becomes of the batch, or ``None`` if it stays blocked."""
        for count in counts:
            known = self.counts.get(count.partition)
            if known is None or count.version > known.version:
                self.counts[count.partition] = count
        self.sealed = self.sealed or sealed
        if not self.sealed or not all(count.complete for count in self.counts.values()):
            return None
        if any(count.failed for count in self.counts.values()):
            return Change(State.CANCELLED, PARENT_ENDED)
        return Change(State.DONE)


def is_batch(task: Task) -> bool:
    """Return whether a task is a batch, and not a member of one."""
    batch = task.batch
    return batch is not None and (batch.key, batch.task_id) == (task.key, task.id)


def joined(count: Count) -> Count:
    """Return a count with one more member."""
    return structs.replace(count, version=count.version + 1, added=count.added + 1)


def moved(count: Count, before: State | None, state: State) -> Count:
    """Return a count after a member has changed its state."""
    done = count.done + (state is State.DONE)
    ended = not state.live and state is not State.DEAD
    failed = count.failed + (ended and state is not State.DONE)
    dead = count.dead + (state is State.DEAD) - (before is State.DEAD)
    if (done, failed, dead) == (count.done, count.failed, count.dead):
        return count
    return structs.replace(count, version=count.version + 1, done=done, failed=failed, dead=dead)


def closed(count: Count) -> Count:
    """Return a count that accepts no more members."""
    return count if count.closed else structs.replace(count, version=count.version + 1, closed=True)


def refused_by_batch(task: Task) -> Confirmation:
    """Return the answer to the publish of a member of a batch that is closed."""
    return Confirmation(
        key=task.key,
        task_id=task.id,
        status=Published.REFUSED,
        code=Refusal.BATCH_CLOSED,
        reason=f"the batch {task.batch.task_id!r} is closed" if task.batch else None,
    )
