"""A queue of outcomes, which settles their deliveries in the store in batches."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from taskqueue_core.backend import Backend, Subscription
from taskqueue_core.concurrency import gather_all
from taskqueue_core.consumer.outage import OutageRetry
from taskqueue_core.consumer.settle import Done, Settler
from taskqueue_core.limits import LIMITS
from taskqueue_core.retry import Failed, HandBack, Outcome, Rejected, RetryLater, Success
from taskqueue_core.tasks import Delivery

_MAX_BYTES = 4 * 1024 * 1024
"""total size of the unsettled results and error texts, in bytes, above which `SettlementQueue.room` waits"""


class SettlementQueue:
    """Collects the outcomes of one subscription's deliveries, and settles them in rounds.

    The first outcome is settled at once. Outcomes that are put during a round are settled together in the next round.
    After each round, ``report`` is called with a dictionary that says for each receipt whether it was still current.
    Cancelling `run` loses no task: deliveries that are not settled are released when the subscription is closed.
    """

    def __init__(
        self,
        backend: Backend,
        subscription: Subscription,
        outage: OutageRetry,
        report: Callable[[dict[str, bool]], Awaitable[None]],
        max_unsettled: int = LIMITS.credit,
        *,
        uniform: Callable[[], float] = random.random,
    ) -> None:
        self._settler = Settler(backend, subscription, outage, uniform)
        self._report = report
        self._max_unsettled = max_unsettled
        self._acks: list[Done] = []
        self._releases: list[Delivery] = []
        self._outcomes: list[tuple[Delivery, Outcome]] = []
        self._bytes = 0
        self._has_work = asyncio.Event()
        self._settled = asyncio.Event()
        self._ended = False
        self.unsettled = 0
        """number of outcomes that have been put, but not settled yet"""

    def put(self, *ended: tuple[Delivery, Outcome]) -> None:
        """Queue deliveries with their outcomes, without waiting.

        Callers can await `room` to limit the length of the queue.
        """
        for delivery, outcome in ended:
            if type(outcome) is Success:
                self._acks.append((delivery, outcome.result))
                if outcome.result is not None:
                    self._bytes += len(outcome.result)
                continue
            if type(outcome) is HandBack and not outcome.lost:
                self._releases.append(delivery)
            else:
                self._outcomes.append((delivery, outcome))
            self._bytes += _size_of(outcome)
        self.unsettled += len(ended)
        self._has_work.set()

    async def room(self) -> None:
        """Wait until the number of unsettled outcomes and their size are within limits, or `run` has ended."""
        while not self._ended and (
            self.unsettled > self._max_unsettled or self._bytes > _MAX_BYTES
        ):
            self._settled.clear()
            await self._settled.wait()

    async def finish(self, seconds: float | None = None) -> None:
        """Wait until all outcomes are settled or `run` has ended, for at most ``seconds``; ``None`` means no limit."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.unsettled and not self._ended:
                    self._settled.clear()
                    await self._settled.wait()

    async def run(self) -> None:
        """Settle queued outcomes until cancelled. Raises the exceptions of the store, except those of an outage."""
        try:
            while True:
                await self._has_work.wait()
                self._has_work.clear()
                await self._settle_queued()
        finally:
            self._ended = True
            self._settled.set()

    async def _settle_queued(self) -> None:
        calls: list[Coroutine[Any, Any, dict[str, bool]]] = []
        count, size = self.unsettled, self._bytes
        if self._acks:
            acks, self._acks = self._acks, []
            calls.append(self._settler.ack(acks))
        if self._releases:
            releases, self._releases = self._releases, []
            calls.append(self._settler.redeliver(releases))
        if self._outcomes:
            outcomes, self._outcomes = self._outcomes, []
            calls.append(self._settler.settle_outcomes(outcomes))
        results: dict[str, bool] = {}
        if len(calls) == 1:
            results = await calls[0]
        else:
            for answer in await gather_all(calls):
                results |= answer
        self.unsettled -= count
        self._bytes -= size
        self._settled.set()
        await self._report(results)


def _size_of(outcome: Outcome) -> int:
    match outcome:
        case Failed(error, traceback) | RetryLater(error=error, traceback=traceback):
            return len(error) + len(traceback or "")
        case Rejected(reason, error, traceback):
            return len(reason) + len(error or "") + len(traceback or "")
    return 0
