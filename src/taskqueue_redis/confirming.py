"""Waiting for replicas before something is confirmed."""

from __future__ import annotations

from collections.abc import Sequence

from taskqueue_redis.coalescing import Coalescer
from taskqueue_redis.failures import AnswerLost
from taskqueue_redis.scripts import Scripts

__all__ = ["Confirming"]


class Confirming:
    """Waits for replicas where a queue demands it."""

    def __init__(self, scripts: Scripts, timeout: float) -> None:
        """Wait up to ``timeout`` seconds."""
        self._scripts = scripts
        self._timeout = timeout
        self._coalescers: dict[str, Coalescer[int, None]] = {}

    async def confirm(self, partition: str, replicas: int) -> None:
        """Return once as many replicas have everything written so far. Raises `AnswerLost` if they don't in time."""
        if replicas:
            await self._coalescer(partition).submit([replicas])

    def _coalescer(self, partition: str) -> Coalescer[int, None]:
        if partition not in self._coalescers:

            async def send(wanted: Sequence[int]) -> Sequence[None]:
                return await self._wait(partition, wanted)

            self._coalescers[partition] = Coalescer(send, 10_000)
        return self._coalescers[partition]

    async def _wait(self, partition: str, wanted: Sequence[int]) -> Sequence[None]:
        # WAIT counts from the last write of its own connection, so that one writes first.
        command = ("WAIT", max(wanted), round(self._timeout * 1000))
        _, reached = await self._scripts.run("mark", partition, follow=lambda _: command)
        if reached < max(wanted):
            raise AnswerLost(f"{reached} of {max(wanted)} replicas have confirmed")
        return [None] * len(wanted)
