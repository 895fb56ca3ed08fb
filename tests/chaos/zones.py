"""A change of the clock of a time zone in a chaos run: the clock of Redis passes it, half an hour at a time.

It is a change of the last year, so that the clocks of the other processes are ahead of it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from taskqueue_core.schedules import Schedule, TaskTemplate
from tests.core.zone_changes import HOUR, changes
from tests.redis.clocks import WallClock
from tests.redis.servers import RedisServer

_BEFORE, _STEPS, _STEP = 3 * HOUR, 18, HOUR / 2
"""seconds before the change at which the clock begins, and the number and length of its steps"""
_PAUSE = 0.25
"""seconds between two steps"""
_KINDS = ("star", "nightly", "three")


class Passage:
    """One of ten changes, chosen by the seed of a run, and the clock of a Redis that is not yet started."""

    def __init__(self, folder: Path, redis: RedisServer, seed: int) -> None:
        found = tuple(changes(datetime.now(UTC).year - 1))
        self._change = found[seed % len(found)]
        self._clock = WallClock(folder)
        self._start = self._change.at - _BEFORE
        self._end = self._start + _STEPS * _STEP
        redis.environment = self._clock.environment
        self._set(self._start)

    def _set(self, at: float) -> None:
        self._clock.set(at - time.time())

    def schedules(self, key: str) -> Iterator[tuple[Schedule, list[float]]]:
        """Yield schedules for a queue, each with its instants by the calendar."""
        ends = datetime.fromtimestamp(self._end + 1, UTC)
        for kind in _KINDS:
            schedule = Schedule(
                kind, self._change.cron(kind), TaskTemplate.of(key, {"will": "ack", "padding": ""}), "all",
                late=86_400, overlap="allow", ends=ends,
            )  # fmt: skip
            instants = self._change.instants(kind)
            yield schedule, [at for at in instants if self._start < at <= self._end]

    async def begin(self) -> None:
        """Let the time pass until all instants have come."""
        for number in range(1, _STEPS + 1):
            await asyncio.sleep(_PAUSE)
            self._set(self._start + number * _STEP)
