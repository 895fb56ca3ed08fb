"""What the runners of all models of one dispatcher share."""

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
from taskqueue_dispatch.endpoint_client.client import Caller
from taskqueue_dispatch.lease_renewal import LeaseRenewer
from taskqueue_dispatch.registry import ModelRegistry
from taskqueue_dispatch.submit import Estimates
from taskqueue_dispatch.wait_queue import SlotWaiters

Report = Callable[[Task, str, bytes | None, str | None], Awaitable[None]]
"""tells a job's client how it ended: the job, ``done`` or ``failed``, its result, and the error"""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """See `taskqueue_dispatch.service.Dispatcher`, which puts them together."""

    backend: Backend
    control: Control
    pool: SlotPool
    registry: ModelRegistry
    renewer: LeaseRenewer
    caller: Caller
    waiters: SlotWaiters
    breaker: Breaker
    estimates: Estimates
    settings: DispatchSettings
    store: OutageRetry
    holder: str
    """who this dispatcher is, for slots and as a consumer"""
    report: Report
    uniform: Callable[[], float] = random.random
