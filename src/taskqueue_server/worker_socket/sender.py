"""Sending deliveries from the subscription to the socket, within the worker's credit."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Sequence

from taskqueue_core.backend import Subscription
from taskqueue_core.consumer.outage import OutageRetry
from taskqueue_core.errors import TaskQueueError
from taskqueue_core.protocol.frames import Feature
from taskqueue_core.protocol.server_session import ServerSession, ServerSessionState
from taskqueue_core.tasks import Delivery, Received
from taskqueue_server.worker_socket.websocket import WebSocketChannel

_BATCH = 100
"""maximum number of deliveries per receive: large enough to save round trips, small enough that all workers get some"""


class DeliverySender:
    """Receives deliveries and sends them to one worker. It receives no more than the session has room for."""

    def __init__(
        self,
        session: ServerSession,
        subscription: Subscription,
        channel: WebSocketChannel,
        outage: OutageRetry,
        room_changed: asyncio.Event,
    ) -> None:
        """Create a sender that looks again for room in the session when ``room_changed`` is set."""
        self._session = session
        self._subscription = subscription
        self._channel = channel
        self._outage = outage
        self._room_changed = room_changed
        self._timeouts = Feature.TIMEOUTS in session.features
        self._task: asyncio.Task[None] | None = None
        self._receiving = False
        self._interrupted = False

    def wake(self) -> None:
        """Wake `run`, because the worker has granted credit."""
        self._room_changed.set()

    def stop(self) -> None:
        """Stop receiving, and end `run`. Deliveries that `run` has begun to send are still sent."""
        self._room_changed.set()
        if self._receiving and self._task is not None and not self._interrupted:
            self._interrupted = True
            self._task.cancel()

    async def run(self) -> bool:
        """Send deliveries until the session leaves the state ``READY``, or `stop` is called.

        Return whether it ended because of a delivery with a timeout, which this worker cannot keep; it was released.
        Raises `SubscriptionClosed` if the backend closed the subscription.
        """
        self._task = asyncio.current_task()
        while self._session.state is ServerSessionState.READY:
            self._room_changed.clear()
            if not self._session.room:
                await self._room_changed.wait()
                continue
            try:
                self._receiving = True
                received = await self._outage.retry_until_available(self._receive)
            except asyncio.CancelledError:
                # Return only if `stop` cancelled the receive; propagate any other cancellation.
                task = asyncio.current_task()
                if not self._interrupted or task is None or task.uncancel() > 0:
                    raise
                return False
            finally:
                self._receiving = False
            timed = [d for d in received.deliveries if not self._timeouts and d.timeout is not None]
            if received.deliveries:
                await self._deliver([d for d in received.deliveries if d not in timed], timed)
            if timed:
                return True
        return False

    def _receive(self) -> Awaitable[Received]:
        # During an outage, receive without waiting, so that a response shows at once that the store is available again.
        limit = min(self._session.room, _BATCH)
        return self._subscription.receive(limit, 0 if self._outage.down else None)

    async def _deliver(self, deliveries: Sequence[Delivery], withheld: Sequence[Delivery]) -> None:
        unsent = {delivery.receipt: delivery for delivery in (*withheld, *deliveries)}
        try:
            if self._session.state is ServerSessionState.READY:
                for text, sent in self._session.deliver(deliveries):
                    await self._channel.send(text)
                    for delivery in sent:
                        del unsent[delivery.receipt]
        finally:
            if unsent:
                self._session.forget(unsent)
                # After an error, closing the subscription releases these deliveries.
                with contextlib.suppress(TaskQueueError):
                    await self._subscription.redeliver(*unsent.values())
