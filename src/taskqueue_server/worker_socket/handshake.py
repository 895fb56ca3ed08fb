"""The start of a worker's connection: waiting for its hello, and adopting the deliveries that it still runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import msgspec

from taskqueue_core.backend import Backend, Capability, Subscription
from taskqueue_core.capabilities import handover_of, has
from taskqueue_core.consumer.outage import OutageRetry
from taskqueue_core.limits import LIMITS
from taskqueue_core.protocol.frames import CLOSE_TIMEOUT, Hello
from taskqueue_core.protocol.server_events import CloseSocket, Greeted, SendFrames
from taskqueue_core.protocol.server_session import ServerSession
from taskqueue_core.tasks import Delivery
from taskqueue_server.worker_socket.websocket import WebSocketChannel

HELLO_SECONDS = 5.0
_ROOM = LIMITS.frame - 4096


async def read_hello(session: ServerSession, channel: WebSocketChannel) -> Hello | CloseSocket:
    """Return the hello, or how to close if none arrives within `HELLO_SECONDS`. Raises `ConnectionClosed`."""
    try:
        async with asyncio.timeout(HELLO_SECONDS):
            while True:
                for event in session.feed(await channel.receive()):
                    match event:
                        case Greeted(hello):
                            return hello
                        case SendFrames(text):
                            await channel.send(text)
                        case CloseSocket():
                            return event
    except TimeoutError:
        refusal = session.refuse(
            "no_hello", "the first frame must be hello, and it must arrive in time", CLOSE_TIMEOUT
        )
        return cast("CloseSocket", refusal[-1])


async def adopt(
    backend: Backend,
    subscription: Subscription,
    receipts: Sequence[str],
    outage: OutageRetry,
    is_allowed: Callable[[str], bool] = lambda _: True,
) -> tuple[Delivery, ...]:
    """Move the deliveries that a worker still runs to its new subscription; leave out lost ones.

    Deliveries of a key for which ``is_allowed`` is false are released: their receipts belonged to another client.
    """
    if not receipts or not has(backend, Capability.HANDOVER):
        return ()
    handover = handover_of(backend, subscription)
    fitting_receipts = _within_a_frame(receipts)
    adopted: list[Delivery] = []
    for start in range(0, len(fitting_receipts), LIMITS.batch):
        batch = fitting_receipts[start : start + LIMITS.batch]
        deliveries = await outage.retry_until_available(partial(handover.adopt, *batch))
        moved = [delivery for delivery in deliveries if delivery is not None]
        adopted += (delivery for delivery in moved if is_allowed(delivery.task.key))
        foreign = [delivery for delivery in moved if not is_allowed(delivery.task.key)]
        if foreign:
            await outage.retry_until_available(partial(subscription.redeliver, *foreign))
    return tuple(adopted)


def _within_a_frame(receipts: Sequence[str]) -> list[str]:
    # The welcome lists the adopted receipts.
    size = 0
    fitting = []
    for receipt in dict.fromkeys(receipts):
        size += len(msgspec.json.encode(receipt)) + 1
        if size > _ROOM:
            break
        fitting.append(receipt)
    return fitting
