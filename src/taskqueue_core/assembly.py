"""Opening the configured backend with its plugins and, if configured, migration and sharding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from taskqueue_core.backend import Backend, Capability
from taskqueue_core.capabilities import control_of, has
from taskqueue_core.config import Settings, load_settings, of_the_old_side
from taskqueue_core.errors import ConfigurationError
from taskqueue_core.hooks import Hooks, load_plugins
from taskqueue_core.instrumented import InstrumentedBackend
from taskqueue_core.loading import load_backend
from taskqueue_core.migration import MigratingBackend, MigrationMode
from taskqueue_core.shard_guard import ShardGuard
from taskqueue_core.sharding.backend import ShardedBackend

_SERVER = "server"
"""name of the backend that connects to a server; migration and sharding are done by that server, not here"""


def open_backend(
    name: str | None = None,
    settings: Settings | None = None,
    server: Mapping[str, Any] | None = None,
) -> InstrumentedBackend:
    """Create the configured backend, or the backend called ``name``, with the installed plugins.

    If ``TASKQUEUE_MIGRATE_FROM`` names an old backend, the result combines both backends (docs/migration.md). If
    ``TASKQUEUE_SHARDING`` is set, queues may have shards (docs/shards.md). ``server`` are the options of the backend
    named ``server``: ``url``, ``token`` and ``tls_ca``, instead of its settings. Raises `ConfigurationError`.
    """
    settings = settings or load_settings(Settings)
    hooks = Hooks()
    load_plugins(hooks, allow=settings.plugins_allow, deny=settings.plugins_deny)
    name = name or settings.backend
    if name == _SERVER:
        return InstrumentedBackend(load_backend(name, **(server or {})), hooks)
    backends = [load_backend(name)]
    if settings.migrate_from is not None:
        backends.append(_load_old(settings.migrate_from))
    guard = None
    if settings.sharding:
        backends = [ShardedBackend(backend) for backend in backends]
    elif all(has(backend, Capability.CONTROL) for backend in backends):
        guard = ShardGuard(*[control_of(backend) for backend in backends])
    if settings.migrate_from is None:
        return InstrumentedBackend(backends[0], hooks, guard)
    new, old = backends
    names = (settings.migrate_from[:100], name[:100])
    mode = MigrationMode(settings.migrate_mode)
    return InstrumentedBackend(MigratingBackend(old, new, mode=mode, names=names), hooks, guard)


def _load_old(name: str) -> Backend:
    if name == _SERVER:
        raise ConfigurationError(
            "TASKQUEUE_MIGRATE_FROM: must not be 'server'; set it to the backend that stores the server's tasks"
        )
    with of_the_old_side():
        try:
            return load_backend(name)
        except ConfigurationError as error:
            raise type(error)(f"the backend to migrate from: {error}") from error
