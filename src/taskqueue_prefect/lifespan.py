"""The background work of a server process, from its start to its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from taskqueue_core.consumer.maintenance import run_maintenance
from taskqueue_core.errors import ConfigurationError
from taskqueue_prefect.context import LOG, Host, forward_logs
from taskqueue_prefect.reconcile import reconcile


class QueueNotInUse(ConfigurationError):
    """The server would not use the configured queue, and the settings are strict."""


@contextlib.asynccontextmanager
async def serving(host: Host, faults: list[str]) -> AsyncIterator[None]:
    """Log the setup, run maintenance and reconcile; release everything at the end.

    If nested, it does nothing, because Prefect starts an application more than once. Raises `QueueNotInUse` for faults
    if the settings are strict.
    """
    if host.serves:
        yield
        return
    host.serves = True
    forward_logs()
    try:
        await _log_setup(host, faults)
        loops = [host.begin(run_maintenance(host.control)), host.begin(reconcile(host))]
        try:
            yield
        finally:
            for task in loops:
                task.cancel()
    finally:
        await host.aclose()


async def serve_on(host: Host, faults: list[str]) -> None:
    """Do the same for an application that has started already, until cancelled when the event loop ends."""
    async with serving(host, faults):
        await asyncio.Event().wait()


async def _log_setup(host: Host, faults: list[str]) -> None:
    if faults and host.settings.strict:
        raise QueueNotInUse(f"TASKQUEUE_PREFECT_STRICT: {'; '.join(faults)}")
    for fault in faults:
        LOG.error("the task queue may not work: %s", fault)
    health = await host.backend.health()
    if not health.ok:
        LOG.error("store of the task queue unavailable: %s", health.details.get("error"))
    shared = "for all replicas" if host.backend.capabilities.shared else "for this process only"
    where = [str(value) for name, value in health.details.items() if name.endswith("address")]
    text = " ".join([repr(host.name), shared, *where])
    LOG.info("background tasks use the backend %s", text)
