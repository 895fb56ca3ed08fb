"""The allowed receivers of callbacks and the settings of their queue, as the dispatcher's settings define them."""

from __future__ import annotations

from ipaddress import ip_network

from taskqueue_core.backend import Backend, Capability
from taskqueue_core.capabilities import Order, QueueSettings, control_of, has
from taskqueue_core.errors import ConfigurationError, SettingsConflict
from taskqueue_core.retry import RetryPolicy
from taskqueue_dispatch.config import DispatchSettings
from taskqueue_dispatch.names import CALLBACKS
from taskqueue_dispatch.outbound_http import UrlPolicy

_RETRY = RetryPolicy(base=5.0, cap=6 * 3600.0, jitter=0.2)
_STORED_SECONDS = 86_400.0
"""seconds for which the outcome of a callback is kept, and for which a second callback with its id is dropped"""
_MAX_PORT = 65_535


def policy_of(settings: DispatchSettings) -> UrlPolicy:
    """Return the rules for URLs of callbacks. Raises `ConfigurationError` for an invalid port or network."""
    if not all(1 <= port <= _MAX_PORT for port in settings.callback_ports):
        raise ConfigurationError(
            f"TASKQUEUE_DISPATCH_CALLBACK_PORTS: a port must be from 1 to {_MAX_PORT}"
        )
    try:
        networks = tuple(map(ip_network, settings.callback_networks))
    except ValueError as error:
        raise ConfigurationError(f"TASKQUEUE_DISPATCH_CALLBACK_NETWORKS: {error}") from None
    ports = frozenset(settings.callback_ports)
    return UrlPolicy(ports=ports, http=settings.callback_http, networks=networks)


async def prepare(backend: Backend, settings: DispatchSettings) -> None:
    """Configure the queue of callbacks: the number of attempts and the concurrency per host come from ``settings``.

    All other settings get defaults when the queue is new, and later stay as an operator has changed them.
    """
    control = control_of(backend)
    while True:
        current = await control.settings(CALLBACKS)
        changed = _applied(current, settings, ordered=has(backend, Capability.ORDER))
        if changed == current:
            return
        try:
            await control.configure(CALLBACKS, changed)
        except SettingsConflict:
            continue
        return


def _applied(current: QueueSettings, settings: DispatchSettings, *, ordered: bool) -> QueueSettings:
    fields = current.model_dump()
    if not current.version:
        fields |= {"result_ttl": _STORED_SECONDS, "dedupe_window": _STORED_SECONDS}
    retry = current.retry if current.version else _RETRY
    fields["retry"] = retry.model_copy(update={"max_attempts": settings.callback_attempts})
    if ordered:
        fields |= {"order": Order.FAIR, "tenant_max_inflight": settings.callbacks_per_host}
    return QueueSettings.model_validate(fields)
