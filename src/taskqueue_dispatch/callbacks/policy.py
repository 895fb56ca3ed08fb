"""Where receivers of callbacks may be, and how their queue is kept, by the dispatcher's settings."""

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
_MAX_STORED = 86_400.0
"""seconds for which what became of a callback can be read, and for which it is not sent anew"""
_HIGHEST = 65_535


def policy_of(settings: DispatchSettings) -> UrlPolicy:
    """Return what callbacks may reach. Raises `ConfigurationError` for ports and networks that are none."""
    if not all(1 <= port <= _HIGHEST for port in settings.callback_ports):
        raise ConfigurationError(
            f"TASKQUEUE_DISPATCH_CALLBACK_PORTS: ports are from 1 to {_HIGHEST}"
        )
    try:
        networks = tuple(map(ip_network, settings.callback_networks))
    except ValueError as error:
        raise ConfigurationError(f"TASKQUEUE_DISPATCH_CALLBACK_NETWORKS: {error}") from None
    ports = frozenset(settings.callback_ports)
    return UrlPolicy(ports=ports, http=settings.callback_http, networks=networks)


async def prepare(backend: Backend, settings: DispatchSettings) -> None:
    """Set the queue of callbacks up: attempts and flights by host as told, the rest as an operator has left it."""
    control = control_of(backend)
    while True:
        present = await control.settings(CALLBACKS)
        wanted = _applied(present, settings, ordered=has(backend, Capability.ORDER))
        if wanted == present:
            return
        try:
            await control.configure(CALLBACKS, wanted)
        except SettingsConflict:
            continue
        return


def _applied(present: QueueSettings, settings: DispatchSettings, *, ordered: bool) -> QueueSettings:
    fields = present.model_dump()
    if not present.version:
        fields |= {"result_ttl": _MAX_STORED, "dedupe_window": _MAX_STORED}
    retry = present.retry if present.version else _RETRY
    fields["retry"] = retry.model_copy(update={"max_attempts": settings.callback_attempts})
    if ordered:
        fields |= {"order": Order.FAIR, "tenant_max_inflight": settings.callbacks_per_host}
    return QueueSettings.model_validate(fields)
