"""The audit log of the memory backend."""

from __future__ import annotations

from collections import deque
from itertools import islice

from msgspec import structs

from taskqueue_core.capabilities.audit import AUDIT_KEPT, AuditEntry, check_audit_page
from taskqueue_core.clock import Clock


class MemoryAudit:
    """Audit log in the memory of this process."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._entries: deque[AuditEntry] = deque(maxlen=AUDIT_KEPT)
        self._added = 0

    async def record(self, entry: AuditEntry) -> None:
        self._added += 1
        self._entries.appendleft(structs.replace(entry, id=str(self._added), at=self._clock.now()))

    async def entries(
        self, *, after: str | None = None, limit: int = 100
    ) -> tuple[AuditEntry, ...]:
        check_audit_page(after, limit)
        skipped = 0 if after is None else max(0, self._added - int(after.partition("-")[0]) + 1)
        return tuple(islice(self._entries, skipped, skipped + limit))
