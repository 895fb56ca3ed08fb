"""Server-wide state: the backend, the open connections, and whether the server is shutting down."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TypeVar

from taskqueue_core.backend import Backend, Capability
from taskqueue_core.capabilities import control_of, dead_letters_of, has
from taskqueue_core.concurrency import gather_all
from taskqueue_core.config import Settings
from taskqueue_core.hooks import Hooks
from taskqueue_core.instrumented import InstrumentedBackend
from taskqueue_core.queue import Queue
from taskqueue_server.auth.access import AccessControl
from taskqueue_server.auth.quotas import Quotas
from taskqueue_server.auth.tickets import Tickets
from taskqueue_server.context.connections import Connections
from taskqueue_server.context.statistics import StatisticsReader
from taskqueue_server.context.unauthenticated import UnauthenticatedConnections
from taskqueue_server.context.waiters import LimitedSlots, ResultWaiters

_log = logging.getLogger("taskqueue.server")
_MOST_READERS = 1000
"""maximum number of event streams that clients of one server process read"""
_HANDOVER_SECONDS = 2.0
_SETTLE_SECONDS = 0.5
"""seconds allowed after the drain timeout for closing sockets and releasing deliveries"""

try:
    VERSION = version("taskqueue-backends")
except PackageNotFoundError:  # the server runs from a source tree, without an installed package
    VERSION = "0"


T = TypeVar("T")


async def read_each(
    read: Callable[[str], Awaitable[T]], keys: Sequence[str], at_once: int
) -> list[T]:
    """Call ``read`` for each key, with at most ``at_once`` concurrent calls, and return the results in order."""
    results: list[T] = []
    for start in range(0, len(keys), at_once):
        results += await gather_all(map(read, keys[start : start + at_once]))
    return results


class ServerContext:
    """Server-wide state: the backend, its capabilities, open connections, and whether the server is shutting down."""

    def __init__(self, backend: Backend, settings: Settings) -> None:
        """Take ownership of ``backend``.

        Raises `CapabilityMissing` if ``backend`` lacks ``control`` or ``dead_letters``, and `ConfigurationError` for an
        invalid tokens file or ticket key.
        """
        if not isinstance(backend, InstrumentedBackend):
            backend = InstrumentedBackend(backend, Hooks())
        self.backend = backend
        self.hooks = backend.hooks
        self.control = control_of(backend)
        self.dead_letters = dead_letters_of(backend)
        self.statistics = StatisticsReader(self.control, backend.now)
        self.queue = Queue(backend)
        self.settings = settings
        self.access = AccessControl(settings, self.hooks, backend)
        self.tickets = Tickets(settings.server_ticket_key_file)
        self.usage = Quotas()
        self.registry = Connections()
        self.unauthenticated = UnauthenticatedConnections(
            settings.unauthenticated_connections,
            settings.unauthenticated_per_address,
            settings.trusted_proxies,
        )
        self.started = False
        self.startup_error: Exception | None = None
        """the error that prevented the startup or a clean shutdown"""
        self.draining = asyncio.Event()
        self.waiters = ResultWaiters(self.control, self.hooks, self.draining)
        self.readers = LimitedSlots(_MOST_READERS, "too_many_readers", "requests read events")
        """the event streams of tasks that clients read"""
        self.extension_state: dict[str, object] = {}
        """state of each extension by its name; see `taskqueue_server.routing.extensions.Extension.open`"""
        self._drained_at = 0.0

    @property
    def drain_remaining(self) -> float:
        """Seconds until the drain timeout, in which workers may still settle tasks; 0 if the server is not draining."""
        return max(0.0, self._drained_at - asyncio.get_running_loop().time())

    @property
    def handover(self) -> float:
        """Seconds for which a worker may move its deliveries to another server after this server disconnects it.

        0 if the backend cannot move deliveries between servers.
        """
        movable = has(self.backend, Capability.HANDOVER) and self.backend.capabilities.shared
        return _HANDOVER_SECONDS if movable else 0.0

    async def drain(self) -> None:
        """Stop accepting connections, ask every worker to leave, and wait until all have left.

        The wait ends soon after the drain timeout even if connections are still open. Each connection closes itself and
        releases the deliveries that its worker has neither settled nor moved to another server. Idempotent.
        """
        if not self.draining.is_set():
            self._drained_at = asyncio.get_running_loop().time() + self.settings.drain
            self.draining.set()
            _log.info("draining", extra={"connections": len(self.registry)})
        try:
            async with asyncio.timeout(self.drain_remaining + self.handover + _SETTLE_SECONDS):
                await self.registry.empty()
        except TimeoutError:
            _log.warning(
                "connections still open after the drain timeout",
                extra={"connections": len(self.registry)},
            )
