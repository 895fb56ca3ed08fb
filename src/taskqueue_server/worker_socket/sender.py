"""Sending deliveries from the subscription to the socket, within the worker's credit."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Sequence
from functools import partial

from taskqueue_core.application.encoding import CODEC_HEADER
from taskqueue_core.backend import Backend, Subscription
from taskqueue_core.consumer.outage import OutageRetry
from taskqueue_core.consumer.settle import settle
from taskqueue_core.errors import TaskQueueError
from taskqueue_core.protocol.frames import Error, Feature, encode
from taskqueue_core.protocol.server_session import ServerSession, ServerSessionState
from taskqueue_core.retry import RetryPolicy, Snoozed, decide
from taskqueue_core.tasks import Delivery, Received
from taskqueue_server.worker_socket.websocket import WebSocketChannel

_BATCH = 100
"""maximum number of deliveries per receive: large enough to save round trips, small enough that all workers get some"""
_PUT_OFF = Snoozed(30.0)
"""the outcome of a task that needs a feature which the worker does not have"""
_TASKS = {
    Feature.INPUTS: "tasks with results of other tasks",
    Feature.CODECS: "tasks with a payload that a codec has encoded",
}
"""the tasks that need a feature of the worker, and are put off without it"""
_log = logging.getLogger("taskqueue.server.socket")


class DeliverySender:
    """Receives deliveries and sends them to one worker. It receives no more than the session has room for."""

    def __init__(
        self,
        session: ServerSession,
        subscription: Subscription,
        channel: WebSocketChannel,
        outage: OutageRetry,
        room_changed: asyncio.Event,
        *,
        backend: Backend,
    ) -> None:
        """Create a sender that looks again for room in the session when ``room_changed`` is set."""
        self._backend = backend
        self._session = session
        self._subscription = subscription
        self._channel = channel
        self._outage = outage
        self._room_changed = room_changed
        self._timeouts = Feature.TIMEOUTS in session.features
        self._lacking = [each for each in _TASKS if each not in session.features]
        self._warned: set[Feature] = set()
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
            if received.deliveries and await self._deliver_fitting(received.deliveries):
                return True
        return False

    def _receive(self) -> Awaitable[Received]:
        # During an outage, receive without waiting, so that a response shows at once that the store is available again.
        limit = min(self._session.room, _BATCH)
        return self._subscription.receive(limit, 0 if self._outage.down else None)

    async def _deliver_fitting(self, deliveries: Sequence[Delivery]) -> bool:
        """Send those deliveries that the worker can execute. Return whether one of the others has a timeout."""
        if self._timeouts and not self._lacking:
            await self._deliver(deliveries, ())
            return False
        timed, fitting = list[Delivery](), list[Delivery]()
        unfit: list[tuple[Delivery, Feature]] = []
        for delivery in deliveries:
            if not self._timeouts and delivery.timeout is not None:
                timed.append(delivery)
            elif (feature := self._missing(delivery)) is not None:
                unfit.append((delivery, feature))
            else:
                fitting.append(delivery)
        await self._deliver(fitting, timed)
        for delivery, feature in unfit:
            await self._put_off(delivery, feature)
        return bool(timed)

    def _missing(self, delivery: Delivery) -> Feature | None:
        """Return a feature that a delivery needs, and the worker does not have."""
        needed = {
            Feature.INPUTS: bool(delivery.inputs),
            Feature.CODECS: CODEC_HEADER in delivery.task.headers,
        }
        return next((feature for feature in self._lacking if needed[feature]), None)

    async def _put_off(self, delivery: Delivery, feature: Feature) -> None:
        """Leave a task to other workers, without counting an attempt, and tell the worker why, once per feature."""
        verb = decide(_PUT_OFF, delivery, RetryPolicy())
        call = partial(settle, self._backend, self._subscription, delivery, verb)
        await self._outage.retry_until_available(call)
        if feature not in self._warned:
            self._warned.add(feature)
            fields = {"worker_id": self._session.worker_id, "key": delivery.task.key}
            _log.warning("worker gets no tasks with %s: it is too old", feature.value, extra=fields)
            message = (
                f"{_TASKS[feature]} need a worker with the feature '{feature.value}', and were put off for 30 s: "
                "upgrade this worker"
            )
            await self._channel.send(encode(Error(code=feature.value, message=message)))

    async def _deliver(self, deliveries: Sequence[Delivery], withheld: Sequence[Delivery]) -> None:
        unsent = {delivery.receipt: delivery for delivery in (*withheld, *deliveries)}
        try:
            if deliveries and self._session.state is ServerSessionState.READY:
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
