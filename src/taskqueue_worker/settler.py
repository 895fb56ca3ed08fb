"""From a local worker's verdicts to the store."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from taskqueue_core.consumer.settle import SettlementQueue
from taskqueue_core.retry import HandBack, Outcome, Success
from taskqueue_core.tasks import Delivery

_MAX_CONCURRENT = 100
"""verdicts that take a call each, at the same time"""
_log = logging.getLogger("taskqueue.worker")


class LocalSettler:
    """Settles at once where nothing is under way; what comes meanwhile goes together in the next round.

    Cancelling it loses nothing: what is unsettled then is handed back with the subscription.
    """

    def __init__(self, settlements: SettlementQueue, max_unsettled: int) -> None:
        """`wait_for_room` waits while there are more than ``most`` verdicts unsettled."""
        self._settlements = settlements
        self._max_unsettled = max_unsettled
        self._acks: list[tuple[Delivery, bytes | None]] = []
        self._released: list[Delivery] = []
        self._outcomes: list[tuple[Delivery, Outcome]] = []
        self._work = asyncio.Event()
        self._settled = asyncio.Event()
        self.unsettled = 0

    def put(self, delivery: Delivery, outcome: Outcome) -> None:
        """Queue a verdict."""
        if type(outcome) is Success:
            self._acks.append((delivery, outcome.result))
        elif type(outcome) is HandBack:
            self._released.append(delivery)
        else:
            self._outcomes.append((delivery, outcome))
        self.unsettled += 1
        self._work.set()

    async def wait_for_room(self) -> None:
        """Wait while too many are unsettled."""
        while self.unsettled > self._max_unsettled:
            self._settled.clear()
            await self._settled.wait()

    async def finish(self) -> None:
        """Wait until nothing is unsettled. `run` must be running."""
        while self.unsettled:
            self._settled.clear()
            await self._settled.wait()

    async def run(self) -> None:
        """Run for ever. Raises what the store answers, unless it is out of reach."""
        while True:
            await self._work.wait()
            while self._acks or self._released or self._outcomes:
                await self._settle_queued()
            self._work.clear()

    async def _settle_queued(self) -> None:
        calls: list[Coroutine[Any, Any, dict[str, bool]]] = []
        if self._acks:
            acks, self._acks = self._acks, []
            calls.append(self._settlements.ack(acks))
        if self._released:
            released, self._released = self._released, []
            calls.append(self._settlements.redeliver(released))
        outcomes = self._outcomes[:_MAX_CONCURRENT]
        del self._outcomes[:_MAX_CONCURRENT]
        calls += [self._settlements.settle_outcome(*entry) for entry in outcomes]
        answers: list[dict[str, bool] | BaseException]
        if len(calls) == 1:
            answers = [await calls[0]]
        else:
            answers = await asyncio.gather(*calls, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
            self.unsettled -= len(answer)
            late = len(answer) - sum(answer.values())
            if late:
                _log.warning(
                    "%d outcomes came too late: this worker no longer held their tasks", late
                )
        self._settled.set()
