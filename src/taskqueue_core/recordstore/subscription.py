"""The subscription of a backend on a `RecordStore`: receives and settles deliveries."""

from __future__ import annotations

import math
import secrets
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

from taskqueue_core.authoring.entries import LOST
from taskqueue_core.authoring.helpers import (
    LocalSubscription,
    answer,
    check_size,
    checked_keys,
    checked_results,
    encodable,
)
from taskqueue_core.limits import check_name
from taskqueue_core.recordstore.store import Record
from taskqueue_core.recordstore.transitions import STEP, Transitions
from taskqueue_core.tasks import Delivery, Expired, Received, Settled, State


class RecordSubscription(LocalSubscription):
    """The subscription of a `RecordBackend`. It can also turn a delivered task into a dead letter."""

    def __init__(self, transitions: Transitions, keys: Iterable[str], consumer: str) -> None:
        check_name("consumer", consumer)
        super().__init__(transitions.clock, checked_keys(keys), consumer)
        self._transitions = transitions
        self._number = next(transitions.owners)
        self._turns = deque(self.keys)
        self._unseen: set[str] = set()
        transitions.subscriptions.add(self)

    def take(self, limit: int) -> Received:
        transitions, deliveries, expired = self._transitions, list[Delivery](), list[Expired]()
        with transitions.step() as now:
            # If an earlier step failed, the store may contain deliveries that no receive has returned.
            if self._unseen:
                self._take_back(now, self._unseen)
            due_at = transitions.promote(self.keys, now)
            if due_at <= now:
                return Received(again=True)
            turns = deque(key for key in self._turns if key in transitions.hints.waiting)
            while turns and len(deliveries) < limit and len(deliveries) + len(expired) < STEP:
                record = transitions.first_waiting(turns[0])
                if record is None:
                    transitions.hints.waiting.discard(turns.popleft())
                elif record.overdue(now):
                    transitions.move(record, State.EXPIRED, now)
                    expired.append(record.expired)
                elif not (room := transitions.room(turns[0], now)).left:
                    turns.popleft()
                    due_at = min(due_at, room.opens_at or math.inf)
                else:
                    deliveries.append(self._hand_out(record, now))
                    turns.rotate(-1)
            rooms = [transitions.room(key, now) for key in turns]
        self._unseen.clear()
        due_at = min(due_at, *(room.opens_at or math.inf for room in rooms), math.inf)
        if deliveries:  # the next receive continues after the last key served
            self._turns.rotate(-1 - self._turns.index(deliveries[-1].task.key))
        return Received(
            deliveries=tuple(deliveries),
            again=any(room.left for room in rooms),
            due_at=None if due_at == math.inf else due_at,
            expired=tuple(expired),
        )

    def _hand_out(self, record: Record, now: float) -> Delivery:
        settings = self._transitions.store.settings(record.task.key)
        receipt = secrets.token_hex(16)
        delivery = record.hand_out(receipt, now, settings.timeout, self.consumer)
        self._unseen.add(delivery.receipt)
        record.owner = self._number
        record.patience = settings.max_processing_time
        self._transitions.take_token(record.task.key, now)
        self._transitions.store.count(record.task.key, "delivered")
        self._transitions.move(record, State.IN_FLIGHT, now)
        return delivery

    def _take_back(self, now: float, receipts: Collection[str] | None = None) -> None:
        for record in self._transitions.store.owned(self._number):
            if receipts is None or record.receipt in receipts:
                self._transitions.take_back(record, now, lost=False)

    @property
    def in_flight(self) -> int:
        """The number of deliveries that the subscription owns. It must be read inside a step."""
        return len(self._transitions.store.owned(self._number))

    async def ack(
        self, *deliveries: Delivery, results: Sequence[bytes | None] = ()
    ) -> tuple[Settled, ...]:
        pairs = list(zip(deliveries, checked_results(deliveries, results), strict=True))
        with self._transitions.step() as now:
            return answer(
                self._settle(delivery, "ack", partial(self._ack, result), now)
                for delivery, result in pairs
            )

    def _ack(self, result: bytes | None, record: Record, now: float) -> None:
        record.store_result(
            result, now, self._transitions.store.settings(record.task.key).result_ttl
        )
        self._transitions.move(record, State.DONE, now)

    async def redeliver(self, *deliveries: Delivery, lost: bool = False) -> tuple[Settled, ...]:
        check_size("deliveries", deliveries)
        verb, end = LOST if lost else "redeliver", partial(self._transitions.take_back, lost=lost)
        with self._transitions.step() as now:
            return answer(self._settle(delivery, verb, end, now) for delivery in deliveries)

    async def dead_letter(
        self,
        delivery: Delivery,
        reason: str,
        error: str | None = None,
        traceback: str | None = None,
    ) -> Settled:
        end = partial(self._bury, encodable(reason), encodable(error), traceback)
        with self._transitions.step() as now:
            return answer([self._settle(delivery, "dead_letter", end, now)])[0]

    def _bury(
        self, reason: str, error: str | None, traceback: str | None, record: Record, now: float
    ) -> None:
        record.bury(reason, error, now, traceback)
        self._transitions.move(record, State.DEAD, now)

    def _settle(
        self, delivery: Delivery, verb: str, end: Callable[[Record, float], None], now: float
    ) -> Settled:
        """End a delivery if its receipt is current. Otherwise return the result of a repeated or stale settlement."""
        record = self._transitions.find(delivery.task.key, delivery.task.id, now)
        if record is None:
            return Settled.LEASE_LOST
        foreign = verb == LOST and record.owner != self._number
        if record.receipt == delivery.receipt and not foreign:
            record.settle(verb)
            end(record, now)
        return record.settled_before(delivery.receipt, verb)

    async def close(self) -> None:
        """Release the deliveries and close the subscription. If this fails, the subscription stays open; try again."""
        if self._transitions.opened and not self.closed:
            with self._transitions.step() as now:
                self._take_back(now)
        self.closed = True
        self._transitions.subscriptions.remove(self)
        self.notify()
