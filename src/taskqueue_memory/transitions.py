"""The state changes of tasks. Each is one synchronous method, so it is atomic, and it keeps the ledger balanced."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice

from msgspec import structs

from taskqueue_core.authoring.batches import is_batch
from taskqueue_core.authoring.entries import held_by, meet
from taskqueue_core.authoring.helpers import refusal
from taskqueue_core.authoring.waits import refused_with_parents
from taskqueue_core.capabilities import EventKind
from taskqueue_core.errors import LeaseLost
from taskqueue_core.limits import LIMITS, check_time
from taskqueue_core.tasks import (
    Confirmation,
    Delivery,
    Expired,
    Published,
    Refusal,
    Settled,
    State,
    Task,
)
from taskqueue_memory.records import Consumer, QueueState, TaskRecord
from taskqueue_memory.steps import Steps

_CHUNK = 1000
_PREFERRED = (Published.ACCEPTED, Published.REPLACED, Published.DUPLICATE, Published.REFUSED)
"""the answers of the queues of a fan-out; the first of them is the answer to the publish"""


class MemoryStore(Steps):
    """All queues of one backend, with a method for each state change."""

    def publish(self, task: Task) -> Confirmation:
        """Store a task in its queue, or in the queues to which its queue is bound, unless it is known or refused."""
        now = self.clock.now()
        queue = self.queue(task.key)
        if queue.settings.bound_to:
            return self._fan_out(task, queue, now)
        found = self._look_up(task, queue, now)
        if found is None:  # asked first, because `isinstance` of a struct takes long if it is false
            return self._store(task, queue, now)
        return self._answer(found, task, now)

    def _answer(self, found: Confirmation | TaskRecord, task: Task, now: float) -> Confirmation:
        """Return the answer to a publish that stores no new task; replace the contents of the record, if it is one."""
        if isinstance(found, Confirmation):
            return found
        self._replace(found, task, now)
        return held_by(task, Published.REPLACED, found.task.id)

    def _look_up(
        self, task: Task, queue: QueueState, now: float
    ) -> Confirmation | TaskRecord | None:
        """Return the answer to a publish that changes nothing, the record to replace, or ``None`` for a new task."""
        known = queue.records.get(task.id)
        if known is not None:
            status = known.recognise(task, now, queue.settings.dedupe_window)
            if status is Published.REPLACED and known.replaced is not None:
                return held_by(task, status, known.replaced)
            if status is not None:
                return Confirmation(key=task.key, task_id=task.id, status=status)
        if task.batch is not None and (late := self.batches.refused(task)):
            return late
        if task.unique is not None:
            found = meet(task, queue.unique.holders(task.unique.key, now), now)
            if found is not None:
                return found
        if queue.bounded:
            of_tenant = 0 if queue.fair is None else queue.fair.fresh(task.tenant)
            return refusal(task, queue.settings, queue.fresh, of_tenant)
        return None

    def _store(self, task: Task, queue: QueueState, now: float) -> Confirmation:
        """Store a new task."""
        position = queue.states[State.WAITING]
        record, at = self._begin(TaskRecord(queue=queue, task=task)), task.not_before
        record.published_at = now
        if task.unique is not None:
            queue.unique.add(record)
            at = task.unique.due_at(at, now, now)
        if task.after is not None or (task.batch is not None and is_batch(task)):
            self._publish_child(record, at)
        elif at is not None and at > now:
            self._schedule(record, at, "published")
        else:
            self._make_available(record, "published", now)
        return Confirmation(
            key=task.key, task_id=task.id, status=Published.ACCEPTED, position=position
        )

    def _publish_child(self, record: TaskRecord, at: float | None) -> None:
        """Set the first state of a task that waits for others."""
        change = None if record.task.after is None else self.links.begin(record)
        if change is None or change.state is not State.WAITING:
            self._block(record, at, "published")
            if change is not None:
                self.unblock(record, change)
        elif at is not None and at > self.clock.now():
            self._schedule(record, at, "published")
        else:
            self._make_available(record, "published")

    def _fan_out(self, task: Task, queue: QueueState, now: float) -> Confirmation:
        """Store a copy of a task in all queues to which its queue is bound; in none if one of them cannot accept it."""
        copies = {key: structs.replace(task, key=key) for key in queue.settings.bound_to}
        self.forget(2 * len(copies))
        found = {key: self._look_up(copy, self.queue(key), now) for key, copy in copies.items()}
        answers = {
            answer.status: answer
            for answer in found.values()
            if isinstance(answer, Confirmation) and answer.code is not Refusal.NOT_UNIQUE
        }
        if conflict := answers.get(Published.CONFLICT):
            return structs.replace(conflict, key=task.key)
        refused = answers.get(Published.REFUSED)
        stores = refused is not None or None in found.values()
        if stores and (too_many := refused_with_parents(task, len(copies))):
            self.leave(self.queue(key) for key in copies)
            return too_many
        if refused is None and None in found.values():
            refused = refusal(task, queue.settings, 0)
        if refused is not None:
            self.leave(self.queue(key) for key in copies)
            reason = f"queue {refused.key!r}: {refused.reason}"
            return structs.replace(refused, key=task.key, reason=reason)
        # With a unique key, each queue decides for itself.
        given = [
            self._store(copies[key], self.queue(key), now)
            if answer is None
            else self._answer(answer, copies[key], now)
            for key, answer in found.items()
        ]
        best = min(given, key=lambda answer: _PREFERRED.index(answer.status))
        return structs.replace(best, key=task.key, position=None)

    def _replace(self, record: TaskRecord, task: Task, now: float) -> None:
        """Give a task that was never delivered the contents and the time of another one, whose id is remembered."""
        queue, before = record.queue, record.task
        queue.tags.remove(record)
        at = task.not_before
        if task.unique is not None:
            at = task.unique.due_at(at, now, record.published_at)
        at = at if at is not None and at > now else None
        lane = (task.priority, task.tenant, task.ordering_key)
        keeps_place = at is None and record.state is State.WAITING
        if keeps_place and lane == (before.priority, before.tenant, before.ordering_key):
            record.replace(task)
            record.updated_at = now
            self._note(record, "replaced")
        else:
            blocked = record.state is State.BLOCKED
            self._take_out(record)
            record.replace(task)
            if queue.fair is not None:
                queue.fair.attach(record)
            if blocked:
                self._block(record, at, "replaced")
            elif at is None:
                self._make_available(record, "replaced")
            else:
                self._schedule(record, at, "replaced")
            if before.ordering_key is not None and (
                at is not None or task.ordering_key != before.ordering_key
            ):
                self._pass_key_on(record, before.ordering_key)
        if task.deadline is not None:
            self.timers.deadlines.add(task.deadline, record, record.seq)
        self._index(record)
        self._remember(TaskRecord(queue=queue, task=task, replaced=record.task.id), now)

    def retry(
        self,
        task: Task,
        at: float,
        error: str | None,
        token: str | None,
        settles: Delivery | None,
        *,
        traceback: str | None,
        free: bool,
    ) -> Confirmation:
        """Schedule the next attempt of a task. A second call with the same token has no effect."""
        check_time("at", at)
        error, now = error and error[: LIMITS.text], self.clock.now()
        queue = self.queue(task.key)
        record = queue.records.get(task.id) or TaskRecord(queue=queue, task=task)
        token = record.retry_token(token, settles)
        if token in record.tokens:
            return Confirmation(key=task.key, task_id=task.id, status=Published.DUPLICATE)
        if settles is not None and record.receipt != settles.receipt:
            raise LeaseLost("the receipt is not current: already settled, revoked, or never issued")
        worker = record.owner.consumer if record.owner else None
        self._end_receipt(record, "retry" if settles else None, revoke=settles is None)
        was_live = record.live
        if not was_live and record.state is not State.DEAD:
            record = self._begin(
                structs.replace(
                    record,
                    task=task,
                    digest=None,
                    replaced=None,
                    published_at=now,
                    state=None,
                    wait=None,
                    notes=None,
                    stream=None,
                )
            )
        if not was_live:
            queue.unique.add(record)
        record.retry(token, error, now, traceback, free=free)
        queue.retried += 1
        self._schedule(record, at, "retried", worker=worker, error=error)
        return Confirmation(key=task.key, task_id=task.id, status=Published.ACCEPTED)

    def take(
        self,
        subscription: Consumer,
        queue: QueueState,
        now: float,
        expired: list[Expired],
    ) -> Delivery | None:
        """Deliver and return the next entry of a queue, or None. Add entries past their deadline to ``expired``."""
        while len(expired) < _CHUNK and (record := queue.pop()) is not None:
            task = record.task
            if task.deadline is not None and task.deadline <= now:
                expired.append(self._expire(record))
                continue
            if record.returned:
                record.returned = next(self._seq)
            receipt, settings = subscription.new_receipt(), queue.settings
            delivery = record.hand_out(receipt, now, settings.timeout, subscription.consumer)
            record.owner = subscription
            self.receipts[receipt] = record
            subscription.owned[receipt] = record
            if settings.max_processing_time is not None:
                self._watch(record)
            queue.handed_out(record, now)
            self._enter(record, State.IN_FLIGHT, "delivered", now=now)
            return delivery
        return None

    def ack(self, delivery: Delivery, result: bytes | None) -> Settled:
        """End a delivery as executed, and store the result."""
        record = self.receipts.get(delivery.receipt)
        if record is None:
            return self._settled_before(delivery, "ack")
        now = self.clock.now()
        record.store_result(result, now, record.queue.settings.result_ttl)
        self._finish(record, State.DONE, "acked", verb="ack", now=now)
        return Settled.OK

    def redeliver(self, delivery: Delivery, loser: Consumer | None) -> Settled:
        """Make a delivered entry available again, at its old position.

        With a ``loser``, count the delivery as lost, but only if ``loser`` still owns it.
        """
        verb = "lost" if loser else "redeliver"
        record = self.receipts.get(delivery.receipt)
        if record is None or (loser is not None and record.owner is not loser):
            return self._settled_before(delivery, verb)
        self.hand_back(record, lost=loser is not None)
        return record.last[2] if record.last else Settled.OK

    def dead_letter(
        self, delivery: Delivery, reason: str, error: str | None, traceback: str | None
    ) -> Settled:
        """End a delivery, and make its task a dead letter."""
        record = self.receipts.get(delivery.receipt)
        if record is None:
            return self._settled_before(delivery, "dead")
        error = error and error[: LIMITS.text]
        record.bury(reason, error, self.clock.now(), traceback)
        self._finish(record, State.DEAD, "dead_lettered", verb="dead", error=error)
        return Settled.OK

    def adopt(
        self, subscription: Consumer, receipt: str, allowed: Callable[[str], bool]
    ) -> Delivery | None:
        """Move a delivery to another subscription of the same consumer; return None if that is not possible."""
        record = self.receipts.get(receipt)
        if record is None or record.owner is None or record.owner.consumer != subscription.consumer:
            return None
        if not allowed(record.task.key):
            return None
        record.owner.owned.pop(receipt, None)
        record.owner = subscription
        subscription.owned[receipt] = record
        return record.delivery

    def progress(self, receipt: str, value: float | str) -> bool:
        """Store the progress of a delivery and restart its timeout. Return False if the receipt is not current."""
        record = self.receipts.get(receipt)
        if record is None:
            return False
        record.progress, record.updated_at = value, self.clock.now()
        self._watch(record)
        if record.stream is not None:
            event = record.stream.note(EventKind.PROGRESS, value, record.updated_at)
            self.keep_event(record, record.stream, event)
        return True

    def redrive(self, record: TaskRecord) -> None:
        """Make a dead letter available again, at the end of its lane."""
        record.redrive()
        record.queue.unique.add(record)
        self._make_available(record, "redriven")

    def discard(self, record: TaskRecord) -> None:
        """End a dead letter permanently."""
        self._finish(record, State.DISCARDED, "discarded")

    def cancel(self, record: TaskRecord) -> bool:
        """End an entry as cancelled. Return False if it is not live."""
        if not record.live:
            return False
        self._finish(record, State.CANCELLED, "cancelled", revoke=True)
        return True

    def erase(self, record: TaskRecord) -> None:
        """End an entry if it has not ended, and delete its record."""
        if not self.cancel(record) and record.state is State.DEAD:
            self.discard(record)
        self._remove(record)

    def reschedule(self, record: TaskRecord, at: float) -> bool:
        """Give an entry another time. Return False if it is not live, or its attempt was delivered."""
        if not record.movable:
            return False
        self._schedule(record, at, "rescheduled")
        if record.task.ordering_key is not None and not record.handed_out:
            # An entry that was delivered keeps its ordering key until it ends.
            self._pass_key_on(record, record.task.ordering_key)
        return True

    def expire(self) -> Iterator[Expired]:
        """End and yield up to `_CHUNK` live entries that are past their deadline."""
        for record in self.timers.deadlines.take(self.clock.now(), _CHUNK):
            deadline = record.task.deadline  # other contents may have another deadline
            if record.live and deadline is not None and deadline <= self.clock.now():
                yield self._expire(record)

    def forget(self, chunk: int = _CHUNK) -> int:
        """Delete up to ``chunk`` ended records that need not be kept any longer. Return how many were deleted."""
        now, gone, ends = self.clock.now(), 0, self.timers.ends
        if now < ends.first:
            return 0
        for record in tuple(ends.take(now, chunk)):
            if (until := record.needed_until) > now:  # new settings have extended the window
                ends.add(until, record, record.seq)
            elif (until := record.kept_until) > now and record.state is not None:
                record.queue.kept[record.state][record], record.stream = None, None
                ends.add(until, record, record.seq)
            else:
                self._remove(record)
                gone += 1
        return gone

    def trim(self) -> int:
        """Delete ended records that are more than the settings keep, up to `_CHUNK` per queue; return their number."""
        surplus = [
            record
            for queue in self.queues.values()
            if queue.settings.keep_ended
            for record in islice(queue.surplus(), _CHUNK)
        ]
        for record in surplus:
            self._remove(record)
        return len(surplus)

    def _remove(self, record: TaskRecord) -> None:
        del record.queue.records[record.task.id]
        record.queue.clear(record)

    def forget_tenants(self) -> float:
        """Delete the counters of tenants without tasks, up to `_CHUNK` per queue. Return when to call this again."""
        now, queues = self.clock.now(), self.queues.values()
        fair = (queue.fair for queue in queues if queue.fair is not None)
        return min((turns.forget(now, _CHUNK) for turns in fair), default=math.inf)

    def remove_idle(self) -> int:
        """Delete the queues without settings that have been empty for their `queue_ttl`. Return their number."""
        now, gone = self.clock.now(), list[QueueState]()
        for queue in self.queues.values():
            if queue.records or queue.subscribers or queue.settings.version:
                queue.empty = None
            elif queue.empty is None or queue.empty[0] != queue.published:
                queue.empty = queue.published, now
            elif queue.empty[1] + queue.settings.queue_ttl <= now:
                gone.append(queue)
        for queue in gone:
            self.delete(queue)
        return len(gone)
