"""The order of tenants and priorities in one queue of the model: which deliveries no order allows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from taskqueue_conformance.model.entries import Entry
from taskqueue_core.capabilities import Order, QueueSettings

_SLACK = 1e-3
"""of a delivery: what a store may round"""
_ROUNDS = 2
"""so many turns a tenant may have while another one waits: one, and one that was to come before the other joined"""


class Turns:
    """What each tenant has had while others waited, and what the lowest priority may have coming to it at most."""

    def __init__(self) -> None:
        """Start with nothing delivered."""
        self._turns: dict[tuple[int, str | None], Counter[str | None]] = {}
        """by priority and by the tenant that waits: who had a turn since"""
        self._owed = 1.0

    def reset(self) -> None:
        """Forget all turns: a tenant may have left and joined again, or the order has changed."""
        self._turns = {}

    def served(self, entry: Entry, others: Sequence[Entry], settings: QueueSettings) -> None:
        """Record a delivery at a time when ``others`` were certainly available."""
        for other in others:
            alike = other.task.tenant == entry.task.tenant or settings.order is Order.FIFO
            if alike and other.task.priority == entry.task.priority:
                assert not other.precedes(entry), (
                    f"{entry.name} was delivered before {other.name} (law 4)"
                )
        self._check_floor(entry, others, settings.floor_share)
        if settings.order is Order.FAIR and not settings.weights:
            self._check_turns(entry, others)

    def _check_floor(self, entry: Entry, others: Sequence[Entry], share: float) -> None:
        priority = entry.task.priority
        self._owed = min(1.0, self._owed + share)
        higher = [other.name for other in others if other.task.priority > priority]
        if higher:
            assert share, f"{entry.name} was delivered before {higher}, which is higher (law 4)"
            assert self._owed > 1 - _SLACK, f"{entry.name} has more than its share (law 4)"
            self._owed -= 1
            lower = [other.name for other in others if other.task.priority < priority]
            assert not lower, f"{entry.name} has the share of the lowest, {lower} (law 4)"

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
                f"{entry.name}: {turns[tenant]} turns of {tenant!r} while {client!r} waits (law 4)"
            )
