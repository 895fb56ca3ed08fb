"""Recording what operators do: in the log of this process, and in the audit log of the store."""

from __future__ import annotations

import asyncio
import logging

from taskqueue_core.backend import Backend, Capability
from taskqueue_core.capabilities import AuditEntry, audit_of, has
from taskqueue_core.errors import TaskQueueError

_SECONDS = 5.0
"""seconds within which the store must take an entry"""
_log = logging.getLogger("taskqueue.audit")


async def record_action(backend: Backend, entry: AuditEntry) -> None:
    """Record an action that was carried out, or begins. The log of this process says if the store takes no entry."""
    fields = {
        name: value
        for name, value in (
            ("action", entry.action),
            ("identity", entry.actor),
            ("key", entry.key),
            ("tasks", entry.tasks),
            ("details", entry.details),
        )
        if value not in (None, "")
    }
    _log.info("action", extra=fields)
    if not has(backend, Capability.AUDIT):
        return
    try:
        async with asyncio.timeout(_SECONDS):
            await audit_of(backend).record(entry)
    except Exception as error:  # noqa: BLE001 - the client gets its answer, because the action is carried out
        reason = error.code if isinstance(error, TaskQueueError) else type(error).__name__
        _log.warning(
            "the store has not taken an entry of the audit log", extra={**fields, "reason": reason}
        )
