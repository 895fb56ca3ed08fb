"""The components that a dispatcher and the runners of its models share."""

from __future__ import annotations

import os
import re
import secrets
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from taskqueue_core.backend import Backend, Capability
from taskqueue_core.capabilities import control_of, has, slots_of, streams_of
from taskqueue_core.consumer.event_queue import EventQueue
from taskqueue_core.consumer.outage import OutageRetry
from taskqueue_core.tasks import Task
from taskqueue_dispatch.config import DispatchSettings
from taskqueue_dispatch.endpoint_client.breaker import Breaker
from taskqueue_dispatch.endpoint_client.client import EndpointClient
from taskqueue_dispatch.lease_renewal import LeaseRenewer
from taskqueue_dispatch.registry import ModelRegistry
from taskqueue_dispatch.slot_limits import SlotLimits
from taskqueue_dispatch.submit import Estimates
from taskqueue_dispatch.wait_queue import SlotWaiters


class RunnerContext(ABC):
    """The part of a dispatcher that its runners use: the base class of `taskqueue_dispatch.service.Dispatcher`."""

    def __init__(
        self,
        backend: Backend,
        settings: DispatchSettings,
        caller: EndpointClient,
        store: OutageRetry,
        uniform: Callable[[], float],
    ) -> None:
        """Create the components. Raises `CapabilityMissing` if the backend lacks ``control`` or ``slots``."""
        self.backend = backend
        self.settings = settings
        self.control = control_of(backend)
        self.pool = slots_of(backend)
        host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:60].lstrip("._-") or "host"
        self.holder = f"{host}-{os.getpid()}-{secrets.token_hex(4)}"
        """name that identifies this dispatcher as a holder of slots and as a consumer of queues"""
        self.caller = caller
        self.registry = ModelRegistry(backend, settings)
        self.renewer = LeaseRenewer(self.pool, self.registry, caller, settings)
        self.waiters = SlotWaiters(self.registry)
        self.breaker = Breaker(settings)
        self.limits = SlotLimits(settings)
        self.estimates = Estimates()
        self.store = store
        self.events: EventQueue | None = None
        """what servers stream, on its way to the store; ``None`` if the backend keeps no events"""
        if has(backend, Capability.STREAMS):
            self.events = EventQueue(streams_of(backend), store, on_stale=_ignore)
        self.uniform = uniform

    @abstractmethod
    async def report(
        self, task: Task, status: str, result: bytes | None, error: str | None
    ) -> None:
        """Report to a job's client how the job ended: ``done`` or ``failed``, with the result or the error."""


async def _ignore(receipts: Sequence[str]) -> None:
    """Do nothing: an attempt learns from its slot, or when it is settled, that its delivery is not current any more."""
