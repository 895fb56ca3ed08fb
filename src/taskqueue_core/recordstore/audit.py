"""The capability ``audit`` of a backend on a `RecordStore`: links with up to `_PAGE` entries each."""

from __future__ import annotations

import msgspec
from msgspec import structs

from taskqueue_core.capabilities.audit import AUDIT_KEPT, AuditEntry, check_audit_page
from taskqueue_core.recordstore.transitions import Transitions

_PAGE = 50
"""number of entries of a link"""
_COUNT = "audit"
"""name of the link with the number of entries that were added so far"""
_entries = msgspec.msgpack.Decoder(list[AuditEntry])


class RecordAudit:
    """The audit log of a `RecordBackend`."""

    def __init__(self, transitions: Transitions) -> None:
        self._transitions = transitions
        self._store = transitions.store

    async def record(self, entry: AuditEntry) -> None:
        with self._transitions.step() as now:
            number = self._added() + 1
            page = self._page((number - 1) // _PAGE) if number % _PAGE != 1 else []
            page.append(structs.replace(entry, id=str(number), at=now))
            self._store.save_link(_name((number - 1) // _PAGE), msgspec.msgpack.encode(page))
            self._store.save_link(_COUNT, str(number).encode())
            if number % _PAGE == 1:
                self._store.drop_link(_name((number - 1 - AUDIT_KEPT) // _PAGE - 1))

    async def entries(
        self, *, after: str | None = None, limit: int = 100
    ) -> tuple[AuditEntry, ...]:
        check_audit_page(after, limit)
        found: list[AuditEntry] = []
        with self._transitions.step():
            number = self._added()
            if after is not None:
                number = min(number, int(after.partition("-")[0]) - 1)
            while number > 0 and len(found) < limit:
                page = self._page((number - 1) // _PAGE)
                if not page:
                    break
                found += [each for each in reversed(page) if int(each.id) <= number]
                number = int(page[0].id) - 1
        return tuple(found[:limit])

    def _added(self) -> int:
        return int(self._store.load_link(_COUNT) or 0)

    def _page(self, number: int) -> list[AuditEntry]:
        value = self._store.load_link(_name(number))
        return [] if value is None else _entries.decode(value)


def _name(page: int) -> str:
    return f"{_COUNT} {page}"
