"""The background work of a server process: maintenance of the store, and reconciliation."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from taskqueue_core.consumer.maintenance import run_maintenance
from taskqueue_core.errors import ConfigurationError
from taskqueue_prefect.context import LOG, Host, forward_logs
from taskqueue_prefect.reconcile import reconcile


class QueueNotInUse(ConfigurationError):
    """Raised in strict mode if it is doubtful that the server uses the configured queue for all task runs."""


@contextlib.asynccontextmanager
async def serving(host: Host, faults: list[str]) -> AsyncIterator[None]:
    """Log the setup, run maintenance and reconciliation in the background, and close the host at the end.

    A nested call does nothing, because Prefect may start an application more than once. Raises `QueueNotInUse` if
    there are ``faults`` and the setting ``strict`` is true.
    """
    if host.serves:
        yield
        return
    host.serves = True
    forward_logs()
    try:
        await _log_setup(host, faults)
        loops = [host.begin(run_maintenance(host.backend)), host.begin(reconcile(host))]
        try:
            yield
        finally:
            for task in loops:
                task.cancel()
    finally:
        await host.aclose()


async def _log_setup(host: Host, faults: list[str]) -> None:
    if faults and host.settings.strict:
        raise QueueNotInUse(f"TASKQUEUE_PREFECT_STRICT is true, but {'; '.join(faults)}")
    for fault in faults:
        LOG.error("the task queue may not work: %s", fault)
    health = await host.backend.health()
    if not health.ok:
        LOG.error("store of the task queue unavailable: %s", health.details.get("error"))
    shared = "for all replicas" if host.backend.capabilities.shared else "for this process only"
    where = [str(value) for name, value in health.details.items() if name.endswith("address")]
    text = " ".join([repr(host.name), shared, *where])
    LOG.info("background tasks use the backend %s", text)
