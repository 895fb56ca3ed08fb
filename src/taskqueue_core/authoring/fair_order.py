"""The arithmetic of fair turns and of the floor share, for backends with ``order``. It keeps no tasks.

A `FairRotation` does all of it in memory. A backend that stores what tenants have spent takes `cost`, `joins_at`
and `returns_at`: whole numbers, so that equal spending compares as equal.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Hashable
from typing import Generic, TypeVar

import msgspec

__all__ = ["TURN", "FairRotation", "PriorityFloor", "cost", "joins_at", "returns_at"]

TURN = math.lcm(*range(1, 26), 1000)
"""the cost of a delivery for a tenant of weight 1: weights up to 25 and all round ones divide it"""
_DUST = 1e-6
"""of a delivery: the tolerance for floating point"""
_SPARE = 64
"""so many places in a walk may be out of date before they are cleared"""

T = TypeVar("T", bound=Hashable)


def cost(weight: int) -> int:
    """Return the cost of a delivery for a tenant."""
    return TURN // weight


def joins_at(at: int, *, alone: bool) -> int:
    """Return what a tenant has spent when it joins: it comes behind those that are there.

    ``at`` is what the next of them has spent. Where it is ``alone`` that is what the last one had, at its last turn.
    """
    return at if alone else at + TURN


def returns_at(spent: int, at: int) -> int:
    """Return what a tenant has spent when it comes back from a rest: what it could not use is not made up for."""
    return min(max(spent, at), at + TURN)


class FairRotation(Generic[T]):
    """Tenants that take turns by weight. Each step takes O(log tenants)."""

    def __init__(self) -> None:
        """Start empty."""
        self._positions: dict[T, tuple[int, int, T]] = {}
        """what each has spent, and the number of its place: of those that have spent the same the lowest is next"""
        self._heap: list[tuple[int, int, T]] = []
        """these places, and some that are out of date"""
        self._numbers = itertools.count()
        self._at = 0

    def __len__(self) -> int:
        """Count the members."""
        return len(self._positions)

    def next(self) -> T | None:
        """Return the next member: the one that has spent the least."""
        while self._heap:
            position = self._heap[0]
            client = position[2]
            if self._positions.get(client) is position:
                self._at = position[0]
                return client
            heapq.heappop(self._heap)
        return None

    def join(self, client: T) -> None:
        """Add a member behind the others."""
        alone = self.next() is None
        self._push(client, joins_at(self._at, alone=alone))

    def come_back(self, client: T, spent: int) -> None:
        """Add a member again that left for a rest, with what it had spent."""
        self.next()
        self._push(client, returns_at(spent, self._at))

    def leave(self, client: T) -> int:
        """Remove a member. Return what it had spent, for its return."""
        return self._positions.pop(client)[0]

    def spend(self, client: T, weight: int) -> None:
        """Charge a member for a turn."""
        before = self._positions[client]
        self._at = max(self._at, before[0])
        if self._heap[0] is before:  # as it is if the next member had the turn
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
    """The credit of the lowest priority: an account of deliveries, kept with the queue.

    Use it only for deliveries while several priorities could be served.
    """

    owed: float = 0.0

    def is_next(self, share: float) -> bool:
        """Return whether the next delivery is of the lowest priority that can be served."""
        return self.owed + share >= 1 - _DUST

    def handed_out(self, share: float) -> None:
        """Note that delivery."""
        self.owed += share - self.is_next(share)
