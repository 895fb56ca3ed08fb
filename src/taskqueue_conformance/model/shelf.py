"""The entries of the model: which entries may be delivered, and which must be delivered first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import inf

from taskqueue_conformance.model.entries import Entry, Span
from taskqueue_conformance.model.limits import Limits
from taskqueue_conformance.model.turns import Turns
from taskqueue_core.tasks import Expired, State, Task


class Shelf:
    """All entries of the model, and for each queue its limits and the turns of its tenants."""

    def __init__(self) -> None:
        self.entries: dict[tuple[str, str], Entry] = {}
        self.limits: dict[str, Limits] = defaultdict(Limits)
        self.turns: dict[str, Turns] = defaultdict(Turns)

    def check_order(self, entry: Entry, span: Span, held_up: Sequence[Entry] = ()) -> None:
        """Fail if an available entry must be delivered before ``entry``; entries in ``held_up`` may come later."""
        rivals = [other for other in self.entries.values() if other.shares(entry)]
        first = [other.name for other in rivals if other.surely_holds_up(entry, span)]
        assert not first, f"{entry.name} was delivered before {first} with its ordering key (law 4)"
        for other in rivals:
            other.holds = other.holds or False
        entries = [
            e for e in self.entries.values() if e.task.key == entry.task.key and e is not entry
        ]
        others = [
            other
            for other in entries
            if other not in held_up
            and self.surely_free(other, span)
            and self.has_own_room(other, entry, span)
        ]
        settings = self.limits[entry.task.key].settings
        priorities = {e.task.priority for e in (entry, *entries) if e.maybe_available(span)}
        self.turns[entry.task.key].served(entry, others, settings, len(priorities))

    def held_up_by(self, expired: Iterable[Expired], span: Span) -> list[Entry]:
        """Return the entries that may have waited for an entry in ``expired`` with the same ordering key.

        An overdue entry blocks its ordering key until it expires. A single call may deliver the waiting entry before or
        after it expires the overdue entry.
        """
        holders = [
            holder
            for one in expired
            if (holder := self.entries.get((one.key, one.task_id))) is not None
        ]
        return [
            entry
            for entry in self.entries.values()
            if any(holder.maybe_holds_up(entry, span) for holder in holders)
        ]

    def in_flight(self, task: Task, *, of_tenant: bool = False) -> list[Entry]:
        """Return the entries in flight in a task's queue, or only those of the task's tenant."""
        entries = (entry for entry in self.entries.values() if entry.task.key == task.key)
        running = [entry for entry in entries if entry.state is State.IN_FLIGHT]
        return [e for e in running if not of_tenant or e.task.tenant == task.tenant]

    def waiting(self, task: Task, span: Span, *, of_tenant: bool = False) -> Span:
        """Return the least and greatest possible number of tasks that use the queue's or the tenant's capacity."""
        entries = [entry for entry in self.entries.values() if entry.task.key == task.key]
        at_rest = (State.WAITING, State.SCHEDULED, State.BLOCKED)
        fresh = [e for e in entries if e.fresh and (e.state in at_rest or e.lingers)]
        if of_tenant:
            fresh = [entry for entry in fresh if entry.task.tenant == task.tenant]
        surely = [
            e for e in fresh if not (e.maybe_late(span) or e.lingers or (of_tenant and e.uncounted))
        ]
        return len(surely), len(fresh)

    def surely_free(self, entry: Entry, span: Span) -> bool:
        """Return whether the entry is available, and is certainly not blocked by its ordering key."""
        return entry.surely_available(span) and not any(
            other.maybe_holds_up(entry, span) for other in self.entries.values()
        )

    def has_own_room(self, other: Entry, entry: Entry, span: Span) -> bool:
        """Return whether the limits of the tenant of ``other`` certainly had room when ``entry`` was delivered."""
        limits, task = self.limits[other.task.key], other.task
        if task.tenant == entry.task.tenant:
            return True
        full = limits.may_want_own_place(task.tenant, len(self.in_flight(task, of_tenant=True)))
        return not full and limits.own_opens_at(span[0], task.tenant) is None

    def opens_at(self, entry: Entry, span: Span) -> float | None:
        """Return when the limits will certainly allow a delivery of the entry.

        ``None`` means now; infinity means that no such time is known.
        """
        limits = self.limits[entry.task.key]
        task = entry.task
        own = self.in_flight(task, of_tenant=True)
        if limits.may_want_place(len(self.in_flight(task)), task.tenant, len(own)):
            return inf
        return limits.opens_at(span[0], task.tenant)

    def known_at(self, entry: Entry, span: Span) -> float:
        """Return the latest ``due_at`` that an empty answer may contain while this entry exists."""
        opens_at = self.opens_at(entry, span)
        if self.surely_free(entry, span):
            return inf if opens_at is None else opens_at
        held = any(other.maybe_holds_up(entry, span) for other in self.entries.values())
        due = entry.surely_scheduled(span) and opens_at is None and not held
        return entry.due if due else inf
