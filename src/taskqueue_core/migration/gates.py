"""``strict``: a queue flows on the side that takes it in only when the other has nothing live of it any more."""

from __future__ import annotations

from taskqueue_core.composite.backend import Place, Plan
from taskqueue_core.errors import BackendUnavailable
from taskqueue_core.migration.routing import NEW, OLD, Crossing, Phase, Sides
from taskqueue_core.tasks import QueueStats
from taskqueue_core.together import together

__all__ = ["Gates"]

_SOON = 0.1
"""seconds between two looks at what a queue waits for"""
_LATER = 1.0
"""seconds between two looks at whether the direction is still the same"""


class Gates:
    """Which side of each queue may be received from."""

    def __init__(self, crossing: Crossing) -> None:
        """Follow ``crossing``."""
        self._crossing = crossing
        self._empty_since: dict[Place, float] = {}

    async def plan(self, keys: tuple[str, ...]) -> Plan:
        """Return every place that may be received from, the sides that are left first."""
        phase = await self._crossing.phase()
        told = await together(self._of(key, phase) for key in keys)
        places = [place for some in told for place in some]
        held = any(len(some) == 1 for some in told) and phase is not Phase.IDLE
        return Plan(
            tuple(sorted(places, key=lambda place: place.side == phase.towards)),
            _SOON if held else _LATER,
        )

    async def _of(self, key: str, phase: Phase) -> tuple[Place, ...]:
        towards = phase.towards
        if phase is Phase.IDLE:
            return (Place(towards, key),)
        left = Place(1 - towards, key)
        try:
            found = await self._crossing.read(key)
            stats = await self._crossing.sides[left.side].control.stats(key)
        except BackendUnavailable:  # who knows what it has: what is to come waits
            return (left,)
        if await self._passed(left, found, stats):
            return (left, Place(towards, key))
        return (left,)

    async def _passed(self, left: Place, found: Sides, stats: QueueStats) -> bool:
        ledger = stats.ledger
        live = ledger.waiting or ledger.scheduled or ledger.in_flight
        towards = NEW if left.side == OLD else OLD
        if live or found.open_side != towards:
            used = stats.delivered or ledger.published
            if live or used:
                self._empty_since.pop(left, None)
                return False
            # Nobody has ever used it there, and nobody can: the first to publish closes it before.
            return True
        limit = found[left.side].rate_limit
        if limit is None or not stats.delivered:
            return True
        now = self._crossing.sides[towards].backend.now()
        return now >= self._empty_since.setdefault(left, now) + limit.period
