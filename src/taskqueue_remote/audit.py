"""The audit log of a server's backend, read over HTTP. The server itself records what it does."""

from __future__ import annotations

import msgspec

from taskqueue_core.capabilities.audit import AuditEntry, check_audit_page
from taskqueue_remote.client import HttpClient


class _Page(msgspec.Struct, frozen=True):
    entries: tuple[AuditEntry, ...]
    next: str | None = None


class RemoteAudit:
    """The audit log of the server's backend, without entries about queues that the token does not permit."""

    def __init__(self, client: HttpClient) -> None:
        self._client = client

    async def record(self, entry: AuditEntry) -> None:
        """Do nothing, because the server has recorded the action."""

    async def entries(
        self, *, after: str | None = None, limit: int = 100
    ) -> tuple[AuditEntry, ...]:
        check_audit_page(after, limit)
        found: tuple[AuditEntry, ...] = ()
        while len(found) < limit:
            query: dict[str, str | int] = {"limit": limit - len(found)}
            if after is not None:
                query["after"] = after
            page = await self._client.ask("GET", "/v1/audit", _Page, query=query)
            found += page.entries
            after = page.next
            if after is None:
                break
        return found
