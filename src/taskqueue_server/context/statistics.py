"""The statistics of all queues, as the server's last read of them found them, for whatever shows many queues."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

import msgspec

from taskqueue_core.capabilities import Control
from taskqueue_core.concurrency import gather_all
from taskqueue_core.tasks import QueueStats

AT_ONCE = 100
"""number of queues that are read at the same time"""
_PAUSE_FACTOR = 4
"""a pause between two parts of a read is at most this many times as long as the part before it"""
_PAUSES = 2.0
"""maximum number of seconds of all pauses in a read"""


class AllStatistics(msgspec.Struct, frozen=True):
    """The statistics of all queues, of one read."""

    at: float
    """time of the end of the read, by the store's clock"""
    queues: Mapping[str, QueueStats]
    """the queues by their names, sorted"""
    paused: float = 0.0
    """seconds of the read in which the server did other work"""


class StatisticsReader:
    """Reader of the statistics of all queues. A read of many queues has pauses, in which the server answers others."""

    def __init__(self, control: Control, now: Callable[[], float]) -> None:
        """Read from ``control``. ``now`` gives the store's time."""
        self._control = control
        self._now = now
        self.latest: AllStatistics | None = None
        """the last read that has succeeded"""

    def recent(self, age: float) -> AllStatistics | None:
        """Return the last read if it is at most ``age`` seconds old."""
        latest = self.latest
        return None if latest is None or self._now() - latest.at > age else latest

    async def read(self, *, at_once: bool = False) -> AllStatistics:
        """Read all queues; with ``at_once`` without pauses. Raises the errors of the store."""
        keys = await self._control.queues()
        queues: dict[str, QueueStats] = {}
        paused = 0.0
        for start in range(0, len(keys), AT_ONCE):
            began, part = time.monotonic(), keys[start : start + AT_ONCE]
            queues.update(zip(part, await gather_all(map(self._control.stats, part)), strict=True))
            rest = -(-(len(keys) - start - len(part)) // AT_ONCE)
            if rest and not at_once:
                ended = time.monotonic()
                longest = (_PAUSES - paused) / rest
                await asyncio.sleep(max(0.0, min(_PAUSE_FACTOR * (ended - began), longest)))
                paused += time.monotonic() - ended
        self.latest = AllStatistics(self._now(), queues, paused)
        return self.latest
