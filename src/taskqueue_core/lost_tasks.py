"""A warning of tasks that are lost, because their store ends with a connection."""

from __future__ import annotations

import logging

from taskqueue_core.backend import Backend, Capability
from taskqueue_core.capabilities import control_of, has

_log = logging.getLogger("taskqueue")
_MAX_NAMED = 5
"""maximum number of queues that a log message names"""


async def warn_of_lost_tasks(backend: Backend) -> None:
    """Log a warning if tasks were published to a store that ends with this connection, and nothing received any."""
    able = backend.capabilities
    if able.shared or able.durable or not has(backend, Capability.CONTROL):
        return
    control, lost, keys = control_of(backend), 0, list[str]()
    for key in await control.queues():
        stats = await control.stats(key)
        number = stats.ledger.waiting + stats.ledger.scheduled + stats.ledger.blocked
        if number and not stats.delivered:
            lost += number
            keys.append(key)
    if lost:
        shown = ", ".join(keys[:_MAX_NAMED]) + (", ..." if len(keys) > _MAX_NAMED else "")
        _log.warning(
            "published tasks are lost: %d in %s; no worker received them, and their store in memory ends with this "
            "connection: connect to 'server' or another backend that processes share, or pass one backend object to "
            "the connection and a LocalWorker",
            lost,
            shown,
        )
