# ruff: noqa: D102 - the contract tells what its methods promise
"""The consumer's side."""

import math
import secrets
from collections import deque
from collections.abc import Sequence
from typing import Any

from taskqueue_core.authoring import SubscriptionBase, answer, checked_limit, checked_results
from taskqueue_core.errors import SubscriptionClosed
from taskqueue_core.limits import LIMITS
from taskqueue_core.tasks import Delivery, Received, Settled
from taskqueue_sqlite.store import Consumer, Part, Store, delivery, step

_NEXT = """n = (SELECT n FROM entries WHERE state = 'waiting' AND key = :key
    AND ifnull(deadline > :now, TRUE) ORDER BY priority DESC, at, seq LIMIT 1)"""
_DELIVERY = """, receipt = :receipt, worker = :worker, owner = :owner,
    handed_out = attempt, progress = NULL"""
_CURRENT = "key = :key AND id = :id AND receipt = :receipt"


class Subscription(Part, SubscriptionBase):
    """One consumer, over queues that take turns."""

    def __init__(self, store: Store, worker: str, keys: tuple[str, ...]) -> None:
        super().__init__(store)
        self.me = Consumer(worker, keys, store.now())
        self._turns = dict.fromkeys(keys)  # the next one comes first
        store.consumers[self.me.id] = self.me
        store.names.update(keys)

    @property
    def _open(self) -> bool:
        return self.me.id in self.store.consumers

    async def receive(self, limit: int, timeout: float | None) -> Received:
        checked_limit(limit)
        if not self._open:
            raise SubscriptionClosed("the subscription was closed")
        end = math.inf if timeout is None else self.store.now() + timeout
        while self._open:
            self.me.news.clear()
            received = self._take(limit)
            if received.deliveries or received.expired or self.store.now() >= end:
                return received
            await self._sleep(min(end, self.store.recovery, received.due_at or math.inf))
        return Received()

    def _take(self, limit: int) -> Received:
        store, deliveries = self.store, list[Delivery]()
        mine = {"worker": self.me.worker, "owner": self.me.id}
        with store.step():
            store.recover()
            _, expired = store.tidy(self.me.keys)
            agenda = store.agenda(self.me.keys)
            busy = {queue["key"] for queue in agenda if queue["waiting"]}
            turns = deque(key for key in self._turns if key in busy)
            while turns and len(deliveries) < limit:
                key, receipt = turns.popleft(), secrets.token_urlsafe(16)
                for entry in store.move(
                    "'in_flight'", _NEXT, _DELIVERY, key=key, receipt=receipt, **mine
                ):
                    deliveries.append(delivery(entry))
                    turns.append(key)
                    self._turns[key] = self._turns.pop(key)  # behind the others
        due_at = min((queue["due"] for queue in agenda if queue["due"] is not None), default=None)
        return Received(
            deliveries=tuple(deliveries), again=bool(turns), due_at=due_at, expired=expired
        )

    async def _sleep(self, until: float) -> None:
        timer = self.store.clock.call_at(until, self.me.news.set) if until < math.inf else None
        try:
            await self.me.news.wait()
        finally:
            if timer is not None:
                timer.cancel()

    @step
    def ack(
        self, *deliveries: Delivery, results: Sequence[bytes | None] = ()
    ) -> tuple[Settled, ...]:
        texts = checked_results(deliveries, results)
        change = ", result = :result"
        return answer(
            self._settle("ack", held, "'done'", change, result=text)
            for held, text in zip(deliveries, texts, strict=True)
        )

    @step
    def redeliver(self, *deliveries: Delivery, lost: bool = False) -> tuple[Settled, ...]:
        state = None if lost else "'waiting'"
        return answer(self._settle("redeliver", held, state) for held in deliveries)

    @step
    def dead_letter(self, delivery: Delivery, reason: str, error: str | None = None) -> Settled:
        values = {"reason": reason[: LIMITS.text], "error": error}
        change = ", seq = next(), reason = :reason"
        return answer([self._settle("dead_letter", delivery, "'dead'", change, **values)])[0]

    def _settle(
        self, verb: str, held: Delivery, state: str | None, changes: str = "", **values: Any
    ) -> Settled:
        values |= {"key": held.task.key, "id": held.task.id, "receipt": held.receipt}
        values["mark"] = f"{verb} {held.receipt}"
        if state is None:
            moved = self.store.lose(_CURRENT, changes=", settled = :mark", **values)
        else:
            moved = self.store.move(
                state, _CURRENT, ", settled = :mark, answer = 'ok'" + changes, **values
            )
        known = "SELECT answer FROM entries WHERE key = :key AND id = :id AND settled = :mark"
        for entry in moved or self.store.run(known, **values):
            return Settled(entry["answer"])
        return Settled.LEASE_LOST

    @step
    def adopt(self, *receipts: str) -> tuple[Delivery | None, ...]:
        if not self._open:
            raise SubscriptionClosed("the subscription was closed")
        sql = "SELECT * FROM entries WHERE state = 'in_flight' AND worker = :worker"
        found = {
            e["receipt"]: e
            for e in self.store.run(sql, worker=self.me.worker)
            if e["receipt"] in receipts
        }
        for entry in found.values():
            self.store.run(
                "UPDATE entries SET owner = :owner WHERE n = :n", owner=self.me.id, n=entry["n"]
            )
        return tuple(delivery(found[text]) if text in found else None for text in receipts)

    async def revoked(self) -> tuple[str, ...]:
        while self._open and not self.me.revoked:
            self.me.news.clear()
            await self.me.news.wait()
        told, self.me.revoked = self.me.revoked, []
        return tuple(told) if self._open else ()

    async def close(self) -> None:
        if self._open:
            self.store.release(self.me)
