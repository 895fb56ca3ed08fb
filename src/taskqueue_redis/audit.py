"""The audit log of the Redis backend: a stream in the first partition."""

from __future__ import annotations

import msgspec
from msgspec import structs

from taskqueue_core.capabilities.audit import AUDIT_KEPT, AuditEntry, check_audit_page
from taskqueue_redis.context import RedisContext
from taskqueue_redis.scripts.runner import seconds

_decoder = msgspec.json.Decoder(AuditEntry)


class RedisAudit:
    """Audit log of the Redis backend."""

    def __init__(self, context: RedisContext) -> None:
        self._context = context
        self._scripts = context.scripts

    @property
    def _partition(self) -> str:
        return self._scripts.partitions.names[0]

    async def record(self, entry: AuditEntry) -> None:
        self._context.ensure_open()
        text = msgspec.json.encode(entry)
        await self._scripts.run("audit_record", self._partition, AUDIT_KEPT, text, resend=False)

    async def entries(
        self, *, after: str | None = None, limit: int = 100
    ) -> tuple[AuditEntry, ...]:
        check_audit_page(after, limit)
        self._context.ensure_open()
        reply = await self._scripts.run("audit_entries", self._partition, after or "+", limit)
        return tuple([_entry(item.decode(), fields) for item, fields in reply])


def _entry(number: str, fields: list[bytes]) -> AuditEntry:
    try:
        _, at, _, text = fields
        return structs.replace(_decoder.decode(text), id=number, at=seconds(at))
    except (ValueError, msgspec.MsgspecError):  # another program has written it
        return AuditEntry(actor="", action="damaged", id=number)
