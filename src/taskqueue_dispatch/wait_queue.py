"""The callers in this process that wait for a slot, queued by model and, within a model, by tenant. Does no I/O."""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from taskqueue_core.authoring.fair_order import FairRotation
from taskqueue_core.capabilities import Order
from taskqueue_dispatch.lease_renewal import RenewedLease
from taskqueue_dispatch.models import ModelConfig
from taskqueue_dispatch.registry import ModelRegistry
from taskqueue_dispatch.submit import Reason

_MAX_WAITERS = 10_000
"""maximum number of waiting callers in one process, across all models and tenants"""


@dataclass(eq=False, slots=True)
class Waiter:
    """A caller that waits for a slot."""

    model: str
    tenant: str | None
    number: int
    """position in the order of arrival"""
    given: asyncio.Future[RenewedLease | None]
    """future whose result is the unassigned slot that the caller gets, or ``None`` if the caller gets no slot"""


class _ModelQueue:
    """The waiting callers of one model, in order of arrival and also by tenant.

    Both orders are kept, because an operator may switch between FIFO and fair order while callers wait.
    """

    def __init__(self) -> None:
        self.all: OrderedDict[int, Waiter] = OrderedDict()
        self.tenants: dict[str | None, OrderedDict[int, Waiter]] = {}
        self._rotation: FairRotation[str | None] = FairRotation()

    def add(self, waiter: Waiter, *, first: bool = False) -> None:
        """Add a waiter at the end, or at the head if ``first``."""
        own = self.tenants.get(waiter.tenant)
        if own is None:
            own = self.tenants[waiter.tenant] = OrderedDict()
            self._rotation.join(waiter.tenant)
        for queue in (self.all, own):
            queue[waiter.number] = waiter
            queue.move_to_end(waiter.number, last=not first)

    def remove(self, waiter: Waiter) -> None:
        """Remove a waiter. Idempotent."""
        if self.all.pop(waiter.number, None) is None:
            return
        own = self.tenants[waiter.tenant]
        del own[waiter.number]
        if not own:
            del self.tenants[waiter.tenant]
            self._rotation.leave(waiter.tenant)

    def next(self, config: ModelConfig) -> Waiter | None:
        """Remove and return the next waiter, or ``None`` if there is none."""
        if not self.all:
            return None
        if config.order is Order.FAIR:
            tenant = self._rotation.next()
            waiter = next(iter(self.tenants[tenant].values()))
            self._rotation.spend(tenant, config.weights.get(tenant or "", 1))
        else:
            waiter = next(iter(self.all.values()))
        self.remove(waiter)
        return waiter


class SlotWaiters:
    """The wait queues of one process, by model. `give` passes slots to the waiting callers.

    The order and the capacity of a queue come from the model's configuration at the time of each call. A waiter stays
    in its queue even if the capacity becomes smaller or no endpoint is healthy.
    """

    def __init__(self, registry: ModelRegistry) -> None:
        self._registry = registry
        self._queues: dict[str, _ModelQueue] = {}
        self._callbacks: dict[str, Callable[[], None]] = {}
        self._numbers = itertools.count()
        self._waiting = 0
        self._closed = False

    def wanting(self, model: str) -> int:
        """Return how many callers wait for a slot of a model."""
        queue = self._queues.get(model)
        return 0 if queue is None else len(queue.all)

    def on_change(self, model: str, callback: Callable[[], None] | None) -> None:
        """Call ``callback`` when a waiter of the model is added. ``None`` removes the callback of the model."""
        if callback is None:
            self._callbacks.pop(model, None)
        else:
            self._callbacks[model] = callback

    def enter(self, model: str, tenant: str | None) -> Waiter | Reason:
        """Add a waiter, or return the reason why it is refused."""
        reason = self._full(model, tenant)
        if reason is not None:
            return reason
        waiter = Waiter(
            model, tenant, next(self._numbers), asyncio.get_running_loop().create_future()
        )
        self._add(waiter)
        return waiter

    def requeue(self, waiter: Waiter) -> None:
        """Put a waiter back at the head of its queue, because the slot that it got could not be used."""
        waiter.given = asyncio.get_running_loop().create_future()
        if self._closed:
            waiter.given.set_result(None)
        else:
            self._add(waiter, first=True)

    def leave(self, waiter: Waiter) -> None:
        """Remove a waiter whose caller no longer waits. Idempotent."""
        queue = self._queues.get(waiter.model)
        if queue is not None:
            before = len(queue.all)
            queue.remove(waiter)
            self._waiting -= before - len(queue.all)
            self._tidy(waiter.model, queue)

    def give(self, model: str, held: RenewedLease) -> bool:
        """Give a slot to the next waiter. Return False if there is none; the slot is then unchanged."""
        queue = self._queues.get(model)
        if queue is None:
            return False
        view = self._registry.view(model)
        config = ModelConfig() if view is None else view.config
        given = False
        while not given and (waiter := queue.next(config)) is not None:
            self._waiting -= 1
            # If the future is done, its caller has just been cancelled, so give the slot to the next waiter.
            if not waiter.given.done():
                waiter.given.set_result(held)
                given = True
        self._tidy(model, queue)
        return given

    def close(self) -> None:
        """Give all waiters ``None`` instead of a slot, and refuse new waiters. Idempotent."""
        self._closed = True
        queues, self._queues = self._queues, {}
        self._waiting = 0
        for queue in queues.values():
            for waiter in queue.all.values():
                if not waiter.given.done():
                    waiter.given.set_result(None)

    def _full(self, model: str, tenant: str | None) -> Reason | None:
        view = self._registry.view(model)
        if view is None:
            return Reason.NO_ENDPOINTS
        queue, capacity = self._queues.get(model), view.config.capacity(view.slots)
        fair = view.config.order is Order.FAIR
        waiting = () if queue is None else queue.tenants.get(tenant, ()) if fair else queue.all
        if self._closed or self._waiting >= _MAX_WAITERS:
            return Reason.QUEUE_FULL
        if len(waiting) >= capacity:
            return Reason.TENANT_FULL if fair else Reason.QUEUE_FULL
        return None

    def _add(self, waiter: Waiter, *, first: bool = False) -> None:
        self._queues.setdefault(waiter.model, _ModelQueue()).add(waiter, first=first)
        self._waiting += 1
        callback = self._callbacks.get(waiter.model)
        if callback is not None:
            callback()

    def _tidy(self, model: str, queue: _ModelQueue) -> None:
        if not queue.all:
            self._queues.pop(model, None)
