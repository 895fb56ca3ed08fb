"""A consumer's view over its keys."""

import itertools
import json
import secrets
from collections.abc import Sequence

from taskqueue_core.authoring import LocalSubscription, answer, checked_results
from taskqueue_core.clock import Clock
from taskqueue_core.tasks import Delivery, Expired, Received, Settled

from taskqueue_sqlite.store import Row, Store

_OURS = "key IN (SELECT value FROM json_each(?))"
_BUSY = f"SELECT key FROM counts WHERE name = 'waiting' AND n > 0 AND {_OURS}"  # noqa: S608 - constants
_NEXT = "SELECT min(due) FROM entries AS e INDEXED BY dates_of_key WHERE state = 'scheduled' AND e.key = value"
_DUE = f"SELECT min(due) FROM (SELECT ({_NEXT}) AS due FROM json_each(?))"  # noqa: S608 - constants


class SQLiteSubscription(LocalSubscription):
    """Owns its deliveries until they are settled or handed back."""

    def __init__(self, store: Store, clock: Clock, keys: tuple[str, ...], consumer: str) -> None:
        super().__init__(clock, keys, consumer)
        self._store, self._id, self._json = store, secrets.token_hex(8), json.dumps(keys)
        self._turns, self._served = itertools.count(), dict[str, int]()

    def take(self, limit: int) -> Received:
        deliveries, expired, store = list[Delivery](), list[Expired](), self._store
        with store.step():
            store.promote()
            busy = [key for (key,) in store.run(_BUSY, self._json)]
            busy.sort(key=lambda key: self._served.get(key, -1))  # whose turn was longest ago
            while busy and len(deliveries) < limit:
                key = busy.pop(0)
                delivery = store.take(key, self._id, expired)
                if delivery is not None:
                    deliveries.append(delivery)
                    busy.append(key)
                    self._served[key] = next(self._turns)
            ((due,),) = store.run(_DUE, self._json)
        return Received(deliveries=tuple(deliveries), again=bool(busy), due_at=due, expired=tuple(expired))

    def _owned(self) -> list[Row]:
        return self._store.select(f"state = 'in_flight' AND owner = ? AND {_OURS}", self._id, self._json)

    @property
    def in_flight(self) -> int:
        return len(self._owned())

    async def ack(self, *deliveries: Delivery, results: Sequence[bytes | None] = ()) -> tuple[Settled, ...]:
        with self._store.step():
            pairs = zip(deliveries, checked_results(deliveries, results), strict=True)
            return answer([self._store.ack(delivery, result) for delivery, result in pairs])

    async def redeliver(self, *deliveries: Delivery, lost: bool = False) -> tuple[Settled, ...]:
        with self._store.step():
            return answer([self._store.redeliver(delivery, self._id if lost else None) for delivery in deliveries])

    async def dead_letter(self, delivery: Delivery, reason: str, error: str | None = None) -> Settled:
        with self._store.step():
            return answer([self._store.dead_letter(delivery, reason, error)])[0]

    async def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.tell()
            with self._store.step():
                for row in self._owned():
                    self._store.hand_back(row, lost=False)
