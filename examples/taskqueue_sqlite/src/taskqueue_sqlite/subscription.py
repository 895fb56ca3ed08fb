"""The consumer's side."""

import asyncio
import json
import math
import secrets
from collections import deque
from collections.abc import Sequence
from typing import Any

from taskqueue_core.authoring import SubscriptionBase, answer, checked_limit, checked_results
from taskqueue_core.errors import SubscriptionClosed
from taskqueue_core.tasks import Delivery, Received, Settled

from taskqueue_sqlite.store import Part, Row, Store, cut, pick, step, task_of


class Subscription(Part, SubscriptionBase):
    """One consumer, over queues that take turns."""

    def __init__(self, store: Store, worker: str, keys: tuple[str, ...]) -> None:
        super().__init__(store)
        self.id, self.worker, self.keys = secrets.token_hex(8), worker, keys
        self.since, self.news, self.lost = store.now(), asyncio.Event(), list[str]()
        self._keys, self._turns = json.dumps(keys), dict.fromkeys(keys)  # the next one first
        store.subscriptions[self.id] = self
        store.names.update(keys)

    def _open(self) -> bool:
        return self.id in self.store.subscriptions

    async def receive(self, limit: int, timeout: float | None) -> Received:
        checked_limit(limit)
        if not self._open():
            raise SubscriptionClosed("the subscription was closed")
        end = math.inf if timeout is None else self.store.now() + timeout
        while self._open():
            self.news.clear()
            received = self._take(limit)
            if received != Received(due_at=received.due_at) or self.store.now() >= end:
                return received
            await self._sleep(min(end, self.store.recovery, received.due_at or math.inf))
        return Received()

    def _take(self, limit: int) -> Received:
        taken, store, mine = list[Row](), self.store, {"worker": self.worker, "owner": self.id}
        with store.step():
            tidied, busy = store.tidy(self._keys)
            waiting = {queue["key"] for queue in busy if queue["waiting"]}
            turns = deque(key for key in self._turns if key in waiting)
            while turns and len(taken) < limit:
                key = turns.popleft()
                if entries := store.do("take", key=key, receipt=secrets.token_urlsafe(16), **mine):
                    taken += entries
                    turns.append(key)
                    self._turns[key] = self._turns.pop(key)  # behind the others
        due_at = min((queue["due"] for queue in busy if queue["due"] is not None), default=None)
        again = bool(turns) or (due_at is not None and due_at <= store.now())
        deliveries = tuple(map(_delivery, taken))
        return Received(deliveries=deliveries, again=again, due_at=due_at, expired=tidied.expired)

    async def _sleep(self, until: float) -> None:
        timer = self.store.clock.call_at(until, self.news.set) if until < math.inf else None
        try:
            await self.news.wait()
        finally:
            if timer is not None:
                timer.cancel()

    @step
    def ack(
        self, *deliveries: Delivery, results: Sequence[bytes | None] = ()
    ) -> tuple[Settled, ...]:
        pairs = zip(deliveries, checked_results(deliveries, results), strict=True)
        return answer(self._settle("ack", delivery, result=result) for delivery, result in pairs)

    @step
    def redeliver(self, *deliveries: Delivery, lost: bool = False) -> tuple[Settled, ...]:
        verb = "lose" if lost else "redeliver"
        return answer(self._settle(verb, delivery) for delivery in deliveries)

    @step
    def dead_letter(self, delivery: Delivery, reason: str, error: str | None = None) -> Settled:
        values = {"reason": cut(reason), "error": cut(error)}
        return answer([self._settle("bury", delivery, **values)])[0]

    def _settle(self, verb: str, delivery: Delivery, **values: Any) -> Settled:
        names = {"key": delivery.task.key, "id": delivery.task.id, "receipt": delivery.receipt}
        names["mark"] = f"{verb} {delivery.receipt}"
        self.store.do(verb, **names, **values)
        for entry in self.store.do("settled", **names):
            return Settled(entry["answer"])
        return Settled.LEASE_LOST

    @step
    def adopt(self, *receipts: str) -> tuple[Delivery | None, ...]:
        if not self._open():
            raise SubscriptionClosed("the subscription was closed")
        mine = {"worker": self.worker, "owner": self.id}
        adopted = self.store.do("adopt", receipts=json.dumps(receipts), **mine)
        found = {entry["receipt"]: _delivery(entry) for entry in adopted}
        return tuple(found.get(receipt) for receipt in receipts)

    async def revoked(self) -> tuple[str, ...]:
        while self._open() and not self.lost:
            self.news.clear()
            await self.news.wait()
        told, self.lost = tuple(self.lost), []
        return told if self._open() else ()

    async def close(self) -> None:
        if self._open():
            self.store.release(self)


def _delivery(entry: Row) -> Delivery:
    return pick(Delivery, entry, task=task_of(entry), delivered_at=entry["since"])
