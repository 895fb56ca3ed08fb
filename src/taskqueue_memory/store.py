"""The transitions. Each is one synchronous method, so nothing can come between its steps: that is the atomicity.

Every method leaves the ledger balanced, and every change of state goes through `_enter`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from msgspec import structs

from taskqueue_core.authoring import refusal
from taskqueue_core.clock import Clock
from taskqueue_core.errors import LeaseLost
from taskqueue_core.limits import LIMITS, check_time
from taskqueue_core.tasks import (
    Confirmation,
    Delivery,
    Expired,
    Published,
    Settled,
    State,
    Task,
)
from taskqueue_memory.calendar import Calendar
from taskqueue_memory.journal import Journal
from taskqueue_memory.records import Consumer, QueueState, Record

__all__ = ["Store"]

_CHUNK = 1000


class Store:
    """All queues of one backend."""

    def __init__(self, clock: Clock, journal: Journal | None) -> None:
        self.clock = clock
        self.journal = journal
        self.queues: dict[str, QueueState] = {}
        self.receipts: dict[str, Record] = {}
        self._seq = itertools.count(1)
        self._calendar = Calendar(clock, self.promote)

    def queue(self, key: str) -> QueueState:
        """Return the queue of a key, made on first sight."""
        if key not in self.queues:
            self.queues[key] = QueueState(key)
        return self.queues[key]

    def leave(self, queues: Iterable[QueueState]) -> None:
        """Forget queues that nobody is subscribed to and that nobody has ever used: keys come with workers and go."""
        for queue in queues:
            if not (queue.subscribers or queue.published or queue.settings.version):
                self.queues.pop(queue.key, None)

    def find(self, key: str, task_id: str) -> Record | None:
        """Return what is known of a task."""
        queue = self.queues.get(key)
        return queue.records.get(task_id) if queue else None

    # publish

    def publish(self, task: Task) -> Confirmation:
        """Add a task, once."""
        now = self.clock.now()
        queue = self.queue(task.key)
        known = queue.records.get(task.id)
        status = known and known.recognise(task, now, queue.settings.dedupe_window)
        if status:
            return Confirmation(key=task.key, task_id=task.id, status=status)
        if queue.bounded and (refused := refusal(task, queue.settings, queue.fresh)):
            return refused
        position = queue.states[State.WAITING]
        record = self._begin(Record(queue=queue, task=task))
        if task.not_before is not None and task.not_before > now:
            self._schedule(record, task.not_before, "published")
        else:
            self._make_available(record, "published")
            self.ring(queue, 1)
        return Confirmation(
            key=task.key, task_id=task.id, status=Published.ACCEPTED, position=position
        )

    def retry(
        self, task: Task, at: float, error: str | None, token: str | None, settles: Delivery | None
    ) -> Confirmation:
        """Schedule the next attempt, once per token."""
        check_time("at", at)
        error = error and error[: LIMITS.text]
        queue = self.queue(task.key)
        record = queue.records.get(task.id) or Record(queue=queue, task=task)
        token = record.retry_token(token, settles)
        if token in record.tokens:
            return Confirmation(key=task.key, task_id=task.id, status=Published.DUPLICATE)
        if settles is not None and record.receipt != settles.receipt:
            raise LeaseLost(
                "the receipt is not current: settled before, taken back, or never issued"
            )
        worker = record.owner.consumer if record.owner else None
        self._end_receipt(record, "retry" if settles else None, revoke=settles is None)
        if not record.live and record.state is not State.DEAD:
            record = self._begin(structs.replace(record, task=task, digest=None, state=None))
        record.retry(token, error, self.clock.now())
        queue.retried += 1
        self._schedule(record, at, "retried", worker=worker, error=error)
        return Confirmation(key=task.key, task_id=task.id, status=Published.ACCEPTED)

    # deliver

    def take(
        self, subscription: Consumer, queue: QueueState, expired: list[Expired]
    ) -> Delivery | None:
        """Hand out the first waiting entry of a queue with room; up to a chunk of those past their deadline expire."""
        now = self.clock.now()
        while len(expired) < _CHUNK and (record := queue.pop()) is not None:
            task = record.task
            if task.deadline is not None and task.deadline <= now:
                expired.append(self._expire(record))
                continue
            receipt = subscription.new_receipt()
            delivery = record.hand_out(receipt, now)
            record.owner = subscription
            self.receipts[receipt] = record
            subscription.owned[receipt] = record
            queue.delivered += 1
            if queue.bucket is not None:
                queue.bucket.tokens -= 1
            self._enter(record, State.IN_FLIGHT, "delivered")
            return delivery
        return None

    # settle

    def ack(self, delivery: Delivery, result: bytes | None) -> Settled:
        """End an entry as done."""
        record = self.receipts.get(delivery.receipt)
        if record is None:
            return self._settled_before(delivery, "ack")
        record.store_result(result, self.clock.now(), record.queue.settings.result_ttl)
        self._finish(record, State.DONE, "acked", verb="ack")
        return Settled.OK

    def redeliver(self, delivery: Delivery, loser: Consumer | None) -> Settled:
        """Make an entry available again, at its old place; ``loser`` vanished with it, if it is the owner still."""
        verb = "lost" if loser else "redeliver"
        record = self.receipts.get(delivery.receipt)
        if record is None or (loser is not None and record.owner is not loser):
            return self._settled_before(delivery, verb)
        self.hand_back(record, lost=loser is not None)
        return record.last[2] if record.last else Settled.OK

    def hand_back(self, record: Record, *, lost: bool) -> None:
        """Take an in-flight entry back; one that was lost too often dies."""
        queue, verb = record.queue, "lost" if lost else "redeliver"
        queue.redelivered += 1
        queue.lost += lost
        worker = record.owner.consumer if record.owner else None
        self._end_receipt(record, verb)
        if lost and record.lose(queue.settings.max_losses, self.clock.now()):
            self._enter(record, State.DEAD, "dead_lettered", worker=worker)
            return
        self._offer(queue)
        queue.lane(record).put_back(record)
        self._enter(record, State.WAITING, "lost" if lost else "redelivered", worker=worker)
        self.ring(queue, 1)

    def dead_letter(self, delivery: Delivery, reason: str, error: str | None) -> Settled:
        """End an entry among the dead letters."""
        record = self.receipts.get(delivery.receipt)
        if record is None:
            return self._settled_before(delivery, "dead")
        error = error and error[: LIMITS.text]
        record.bury(reason, error, self.clock.now())
        self._finish(record, State.DEAD, "dead_lettered", verb="dead", error=error)
        return Settled.OK

    def adopt(self, subscription: Consumer, receipt: str) -> Delivery | None:
        """Move a live delivery to another subscription of the same worker identity."""
        record = self.receipts.get(receipt)
        if record is None or record.owner is None or record.owner.consumer != subscription.consumer:
            return None
        record.owner.owned.pop(receipt, None)
        record.owner = subscription
        subscription.owned[receipt] = record
        return record.delivery

    # operate

    def redrive(self, record: Record) -> None:
        """Make a dead entry waiting again, at the end of its lane."""
        record.redrive()
        self._make_available(record, "redriven")
        self.ring(record.queue, 1)

    def discard(self, record: Record) -> None:
        """Give a dead entry up for good."""
        self._finish(record, State.DISCARDED, "discarded")

    def cancel(self, record: Record) -> bool:
        """End a live entry as cancelled."""
        if not record.live:
            return False
        self._finish(record, State.CANCELLED, "cancelled", revoke=True)
        return True

    # time

    def promote(self) -> int:
        """Make available what has fallen due, in the order of its times."""
        promoted = 0
        for record in self._calendar.due(self.clock.now()):
            self._make_available(record, "available")
            self.ring(record.queue, 1)
            promoted += 1
        return promoted

    def expire(self) -> Iterator[Expired]:
        """End live entries that are past their deadline, a bounded number of them."""
        for record in self._calendar.past_deadline(self.clock.now(), _CHUNK):
            if record.live:
                yield self._expire(record)

    def forget(self, chunk: int = _CHUNK) -> int:
        """Drop ended records whose windows have passed, a bounded number of them."""
        now, gone = self.clock.now(), 0
        for record in tuple(self._calendar.forgettable(now, chunk)):
            if (until := record.kept_until) > now:  # the window has been widened since
                self._calendar.note_end(record, until)
            else:
                del record.queue.records[record.task.id]
                gone += 1
        return gone

    def follow(self) -> None:
        """Have the timer ring in the running event loop."""
        self._calendar.follow()

    def stop(self) -> None:
        """Forget the timer."""
        self._calendar.stop()

    # wake-ups

    def ring(self, queue: QueueState, tasks: int) -> None:
        """Wake as many waiting subscriptions as can take one of so many tasks, the one that waits longest first."""
        if queue.limited and queue.waiting:
            room = queue.room(self.clock.now())
            may_open = room.opens_at is not None  # then one must look, to set itself an alarm
            tasks = min(tasks, room.left or int(may_open))
        while tasks > 0 and queue.waiting:
            subscription = next(iter(queue.waiting))
            del queue.waiting[subscription]
            if subscription.wake():
                tasks -= 1

    # steps

    def _enter(
        self,
        record: Record,
        state: State,
        event: str,
        *,
        worker: str | None = None,
        error: str | None = None,
    ) -> None:
        queue, states = record.queue, record.queue.states
        frees = record.state is State.IN_FLIGHT
        if record.state is None:
            queue.published += 1
        else:
            states[record.state] -= 1
        states[state] += 1
        record.updated_at = self.clock.now()
        if record.state is State.DEAD:
            del queue.dead[record.task.id]
            deadline = record.task.deadline
            if deadline is not None and deadline <= record.updated_at:  # it came while it was dead
                self._calendar.note_deadline(record, deadline)
        if state is State.DEAD:
            queue.dead[record.task.id] = record
        record.state = state
        queue.fresh += record.recount()
        if frees and queue.limited and states[State.WAITING]:
            self.ring(queue, 1)
        if self.journal is not None:
            worker = worker or (record.owner.consumer if record.owner else None)
            self.journal.write(event, record, record.updated_at, worker, error)

    def _begin(self, record: Record) -> Record:
        """Put a new entry on the books; its first state follows."""
        record.queue.records[record.task.id] = record
        if record.task.deadline is not None:
            self._calendar.note_deadline(record, record.task.deadline)
        return record

    def _offer(self, queue: QueueState) -> None:
        if not queue.states[State.WAITING]:  # one that had work before is on everybody's list
            for subscription in queue.subscribers:
                subscription.ready[queue] = None

    def _make_available(self, record: Record, event: str) -> None:
        record.seq = next(self._seq)
        record.available_at = self.clock.now()
        self._offer(record.queue)
        record.queue.lane(record).append(record)
        self._enter(record, State.WAITING, event)

    def _schedule(self, record: Record, at: float, event: str, **told: str | None) -> None:
        record.seq = next(self._seq)
        self._enter(record, State.SCHEDULED, event, **told)
        self._calendar.schedule(record, at)

    def _end_receipt(self, record: Record, verb: str | None, *, revoke: bool = False) -> None:
        receipt, owner = record.receipt, record.owner
        if receipt is None:
            return
        if verb is not None:
            record.settle(verb)
        self.receipts.pop(receipt, None)
        if owner is not None:
            owner.owned.pop(receipt, None)
            if revoke:
                owner.revoke(receipt)
        record.receipt = record.owner = None

    def _finish(
        self,
        record: Record,
        state: State,
        event: str,
        *,
        verb: str | None = None,
        revoke: bool = False,
        error: str | None = None,
    ) -> None:
        worker = record.owner.consumer if record.owner else None
        self._end_receipt(record, verb, revoke=revoke)
        self._enter(record, state, event, worker=worker, error=error)
        if state is not State.DEAD:
            record.seq = next(self._seq)
            record.shed()
            self._calendar.note_end(record, record.kept_until)

    def _expire(self, record: Record) -> Expired:
        self._finish(record, State.EXPIRED, "expired", revoke=True)
        return Expired(record.task.key, record.task.id, record.attempt)

    def _settled_before(self, delivery: Delivery, verb: str) -> Settled:
        record = self.find(delivery.task.key, delivery.task.id)
        return record.settled_before(delivery.receipt, verb) if record else Settled.LEASE_LOST
