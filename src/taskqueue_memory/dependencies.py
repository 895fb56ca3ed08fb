"""The lines between the partitions of the memory backend and of others, for `Dependencies`."""

from __future__ import annotations

from taskqueue_core.after import TaskRef
from taskqueue_core.authoring.helpers import check_size
from taskqueue_core.capabilities import Count, Line, Report
from taskqueue_memory.transitions import MemoryStore


class MemoryDependencies:
    """The lines of the memory backend, which is one partition."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    async def lines(self, limit: int, after: str | None = None) -> tuple[Line, ...]:
        return self._store.links.page(limit, int(after or 0))

    async def changed(self, seconds: float) -> None:
        await self._store.links.wait(seconds)

    async def register(self, *lines: Line) -> tuple[Report, ...]:
        check_size("lines", lines)
        return tuple([self._store.links.register(line) for line in lines])

    async def release(self, *reports: Report) -> None:
        check_size("reports", reports)
        for report in reports:
            self._store.links.release(report)

    async def confirm(self, *lines: Line) -> None:
        for line in lines:
            self._store.links.confirm(line)
            self._store.batches.confirmed(line)

    async def close(self, batch: TaskRef) -> bool:
        return self._store.batches.close(batch)

    async def seal(self, batch: TaskRef) -> tuple[Count, ...]:
        return (self._store.batches.seal(batch),)

    async def tally(self, *counts: Count, sealed: bool = False) -> None:
        self._store.batches.tally(counts, sealed=sealed)
