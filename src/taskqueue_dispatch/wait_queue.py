"""Who waits in this process for a slot: in line by model, and within that by tenant. It does no input or output."""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Callable

from taskqueue_core.authoring.fair_order import FairRotation
from taskqueue_core.capabilities import Order
from taskqueue_dispatch.lease_renewal import RenewedLease
from taskqueue_dispatch.models import ModelConfig
from taskqueue_dispatch.registry import ModelRegistry
from taskqueue_dispatch.submit import Reason

_MOST = 10_000
"""who wait in one process, over all models and tenants"""


class Waiter:
    """One who waits."""

    __slots__ = ("given", "model", "number", "tenant")

    def __init__(self, model: str, tenant: str | None, number: int) -> None:
        """Made by `SlotWaiters.enter`."""
        self.model = model
        self.tenant = tenant
        self.number = number
        """by order of coming"""
        self.given: asyncio.Future[RenewedLease | None] = asyncio.get_running_loop().create_future()
        """the slot, unassigned; ``None`` where there will be none"""


class _Line:
    """The waiters of one model, in both orders at once: to change between them moves nobody."""

    def __init__(self) -> None:
        self.all: OrderedDict[int, Waiter] = OrderedDict()
        self.tenants: dict[str | None, OrderedDict[int, Waiter]] = {}
        self._walk: FairRotation[str | None] = FairRotation()

    def add(self, waiter: Waiter, *, first: bool = False) -> None:
        """Let somebody in, at the end or the head."""
        own = self.tenants.get(waiter.tenant)
        if own is None:
            own = self.tenants[waiter.tenant] = OrderedDict()
            self._walk.join(waiter.tenant)
        for line in (self.all, own):
            line[waiter.number] = waiter
            line.move_to_end(waiter.number, last=not first)

    def remove(self, waiter: Waiter) -> None:
        """Let somebody go. Idempotent."""
        if self.all.pop(waiter.number, None) is None:
            return
        own = self.tenants[waiter.tenant]
        del own[waiter.number]
        if not own:
            del self.tenants[waiter.tenant]
            self._walk.leave(waiter.tenant)

    def next(self, config: ModelConfig) -> Waiter | None:
        """Take out who is next."""
        if not self.all:
            return None
        if config.order is Order.FAIR:
            tenant = self._walk.next()
            waiter = next(iter(self.tenants[tenant].values()))
            self._walk.spend(tenant, config.weights.get(tenant or "", 1))
        else:
            waiter = next(iter(self.all.values()))
        self.remove(waiter)
        return waiter


class SlotWaiters:
    """All lines of one process. Slots come to them by `give`.

    The order and the room in a line are those of the model's configuration at the time of asking; who is in a line
    stays, also where that has less room now or no endpoint is well.
    """

    def __init__(self, registry: ModelRegistry) -> None:
        """Start empty."""
        self._registry = registry
        self._lines: dict[str, _Line] = {}
        self._stirs: dict[str, Callable[[], None]] = {}
        self._numbers = itertools.count()
        self._waiting = 0
        self._closed = False

    def wanting(self, model: str) -> int:
        """Return how many wait for a slot of a model."""
        line = self._lines.get(model)
        return 0 if line is None else len(line.all)

    def on_change(self, model: str, callback: Callable[[], None] | None) -> None:
        """Call ``callback``, in place of an earlier one, when somebody begins to wait; ``None`` takes it away."""
        if callback is None:
            self._stirs.pop(model, None)
        else:
            self._stirs[model] = callback

    def enter(self, model: str, tenant: str | None) -> Waiter | Reason:
        """Let somebody wait, or say why not."""
        reason = self._full(model, tenant)
        if reason is not None:
            return reason
        waiter = Waiter(model, tenant, next(self._numbers))
        self._add(waiter)
        return waiter

    def requeue(self, waiter: Waiter) -> None:
        """Let somebody wait on, at the head, whose slot was no good."""
        waiter.given = asyncio.get_running_loop().create_future()
        if self._closed:
            waiter.given.set_result(None)
        else:
            self._add(waiter, first=True)

    def leave(self, waiter: Waiter) -> None:
        """Let somebody go who does not wait any more. Idempotent."""
        line = self._lines.get(waiter.model)
        if line is not None:
            before = len(line.all)
            line.remove(waiter)
            self._waiting -= before - len(line.all)
            self._tidy(waiter.model, line)

    def give(self, model: str, held: RenewedLease) -> bool:
        """Hand a slot to who is next. False if nobody waits, and nothing was done with it."""
        line = self._lines.get(model)
        if line is None:
            return False
        view = self._registry.view(model)
        config = ModelConfig() if view is None else view.config
        given = False
        while not given and (waiter := line.next(config)) is not None:
            self._waiting -= 1
            if not waiter.given.done():  # else who awaited it was cancelled just now
                waiter.given.set_result(held)
                given = True
        self._tidy(model, line)
        return given

    def close(self) -> None:
        """Tell all who wait that there will be no slot, and let nobody in any more. Idempotent."""
        self._closed = True
        lines, self._lines = self._lines, {}
        self._waiting = 0
        for line in lines.values():
            for waiter in line.all.values():
                if not waiter.given.done():
                    waiter.given.set_result(None)

    def _full(self, model: str, tenant: str | None) -> Reason | None:
        view = self._registry.view(model)
        if view is None:
            return Reason.NO_ENDPOINTS
        line, room = self._lines.get(model), view.config.capacity(view.slots)
        fair = view.config.order is Order.FAIR
        in_line = () if line is None else line.tenants.get(tenant, ()) if fair else line.all
        if self._closed or self._waiting >= _MOST:
            return Reason.QUEUE_FULL
        if len(in_line) >= room:
            return Reason.TENANT_FULL if fair else Reason.QUEUE_FULL
        return None

    def _add(self, waiter: Waiter, *, first: bool = False) -> None:
        self._lines.setdefault(waiter.model, _Line()).add(waiter, first=first)
        self._waiting += 1
        stir = self._stirs.get(waiter.model)
        if stir is not None:
            stir()

    def _tidy(self, model: str, line: _Line) -> None:
        if not line.all:
            self._lines.pop(model, None)
