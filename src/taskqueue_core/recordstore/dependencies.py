"""The capability ``after`` of a backend on a `RecordStore`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from taskqueue_core.after import TaskRef
from taskqueue_core.authoring.helpers import check_size
from taskqueue_core.capabilities import Count, Line, Report
from taskqueue_core.recordstore.notify import RecordRoomSignal
from taskqueue_core.recordstore.transitions import ALL_LINES, STEP, Transitions

T = TypeVar("T")


class RecordDependencies:
    """The lines of a `RecordBackend`, which is one partition."""

    def __init__(self, transitions: Transitions) -> None:
        self._transitions = transitions
        self._signal = RecordRoomSignal(transitions.signals, (ALL_LINES,))
        self._open = False

    async def lines(self, limit: int, after: str | None = None) -> tuple[Line, ...]:
        with self._transitions.step() as now:
            return self._transitions.links.page(min(limit, STEP), after or "", now)

    async def changed(self, seconds: float) -> None:
        if not self._open:
            self._open = True
            await self._signal.__aenter__()  # until the backend is closed
            return  # lines may have come before
        await self._signal.wait(seconds)

    async def register(self, *lines: Line) -> tuple[Report, ...]:
        check_size("lines", lines)
        reports: list[Report] = []
        for part in _parts(lines):
            with self._transitions.step() as now:
                reports += [self._transitions.links.register(line, now) for line in part]
        return tuple(reports)

    async def release(self, *reports: Report) -> None:
        check_size("reports", reports)
        for part in _parts(reports):
            with self._transitions.step() as now:
                for report in part:
                    self._transitions.links.release(report, now)

    async def confirm(self, *lines: Line) -> None:
        for part in _parts(lines):
            with self._transitions.step():
                for line in part:
                    self._transitions.links.confirm(line)

    async def close(self, batch: TaskRef) -> bool:
        with self._transitions.step() as now:
            return self._transitions.links.batches.close(batch, now)

    async def seal(self, batch: TaskRef) -> tuple[Count, ...]:
        with self._transitions.step() as now:
            return (self._transitions.links.batches.seal(batch, now),)

    async def tally(self, *counts: Count, sealed: bool = False) -> None:
        by_batch: dict[TaskRef, list[Count]] = {}
        for count in counts:
            by_batch.setdefault(count.batch, []).append(count)
        for batch, some in by_batch.items():
            with self._transitions.step() as now:
                self._transitions.links.batches.tally(batch, some, now, sealed=sealed)


def _parts(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """Divide items so that no step takes long."""
    return (items[start : start + STEP] for start in range(0, len(items), STEP))
