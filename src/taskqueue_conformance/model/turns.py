"""The order of tenants and priorities in one queue of the model, and checks that hold for every order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import ceil

from taskqueue_conformance.model.entries import Entry
from taskqueue_core.capabilities import Order, QueueSettings

_SLACK = 1e-3
"""maximum rounding error that a store may make, in deliveries"""
_ROUNDS = 2
"""maximum number of turns that a tenant may have while another tenant waits: one turn, and one more that was already
due when the other tenant began to wait"""


class Turns:
    """The turns that each tenant had while other tenants waited, and the deliveries owed to each priority."""

    def __init__(self) -> None:
        self._turns: dict[tuple[int, str | None], Counter[str | None]] = {}
        """for each priority and waiting tenant: number of turns of each other tenant since this tenant began to wait"""
        self._owed = 1.0
        """upper bound of what is owed to all priorities but the highest, in deliveries"""
        self._passed: Counter[int] = Counter()
        """for each waiting priority: number of deliveries of other priorities since it began to wait or had a turn"""

    def reset(self) -> None:
        """Forget all turns, because a tenant may have stopped waiting, or the queue's settings have changed."""
        self._turns, self._passed = {}, Counter()

    def served(
        self, entry: Entry, others: Sequence[Entry], settings: QueueSettings, priorities: int
    ) -> None:
        """Check and record a delivery at a time when the entries ``others`` were certainly available.

        ``priorities`` is the number of priorities that may have had available entries.
        """
        for other in others:
            alike = other.task.tenant == entry.task.tenant or settings.order is Order.FIFO
            if alike and other.task.priority == entry.task.priority:
                assert not other.precedes(entry), (
                    f"{entry.name} was delivered before {other.name} (law 4)"
                )
        self._check_floor(entry, others, settings.floor_share, priorities)
        if settings.order is Order.FAIR and not settings.weights:
            self._check_turns(entry, others)

    def _check_floor(
        self, entry: Entry, others: Sequence[Entry], share: float, priorities: int
    ) -> None:
        """Check the floor share. ``priorities`` is the number of priorities that may have had available entries."""
        priority = entry.task.priority
        self._owed = min(1.0, self._owed) + (priorities - 1) * min(share, 1 / priorities)
        higher = [other.name for other in others if other.task.priority > priority]
        if higher:
            assert share, f"{entry.name} was delivered before {higher} of higher priority (law 4)"
            assert self._owed > 1 - _SLACK, (
                f"the delivery of {entry.name} exceeds the floor share (law 4)"
            )
            self._owed -= 1
        waiting = {other.task.priority for other in others} - {priority}
        self._passed = Counter({one: self._passed[one] + 1 for one in waiting})
        for one, passed in self._passed.items() if share else ():
            # The priorities below the highest have a turn at least every 1/share deliveries, and take turns.
            assert passed <= (priorities - 1) * ceil(1 / share), (
                f"{entry.name}: {passed} deliveries of other priorities while priority {one} waited (law 4)"
            )

    def _check_turns(self, entry: Entry, others: Sequence[Entry]) -> None:
        priority, tenant = entry.task.priority, entry.task.tenant
        waiting = {other.task.tenant for other in others if other.task.priority == priority}
        waiting.discard(tenant)
        self._turns = {
            (lane, client): turns
            for (lane, client), turns in self._turns.items()
            if lane != priority or client in waiting
        }
        for client in waiting:
            turns = self._turns.setdefault((priority, client), Counter())
            turns[tenant] += 1
            assert turns[tenant] <= _ROUNDS, (
                f"{entry.name}: tenant {tenant!r} had {turns[tenant]} turns while {client!r} waited (law 4)"
            )
