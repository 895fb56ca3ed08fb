"""A consumer's view: what it is handed, and what it says of it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from taskqueue_core.authoring import SubscriptionBase, answer, checked_limit, checked_results
from taskqueue_core.errors import SubscriptionClosed
from taskqueue_core.tasks import Delivery, Received, Settled, State
from taskqueue_sqlite.entry import Entry
from taskqueue_sqlite.store import Consumer, Store

_NEXT = "key = ? AND state = 'waiting' ORDER BY priority DESC, seq LIMIT 1"


class Subscription(SubscriptionBase):
    """One consumer, over queues that take turns."""

    def __init__(self, store: Store, worker: str, keys: tuple[str, ...]) -> None:
        self._store, self._me = store, Consumer(worker, keys, store.now())
        self._turns = dict.fromkeys(keys)  # in the order of their turns
        store.consumers[self._me.id] = self._me
        store.names.update(keys)

    @property
    def _closed(self) -> bool:
        return self._me.id not in self._store.consumers

    async def receive(self, limit: int, timeout: float | None) -> Received:
        """Take what is there; else sleep until there is news, something falls due, or the time is over."""
        checked_limit(limit)
        if self._closed:
            raise SubscriptionClosed("the subscription was closed")
        end = math.inf if timeout is None else self._store.now() + timeout
        while not self._closed:
            self._me.news.clear()
            received = self._take(limit)
            if received != Received(due_at=received.due_at) or self._store.now() >= end:
                return received
            await self._sleep(min(end, self._store.recovery, received.due_at or math.inf))
        return Received()

    def _take(self, limit: int) -> Received:
        store, now, deliveries = self._store, self._store.now(), list[Delivery]()
        with store.step():
            store.recover()
            _, expired = store.tidy(self._me.keys)
            agenda = store.agenda(self._me.keys)
            busy = {key for key, waiting, _ in agenda if waiting}
            turns = deque(key for key in self._turns if key in busy)
            while turns and len(deliveries) < limit:
                key = turns.popleft()
                for entry in store.some(_NEXT, key):
                    turns.append(key)
                    if entry.past(now):
                        expired.append(store.end(entry, State.EXPIRED))
                        continue
                    self._turns[key] = self._turns.pop(key)
                    entry.hand_out(self._me.worker, self._me.id)
                    store.save(entry)
                    deliveries.append(entry.delivery())
        due_at = min((due for *_, due in agenda if due is not None), default=None)
        again = bool(turns) or (due_at is not None and due_at <= now)
        return Received(
            deliveries=tuple(deliveries), again=again, due_at=due_at, expired=tuple(expired)
        )

    async def _sleep(self, until: float) -> None:
        timer = self._store.clock.call_at(until, self._me.news.set) if until < math.inf else None
        try:
            await self._me.news.wait()
        finally:
            if timer is not None:
                timer.cancel()

    async def ack(
        self, *deliveries: Delivery, results: Sequence[bytes | None] = ()
    ) -> tuple[Settled, ...]:
        """End deliveries as executed."""
        texts = checked_results(deliveries, results)
        acts = [partial(Entry.finish, result=text) for text in texts]
        return await self._settle("ack", zip(deliveries, acts, strict=True))

    async def redeliver(self, *deliveries: Delivery, lost: bool = False) -> tuple[Settled, ...]:
        """Hand deliveries back."""
        return await self._settle("redeliver", ((d, self._lose if lost else Entry.hand_back) for d in deliveries))

    def _lose(self, entry: Entry) -> Settled:
        return entry.lose(self._store.now(), self._store.settings(entry.key).max_losses)

    async def dead_letter(
        self, delivery: Delivery, reason: str, error: str | None = None
    ) -> Settled:
        """End a delivery among the dead letters."""
        def bury(entry: Entry) -> Settled:
            entry.note(error, self._store.now())
            return entry.bury(reason)
        (outcome,) = await self._settle("dead_letter", [(delivery, bury)])
        return outcome

    async def _settle(
        self, verb: str, acts: Iterable[tuple[Delivery, Callable[[Entry], Settled]]]
    ) -> tuple[Settled, ...]:
        with self._store.step():
            outcomes = [self._outcome(f"{verb} {d.receipt}", d, act) for d, act in acts]
        await self._store.flush()
        return answer(outcomes)

    def _outcome(self, mark: str, delivery: Delivery, act: Callable[[Entry], Settled]) -> Settled:
        entry = self._store.one(delivery.task.key, delivery.task.id)
        if entry is not None and entry.settled == mark:
            return Settled(entry.answer)
        if entry is None or entry.receipt != delivery.receipt:
            return Settled.LEASE_LOST
        entry.settled, entry.answer = mark, act(entry)
        self._store.save(entry)
        return Settled(entry.answer)

    async def adopt(self, *receipts: str) -> tuple[Delivery | None, ...]:
        """Take over deliveries of the same worker."""
        with self._store.step() as db:
            if self._closed:
                raise SubscriptionClosed("the subscription was closed")
            held = self._store.some("state = 'in_flight' AND worker = ?", self._me.worker)
            found = {entry.receipt: entry for entry in held if entry.receipt in receipts}
            for entry in found.values():
                db.execute("UPDATE entries SET owner = ? WHERE key = ? AND id = ?", (self._me.id, entry.key, entry.id))
        return tuple(found[text].delivery() if text in found else None for text in receipts)

    async def revoked(self) -> tuple[str, ...]:
        """Wait for receipts that ended otherwise."""
        while not self._me.revoked and not self._closed:
            self._me.news.clear()
            await self._me.news.wait()
        told, self._me.revoked = self._me.revoked, []
        return () if self._closed else tuple(told)

    async def close(self) -> None:
        """Hand everything back and end what waits."""
        if not self._closed:
            with self._store.step():
                for entry in self._store.some("state = 'in_flight' AND worker = ? AND owner = ?", self._me.worker, self._me.id):
                    entry.hand_back()
                    self._store.save(entry)
            del self._store.consumers[self._me.id]
            self._me.news.set()
