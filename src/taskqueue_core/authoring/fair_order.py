"""The arithmetic of the capabilities ``fair_order`` and ``floor_share``.

Each delivery costs its tenant an amount that depends on the tenant's weight, and the next turn goes to the tenant that
has spent the least. `FairRotation` does this in memory. A backend that stores the amounts itself uses `cost`,
`joins_at` and `returns_at`. The amounts are whole numbers, so that equal amounts compare as equal.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

import msgspec

TURN = math.lcm(*range(1, 26), 1000)
"""cost of a delivery for a tenant of weight 1; divisible by every number up to 25 and by 1000"""
_DUST = 1e-6
"""tolerance for rounding errors in `PriorityFloor.owed`, in deliveries"""
_SPARE = 64
"""number of outdated positions that the heap of a `FairRotation` may contain, in addition to one per tenant"""

T = TypeVar("T", bound=Hashable)


def cost(weight: int) -> int:
    """Return the cost of one delivery for a tenant of this weight."""
    return TURN // weight


def joins_at(at: int, *, alone: bool) -> int:
    """Return the spent amount with which a new tenant starts, so that each other tenant has a turn first.

    ``at`` is the spent amount of the tenant whose turn is next. If the new tenant is ``alone``, ``at`` is the amount
    that the tenant with the most recent turn had spent before that turn.
    """
    return at if alone else at + TURN


def returns_at(spent: int, at: int) -> int:
    """Return the spent amount with which a tenant continues after a pause. Turns that it missed are not made up for.

    ``spent`` is the tenant's own amount before the pause, and ``at`` is the amount of the tenant whose turn is next.
    """
    return min(max(spent, at), at + TURN)


class FairRotation(Generic[T]):
    """Tenants that take turns according to their weights. Each operation takes O(log n) time for n tenants."""

    def __init__(self) -> None:
        self._positions: dict[T, tuple[int, int, T]] = {}
        """position of each tenant: the amount it has spent, and a serial number that breaks ties"""
        self._heap: list[tuple[int, int, T]] = []
        """heap of all current positions and some outdated positions, which `next` removes"""
        self._numbers = itertools.count()
        self._at = 0

    def __len__(self) -> int:
        return len(self._positions)

    def next(self) -> T | None:
        """Return the tenant whose turn is next, because it has spent the least; ``None`` if there are no tenants."""
        while self._heap:
            position = self._heap[0]
            client = position[2]
            if self._positions.get(client) is position:
                self._at = position[0]
                return client
            heapq.heappop(self._heap)
        return None

    def join(self, client: T) -> None:
        """Add a tenant, which gets its first turn after each of the other tenants has had a turn."""
        alone = self.next() is None
        self._push(client, joins_at(self._at, alone=alone))

    def come_back(self, client: T, spent: int) -> None:
        """Add a tenant again after a pause, with the amount that `leave` returned."""
        self.next()
        self._push(client, returns_at(spent, self._at))

    def leave(self, client: T) -> int:
        """Remove a tenant, and return the amount that it has spent, for `come_back`."""
        return self._positions.pop(client)[0]

    def spend(self, client: T, weight: int) -> None:
        """Add the cost of one delivery, at this weight, to the amount that the tenant has spent."""
        before = self._positions[client]
        self._at = max(self._at, before[0])
        if self._heap[0] is before:  # the usual case: the tenant that `next` returned
            position = self._positions[client] = (
                before[0] + cost(weight),
                next(self._numbers),
                client,
            )
            heapq.heapreplace(self._heap, position)
        else:
            self._push(client, before[0] + cost(weight))

    def _push(self, client: T, spent: int) -> None:
        position = self._positions[client] = spent, next(self._numbers), client
        if len(self._heap) >= 2 * len(self._positions) + _SPARE:
            self._heap = list(self._positions.values())
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, position)


class PriorityFloor(msgspec.Struct):
    """The deliveries that a queue owes to its lower priorities while several priorities have tasks.

    Each delivery adds the shares of all priorities but the highest. When they amount to a whole delivery, it goes to
    one of these priorities; they take turns. ``priorities`` are always those with available tasks, highest first.
    """

    owed: float = 0.0
    last: int = 0
    """the lower priority that had the last turn"""

    def next(self, share: float, priorities: Sequence[int]) -> int:
        """Return the position in ``priorities`` of the priority whose task must be delivered next."""
        lower = priorities[1:]
        if not lower or self.owed + _lower_share(share, len(priorities)) < 1 - _DUST:
            return 0
        return next((n for n, priority in enumerate(lower, 1) if priority < self.last), 1)

    def handed_out(self, share: float, priorities: Sequence[int]) -> None:
        """Record one delivery. Its priority must be the one that `next` returns for the same arguments."""
        place = self.next(share, priorities)
        self.owed += _lower_share(share, len(priorities))
        if place:
            self.owed -= 1
            self.last = priorities[place]


def _lower_share(share: float, priorities: int) -> float:
    """Return the share of all priorities but the highest: each has ``share``, but not more than an equal part."""
    return (priorities - 1) * min(share, 1 / priorities)
