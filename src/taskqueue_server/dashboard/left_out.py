"""The queues in which a tenant was not paused although it has tasks there, because their order is not fair."""

from __future__ import annotations

from functools import partial

from taskqueue_core.backend import Capability
from taskqueue_core.capabilities import Order, has, listing_of
from taskqueue_core.tasks import State
from taskqueue_server.context.server import read_each
from taskqueue_server.routing.operations import RequestContext

_READ = 200
"""maximum number of queues in which tasks of the tenant are looked for"""
_AT_ONCE = 20
_NAMED = 10
_LIVE = (State.WAITING, State.IN_FLIGHT, State.SCHEDULED, State.BLOCKED)


async def left_out(call: RequestContext, tenant: str) -> list[str]:
    """Return the queues without fair order, of those that the client may change, with live tasks of a tenant.

    Queues that are too long or too many to be read to the end are included.
    """
    control = call.context.control
    keys = [key for key in await control.queues() if call.is_allowed(key, ("admin",))]
    settings = await read_each(control.settings, keys, _AT_ONCE)
    others = [
        key for key, rules in zip(keys, settings, strict=True) if rules.order is not Order.FAIR
    ]
    ledgers = [stats.ledger for stats in await read_each(control.stats, others, _AT_ONCE)]
    busy = {
        key: [state for state in _LIVE if getattr(ledger, state.value)]
        for key, ledger in zip(others, ledgers, strict=True)
    }
    found = [key for key in others if busy[key]]
    if has(call.context.backend, Capability.LISTING):
        read = found[:_READ]
        may = await read_each(lambda key: _may_have(call, key, tenant, busy[key]), read, _AT_ONCE)
        found = [key for key, yes in zip(read, may, strict=True) if yes] + found[_READ:]
    return found


async def _may_have(call: RequestContext, key: str, tenant: str, states: list[State]) -> bool:
    """Return whether a queue has tasks of a tenant, or the first page of a list does not show that it has none."""
    look = partial(listing_of(call.context.backend).tasks, key, tenant=tenant, limit=1)
    for state in states:
        page = await look(state=state)
        if page.tasks or page.next is not None:
            return True
    return False


def names_of(keys: list[str]) -> str:
    """Return the sentences of a notice that name these queues and say what to do."""
    rest = f" and {len(keys) - _NAMED:,} more" if len(keys) > _NAMED else ""
    return (
        "Not paused, because their order is not fair, in queues that have, or may have, tasks of this tenant: "
        f"{', '.join(keys[:_NAMED])}{rest}. Set the order of these queues to fair and repeat this, or pause the queues."
    )
