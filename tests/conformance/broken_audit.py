# ruff: noqa: D102 - the docstrings are those of the methods that are broken
"""Backends that each break one promise about the audit log."""

from __future__ import annotations

from msgspec import structs

from taskqueue_core.capabilities import AuditEntry
from tests.conformance.facade import FacadeAudit


class ListsOldestFirst(FacadeAudit):
    """Defect: the oldest entries come first."""

    async def entries(
        self, *, after: str | None = None, limit: int = 100
    ) -> tuple[AuditEntry, ...]:
        return tuple(reversed(await self.inner.entries(after=after, limit=limit)))


class CountsPages(FacadeAudit):
    """Defect: a page begins after a number of entries, so new entries shift it."""

    async def entries(
        self, *, after: str | None = None, limit: int = 100
    ) -> tuple[AuditEntry, ...]:
        await self.inner.entries(after=after, limit=limit)
        every = await self.inner.entries(limit=1000)
        first = int(after or 0)
        return tuple(
            structs.replace(entry, id=str(first + number))
            for number, entry in enumerate(every[first : first + limit], 1)
        )


class LosesDetails(FacadeAudit):
    """Defect: the number of tasks is not kept."""

    async def record(self, entry: AuditEntry) -> None:
        await self.inner.record(structs.replace(entry, tasks=None))


class HasNoTime(FacadeAudit):
    """Defect: an entry has the time that the caller gave."""

    async def entries(
        self, *, after: str | None = None, limit: int = 100
    ) -> tuple[AuditEntry, ...]:
        found = await self.inner.entries(after=after, limit=limit)
        return tuple(structs.replace(entry, at=0.0) for entry in found)
