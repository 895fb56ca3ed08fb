"""Adopting the deliveries that a worker still runs after a reconnect."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from taskqueue_core.backend import Backend, Capability, Subscription
from taskqueue_core.capabilities import handover_of, has
from taskqueue_core.consumer.outage import OutageRetry
from taskqueue_core.limits import LIMITS
from taskqueue_core.tasks import Delivery

_ADOPT_AT_LEAST = 16
"""minimum number of receipts per call, so that many small tasks need few calls"""
_WELCOME_BYTES = LIMITS.frame - 4096
"""maximum total size in bytes of the receipts in a welcome, which must fit into one frame"""


async def adopt(
    backend: Backend,
    subscription: Subscription,
    receipts: Sequence[str],
    outage: OutageRetry,
    is_allowed: Callable[[str], bool] = lambda _: True,
) -> tuple[Delivery, ...]:
    """Move a worker's running deliveries to its new subscription, and return the deliveries that are still valid.

    Deliveries of a key for which ``is_allowed`` returns false belong to another client, and do not change. Adoption
    ends once the deliveries have more than `Limits.held` bytes, as no worker within that limit holds so many.
    """
    if not receipts or not has(backend, Capability.HANDOVER):
        return ()
    handover = handover_of(backend, subscription)
    fitting_receipts = _within_a_frame(receipts)
    adopted: list[Delivery] = []
    start = size = 0
    while start < len(fitting_receipts) and size <= LIMITS.held:
        most = max(_ADOPT_AT_LEAST, (LIMITS.held - size) // LIMITS.payload)
        batch = fitting_receipts[start : start + most]
        start += most
        call = partial(handover.adopt, *batch, allowed=is_allowed)
        found = [d for d in await outage.retry_until_available(call) if d is not None]
        size += sum(delivery.size for delivery in found)
        adopted += found
    return tuple(adopted)


def _within_a_frame(receipts: Sequence[str]) -> list[str]:
    # The welcome lists all adopted receipts, and must fit into one frame.
    size = 0
    fitting = []
    for receipt in dict.fromkeys(receipts):
        size += len(msgspec.json.encode(receipt)) + 1
        if size > _WELCOME_BYTES:
            break
        fitting.append(receipt)
    return fitting
