# ruff: noqa: D102 - the contract holds the promises of its methods
"""The consumer's side."""

import json
import math
from collections import deque
from collections.abc import Iterable, Sequence

from taskqueue_core.authoring import SubscriptionBase, answer, checked_limit, checked_results
from taskqueue_core.errors import SubscriptionClosed
from taskqueue_core.tasks import Delivery, Received, Settled, State
from taskqueue_sqlite.store import Consumer, Row, Store, step


class Subscription(SubscriptionBase, Part):
    """One consumer, over queues that take turns."""

    def __init__(self, store: Store, worker: str, keys: tuple[str, ...]) -> None:
        self.store, self.me = store, Consumer(worker, keys, store.now())
        self._turns = dict.fromkeys(keys)  # the next comes first
        store.consumers[self.me.id] = self.me

    async def receive(self, limit: int, timeout: float | None) -> Received:
        checked_limit(limit)
        if self.me.id not in self.store.consumers:
            raise SubscriptionClosed("the subscription was closed")
        end = math.inf if timeout is None else self.store.now() + timeout
        while self.me.id in self.store.consumers:
            self.me.news.clear()
            received = self._take(limit)
            if received.deliveries or received.expired or self.store.now() >= end:
                return received
            await self._sleep(min(end, self.store.recovery, received.due_at or math.inf))
        return Received()

    def _take(self, limit: int) -> Received:
        store, me, deliveries = self.store, self.me, list[Delivery]()
        with store.step():
            store.recover()
            _, expired = store.tidy(me.keys)
            agenda = store.agenda(me.keys)
            busy = {queue["key"] for queue in agenda if queue["waiting"]}
            turns = deque(key for key in self._turns if key in busy)
            while turns and len(deliveries) < limit:
                key = turns.popleft()
                for entry in store.move(State.IN_FLIGHT, _NEXT, _DELIVERY, key=key, worker=me.worker, owner=me.id, receipt=token_urlsafe(16)):
                    deliveries.append(delivery(entry))
                    turns.append(key)
                    self._turns[key] = self._turns.pop(key)  # behind the others
        due_at = min((queue["due"] for queue in agenda if queue["due"] is not None), default=None)
        return Received(deliveries=tuple(deliveries), again=bool(turns), due_at=due_at, expired=tuple(expired))

    async def _sleep(self, until: float) -> None:
        timer = self.store.clock.call_at(until, self.me.news.set) if until < math.inf else None
        try:
            await self.me.news.wait()
        finally:
            if timer is not None:
                timer.cancel()

    @step
    def ack(self, *deliveries: Delivery, results: Sequence[bytes | None] = ()) -> tuple[Settled, ...]:
        results = checked_results(deliveries, results)
        return answer(self._settle("ack", d, State.DONE, ", result = :result", result=r) for d, r in zip(deliveries, results))

    @step
    def redeliver(self, *deliveries: Delivery, lost: bool = False) -> tuple[Settled, ...]:
        return answer(self._lose(d) if lost else self._settle("redeliver", d, State.WAITING) for d in deliveries)

    @step
    def dead_letter(self, delivery: Delivery, reason: str, error: str | None = None) -> Settled:
        outcome = self._settle("dead_letter", delivery, State.DEAD, ", seq = next(), reason = :reason", error, reason=reason[:LIMITS.text])
        return answer((outcome,))[0]
