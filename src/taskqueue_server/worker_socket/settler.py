"""From the worker's verdicts to the store. What has queued up is settled in one call per verb."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from taskqueue_core.backend import Subscription
from taskqueue_core.consumer.outage import OutageRetry
from taskqueue_core.consumer.settle import SettlementQueue
from taskqueue_core.protocol.server_events import (
    AckRequested,
    DeadLetterRequested,
    ReleaseRequested,
    RetryRequested,
    Settlement,
)
from taskqueue_core.protocol.server_session import ServerSession
from taskqueue_core.retry import Failed, Outcome, Rejected, RetryLater
from taskqueue_server.context.server import ServerContext
from taskqueue_server.worker_socket.websocket import ConnectionClosed, WebSocketChannel

_BACKLOG = 4 * 1024 * 1024
"""bytes of unsettled results above which no more frames are read"""


class SocketSettler:
    """Settles in the order of arrival, repeats what the store did not answer, and reports each outcome once."""

    def __init__(
        self,
        context: ServerContext,
        subscription: Subscription,
        *,
        session: ServerSession,
        channel: WebSocketChannel,
        store: OutageRetry,
        settled: Callable[[], None],
    ) -> None:
        """``settled`` is called after each report."""
        self._session = session
        self._channel = channel
        self._settlements = SettlementQueue(context.backend, subscription, store)
        self._settled = settled
        self._queue: list[Settlement] = []
        self._bytes = 0
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def put(self, settlement: Settlement) -> None:
        """Queue a settlement. The queue is bounded by what the session holds, and `room` bounds its bytes."""
        self._queue.append(settlement)
        self._bytes += _size(settlement)
        self._idle.clear()
        self._work.set()

    async def room(self) -> None:
        """Wait while too much is queued."""
        if self._bytes > _BACKLOG:
            await self._idle.wait()

    async def finish(self, seconds: float) -> bool:
        """Wait until everything queued is settled, for so long at the most. `run` must be running."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), seconds)
        return self._idle.is_set()

    async def run(self) -> None:
        """Run for ever. A socket that is gone does not stop it."""
        try:
            while True:
                await self._work.wait()
                await self._round()
        finally:
            self._idle.set()

    async def _round(self) -> None:
        self._work.clear()
        batch, self._queue = self._queue, []
        outcomes = await self._settle(batch)
        self._bytes -= sum(map(_size, batch))
        texts = self._session.settled(outcomes)
        if not self._queue:
            self._idle.set()
        if texts:
            with contextlib.suppress(ConnectionClosed):
                await self._channel.send(*texts)
        self._settled()

    async def _settle(self, batch: Sequence[Settlement]) -> dict[str, bool]:
        outcomes: dict[str, bool] = {}
        acks = [s for s in batch if isinstance(s, AckRequested)]
        done = [pair for s in acks for pair in zip(s.deliveries, s.results, strict=True)]
        outcomes |= await self._settlements.ack(done)
        back = [d for s in batch if isinstance(s, ReleaseRequested) for d in s.deliveries]
        outcomes |= await self._settlements.redeliver(back)
        for settlement in batch:
            if isinstance(settlement, RetryRequested | DeadLetterRequested):
                delivery = settlement.delivery
                outcomes |= await self._settlements.settle_outcome(delivery, _outcome(settlement))
        return outcomes


def _outcome(settlement: RetryRequested | DeadLetterRequested) -> Outcome:
    if isinstance(settlement, DeadLetterRequested):
        return Rejected(settlement.reason, settlement.error)
    if settlement.delay is None:
        return Failed(settlement.error)
    return RetryLater(settlement.delay, settlement.error)


def _size(settlement: Settlement) -> int:
    if isinstance(settlement, AckRequested):
        return sum(len(result) for result in settlement.results if result)
    return 0
