"""The table of tenants on the page of a queue: what waits and runs, and what has passed through this server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from taskqueue_core.backend import Capability
from taskqueue_core.capabilities import Order, TaskPage, has, listing_of
from taskqueue_core.errors import BackendUnavailable
from taskqueue_core.queue_settings import pause_tenant
from taskqueue_core.tasks import State
from taskqueue_server.context.server import read_each
from taskqueue_server.dashboard.local_metrics import TenantFlow
from taskqueue_server.dashboard.pages import flows_of
from taskqueue_server.dashboard.snapshot import Snapshot, StoreReading
from taskqueue_server.routing.operations import RequestContext

READ = 500
"""maximum number of waiting tasks, and of tasks in flight, that are read to count those of each tenant"""
_SHOWN = 50
"""maximum number of tenants, besides the paused ones"""
_PAUSED = 200
"""maximum number of paused tenants"""
_AT_ONCE = 20
"""number of queues in which a tenant is paused at the same time"""


class TenantRow(msgspec.Struct):
    """One tenant of a queue."""

    tenant: str | None
    """``None`` for tasks without a tenant"""
    flow: TenantFlow = msgspec.field(default_factory=TenantFlow)
    waiting: int = 0
    in_flight: int = 0
    oldest: float | None = None
    """since when the task that has waited longest is available"""
    running: float | None = None
    """since when the task that has run longest is in flight"""
    weight: int = 1
    share: float = 0.0
    """share of the deliveries of this server"""
    paused: bool = False

    @property
    def name(self) -> str:
        """The tenant as the table shows it."""
        return "no tenant" if self.tenant is None else self.tenant


class TenantTable(msgspec.Struct):
    """The tenants of a queue, sorted by a column."""

    rows: list[TenantRow]
    column: str
    partial: bool
    """whether the queue has more waiting tasks, or tasks in flight, than were read"""


_ORDERS: dict[str, Callable[[TenantRow], float]] = {
    "oldest": lambda row: float("inf") if row.oldest is None else row.oldest,
    "waiting": lambda row: -row.waiting,
    "in_flight": lambda row: -row.in_flight,
    "running": lambda row: float("inf") if row.running is None else row.running,
    "run_time": lambda row: -(row.flow.run_time or 0.0),
    "delivered": lambda row: -row.flow.delivered,
}
"""the columns by which the table can be sorted; the first one is the default"""


async def tenants_of(
    call: RequestContext, key: str, reading: StoreReading, snapshot: Snapshot
) -> TenantTable:
    """Return the tenants of a queue. The query parameter ``tenants`` names the column."""
    asked = call.request.query_params.get("tenants", "")
    column = asked if asked in _ORDERS else next(iter(_ORDERS))
    flows, settings = flows_of(call).of(key), reading.settings
    waiting, running = await _read(call, key, reading, snapshot)
    rows: dict[str | None, TenantRow] = {}

    def row_of(tenant: str | None) -> TenantRow:
        return rows.setdefault(tenant, TenantRow(tenant=tenant))

    for name, flow in flows.items():
        row_of(name).flow = flow
    for task in waiting.tasks:
        row = row_of(task.tenant)
        row.waiting += 1
        row.oldest = min(task.updated_at, row.oldest or task.updated_at)
    for task in running.tasks:
        row, since = row_of(task.tenant), task.delivered_at or task.updated_at
        row.in_flight += 1
        row.running = min(since, row.running or since)
    for name in settings.paused_tenants[:_PAUSED]:
        row_of(name).paused = True
    delivered = sum(flow.delivered for flow in flows.values())
    for tenant, row in rows.items():
        row.weight = settings.weights.get(tenant or "", 1)
        row.share = row.flow.delivered / delivered if delivered else 0.0
    ordered = sorted(rows.values(), key=lambda row: (_ORDERS[column](row), row.name))
    shown = [row for place, row in enumerate(ordered) if place < _SHOWN or row.paused]
    return TenantTable(
        rows=[] if rows.keys() <= {None} else shown,
        column=column,
        partial=waiting.next is not None or running.next is not None,
    )


async def _read(
    call: RequestContext, key: str, reading: StoreReading, snapshot: Snapshot
) -> tuple[TaskPage, TaskPage]:
    """Return the first waiting tasks, and the first ones in flight; none if the store does not respond."""
    backend, ledger = call.context.backend, reading.ledger

    async def page(state: State, number: int) -> TaskPage:
        if not number:
            return TaskPage()
        return await listing_of(backend).tasks(key, state=state, limit=READ)

    if snapshot.error is None and has(backend, Capability.LISTING):
        try:
            return await asyncio.gather(
                page(State.WAITING, ledger.waiting), page(State.IN_FLIGHT, ledger.in_flight)
            )
        except BackendUnavailable:
            pass
    return TaskPage(), TaskPage()


async def pause_everywhere(call: RequestContext, tenant: str, *, paused: bool) -> int:
    """Pause or resume a tenant in all queues with fair order that the client may change. Return their number."""
    control = call.context.control

    async def change(key: str) -> bool:
        if (await control.settings(key)).order is not Order.FAIR:
            return False
        await pause_tenant(control, key, tenant, paused=paused)
        return True

    keys = [key for key in await control.queues() if call.is_allowed(key, ("admin",))]
    return sum(await read_each(change, keys, _AT_ONCE))
