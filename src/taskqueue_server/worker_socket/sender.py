"""Sending deliveries from the subscription to the socket, within the worker's credit."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Sequence

from taskqueue_core.backend import Subscription
from taskqueue_core.consumer.outage import OutageRetry
from taskqueue_core.errors import TaskQueueError
from taskqueue_core.protocol.server_session import ServerSession, ServerSessionState
from taskqueue_core.tasks import Delivery, Received
from taskqueue_server.worker_socket.websocket import WebSocketChannel

_BATCH = 100
"""deliveries per receive: enough to make the round trip cheap, few enough to be shared between workers"""


class DeliverySender:
    """Receives deliveries and sends them. Receives no more than the credit allows, so that nothing is buffered."""

    def __init__(
        self,
        session: ServerSession,
        subscription: Subscription,
        channel: WebSocketChannel,
        outage: OutageRetry,
    ) -> None:
        self._session = session
        self._subscription = subscription
        self._channel = channel
        self._outage = outage
        self._credit = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._receiving = False
        self._interrupted = False

    def wake(self) -> None:
        """Note that there may be credit."""
        self._credit.set()

    def stop(self) -> None:
        """Stop receiving; deliveries that were received are still sent. Nothing is lost."""
        self._credit.set()
        if self._receiving and self._task is not None and not self._interrupted:
            self._interrupted = True
            self._task.cancel()

    async def run(self) -> None:
        """Run until the session takes no more. Raises `SubscriptionClosed` if the backend closed it."""
        self._task = asyncio.current_task()
        while self._session.state is ServerSessionState.READY:
            self._credit.clear()
            if not self._session.credit:
                await self._credit.wait()
                continue
            try:
                self._receiving = True
                received = await self._outage.retry_until_available(self._receive)
            except asyncio.CancelledError:
                # Only a cancellation by `stop` ends here; any other is passed on.
                task = asyncio.current_task()
                if not self._interrupted or task is None or task.uncancel() > 0:
                    raise
                return
            finally:
                self._receiving = False
            if received.deliveries:
                await self._deliver(received.deliveries)

    def _receive(self) -> Awaitable[Received]:
        # In an outage a receive does not wait, so that its answer shows at once that the store is available again.
        limit = min(self._session.credit, _BATCH)
        return self._subscription.receive(limit, 0 if self._outage.down else None)

    async def _deliver(self, deliveries: Sequence[Delivery]) -> None:
        unsent = {delivery.receipt: delivery for delivery in deliveries}
        try:
            if self._session.state is ServerSessionState.READY:
                for text, sent in self._session.deliver(deliveries):
                    await self._channel.send(text)
                    for delivery in sent:
                        del unsent[delivery.receipt]
        finally:
            if unsent:
                self._session.forget(unsent)
                with contextlib.suppress(
                    TaskQueueError
                ):  # closing the subscription releases them too
                    await self._subscription.redeliver(*unsent.values())
