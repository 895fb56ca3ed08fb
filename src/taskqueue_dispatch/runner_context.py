"""The components that the runners of all models of one dispatcher share."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import Control, SlotPool
from taskqueue_core.consumer.outage import OutageRetry
from taskqueue_core.tasks import Task
from taskqueue_dispatch.config import DispatchSettings
from taskqueue_dispatch.endpoint_client.breaker import Breaker
from taskqueue_dispatch.endpoint_client.client import EndpointClient
from taskqueue_dispatch.lease_renewal import LeaseRenewer
from taskqueue_dispatch.registry import ModelRegistry
from taskqueue_dispatch.submit import Estimates
from taskqueue_dispatch.wait_queue import SlotWaiters

Report = Callable[[Task, str, bytes | None, str | None], Awaitable[None]]
"""Function that reports how a job ended to its client: the task, ``done`` or ``failed``, the result, and the error."""


@dataclass(frozen=True, kw_only=True)
class RunnerContext:
    """The components that runners use. `taskqueue_dispatch.service.Dispatcher` creates this object."""

    backend: Backend
    control: Control
    pool: SlotPool
    registry: ModelRegistry
    renewer: LeaseRenewer
    caller: EndpointClient
    waiters: SlotWaiters
    breaker: Breaker
    estimates: Estimates
    settings: DispatchSettings
    store: OutageRetry
    holder: str
    """name of this dispatcher as a holder of slots and as a consumer of queues"""
    report: Report
    uniform: Callable[[], float] = random.random
