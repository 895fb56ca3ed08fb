"""Building blocks of the state changes. They keep counters, lanes, timers and wake-ups consistent."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from taskqueue_core.authoring.listings import indexed_tags
from taskqueue_core.authoring.waits import Change
from taskqueue_core.capabilities import Event, QueueSettings
from taskqueue_core.clock import Clock
from taskqueue_core.tasks import Delivery, Expired, Settled, State
from taskqueue_memory.batches import Batches
from taskqueue_memory.event_streams import MemoryEventStream
from taskqueue_memory.journal import MemoryJournal
from taskqueue_memory.links import Links
from taskqueue_memory.records import QueueState, TaskRecord
from taskqueue_memory.room_signal import RoomNotifier
from taskqueue_memory.timers import Timers


class Steps:
    """All queues of one backend. Every state change goes through `_enter`."""

    def __init__(self, clock: Clock, journal: MemoryJournal | None) -> None:
        self.clock = clock
        self.journal = journal
        self.queues: dict[str, QueueState] = {}
        self.receipts: dict[str, TaskRecord] = {}
        self.signals = RoomNotifier(clock)
        self.streaming = RoomNotifier(clock)
        """notifies the readers of a task, by its key, "/" and its id, of new events"""
        self.recovered = 0
        """number of deliveries that were taken back for lack of progress since the last `maintain`"""
        self._seq = itertools.count(1)
        self.timers = Timers(clock, self.catch_up)
        self.links = Links(self, lambda *change: self.batches.changed(*change))  # noqa: PLW0108 - it is created below
        self.batches = Batches(self, self.links)

    def queue(self, key: str) -> QueueState:
        """Return the queue of a key; create it if it does not exist."""
        queue = self.queues.get(key)
        if queue is None:
            queue = self.queues[key] = QueueState(key)
        return queue

    def known(self, key: str) -> QueueState:
        """Return the queue of a key; if it does not exist, return a new queue without storing it."""
        return self.queues.get(key) or QueueState(key)

    def leave(self, queues: Iterable[QueueState]) -> None:
        """Delete each of ``queues`` that has no subscriptions or settings, and to which no task was ever published."""
        for queue in queues:
            if not (queue.subscribers or queue.published or queue.settings.version):
                self.queues.pop(queue.key, None)

    def delete(self, queue: QueueState) -> None:
        """Delete a queue and its settings. The queue must have no subscriptions, and its tasks must have ended."""
        del self.queues[queue.key]
        if queue.settings.version:
            if self.journal is not None:
                self.journal.write_settings(queue.key, QueueSettings(), self.clock.now())
            self.signals.bind(queue.key, queue.settings.bound_to, ())
        self.signals.notify(queue.key)

    def find(self, key: str, task_id: str) -> TaskRecord | None:
        queue = self.queues.get(key)
        return queue.records.get(task_id) if queue else None

    def configure(self, key: str, settings: QueueSettings) -> QueueSettings:
        """Apply new settings to a queue. Return them with their new version number."""
        queue = self.queue(key)
        before, after = queue.settings, queue.settings.followed_by(settings)
        queue.configure(after, self.clock.now())
        if self.journal is not None:
            self.journal.write_settings(key, after, self.clock.now())
        self.signals.bind(key, before.bound_to, after.bound_to)
        self.signals.notify(key)
        self.notify(queue, queue.available)
        return after

    def catch_up(self) -> int:
        """Make due entries available and return their number. Take back deliveries that made no progress."""
        now = self.clock.now()
        if now < self.timers.next_at:
            return 0
        due, hung = self.timers.due(now)
        for record in due:
            self._make_available(record, "available")
        for record in hung:
            self.hand_back(record, lost=True, reported=False)
        self.recovered += len(hung)
        return len(due)

    def notify(self, queue: QueueState, tasks: int) -> None:
        """Wake at most ``tasks`` waiting subscriptions, and no more than limits allow, the longest-waiting first."""
        if not queue.waiting:
            return
        if queue.limited:
            room = queue.room(self.clock.now())
            # If a limit will allow a delivery later, one subscription must wake up to set a timer for that time.
            may_open = room.opens_at is not None
            tasks = min(tasks, room.left or int(may_open))
        while tasks > 0 and queue.waiting:
            subscription = next(iter(queue.waiting))
            del queue.waiting[subscription]
            if subscription.wake():
                tasks -= 1

    def hand_back(self, record: TaskRecord, *, lost: bool, reported: bool = True) -> None:
        """Take back a delivery. If it was lost too often, its task becomes a dead letter.

        ``reported``: the delivery was released or reported as lost, so record this outcome for its receipt.
        """
        queue = record.queue
        queue.redelivered += 1
        queue.lost += lost
        worker = record.owner.consumer if record.owner else None
        if reported:
            self._end_receipt(record, "lost" if lost else "redeliver")
        dies = lost and record.lose(queue.settings.max_losses, self.clock.now())
        self._end_receipt(record, None, revoke=True)
        if dies:
            self._enter(record, State.DEAD, "dead_lettered", worker=worker)
            return
        self._offer(queue)
        queue.put_back(record)
        self._enter(record, State.WAITING, "lost" if lost else "redelivered", worker=worker)
        self.notify(queue, 1)

    def _enter(
        self,
        record: TaskRecord,
        state: State,
        event: str,
        *,
        worker: str | None = None,
        error: str | None = None,
        due_at: float | None = None,
        now: float | None = None,
    ) -> None:
        """Set the state of a record, and update what depends on it. ``now``: the time, if the caller has read it."""
        queue, states, before = record.queue, record.queue.states, record.state
        if before is None:
            queue.published += 1
        else:
            states[before] -= 1
            if before is State.WAITING:
                queue.withdraw(record)
        states[state] += 1
        record.updated_at = self.clock.now() if now is None else now
        record.state = state
        if state is State.DEAD or before is State.DEAD:
            self._note_dead(record)
        change = record.recount()
        queue.fresh += change
        if queue.fair is not None:
            queue.fair.entered(record, change, record.updated_at)
        if self.journal is not None:
            self._note(record, event, worker=worker, error=error, due_at=due_at)
        if record.task.ordering_key is not None and not state.live:
            self._pass_key_on(record, record.task.ordering_key)
        if before is State.IN_FLIGHT and queue.limited and queue.available:
            self.notify(queue, 1)
        if change < 0 and self.signals.open and queue.bounded:
            self.signals.notify(queue.key)
        if record.linked or record.stream is not None or queue.changed is not None:
            self._report(record, before, state)

    def _report(self, record: TaskRecord, before: State | None, state: State) -> None:
        """Report a change to the lists, to the tasks that wait for this one, and to the readers of its events."""
        if record.queue.changed is not None:
            record.queue.changed.append(record)
        if record.linked:
            self.links.changed(record, before)
        if (stream := record.stream) is None:
            return
        kept, now = record.queue.settings.stream_ttl, record.updated_at
        if before is State.DEAD and stream.events[-1].at + kept <= now:
            record.stream = None
        elif event := stream.changed(before, state, now):
            self.keep_event(record, stream, event)

    def keep_event(self, record: TaskRecord, stream: MemoryEventStream, event: Event) -> None:
        """Keep an event that was added to the stream of a record, cut older ones, and notify the readers."""
        stream.keep(event, record.queue.settings)
        self.streaming.notify(f"{record.task.key}/{record.task.id}")

    def _note(
        self,
        record: TaskRecord,
        event: str,
        *,
        worker: str | None = None,
        error: str | None = None,
        due_at: float | None = None,
    ) -> None:
        """Write a change of a record into the journal, if there is one."""
        if self.journal is not None:
            worker = worker or (record.owner.consumer if record.owner else None)
            self.journal.write(
                event, record, record.updated_at, worker=worker, error=error, due_at=due_at
            )

    def _take_out(self, record: TaskRecord) -> None:
        """Take a task that was never delivered out of its state. The caller then sets another one with `_enter`."""
        queue, before = record.queue, record.state
        if before is None:
            return
        if before is State.WAITING:
            queue.withdraw(record)
        queue.states[before] -= 1
        queue.published -= 1  # `_enter` adds it again
        change, record.state = -int(record.counted), None
        queue.fresh += change
        if queue.fair is not None:
            queue.fair.entered(record, change, self.clock.now())
        record.counted, record.usage = False, None

    def _remember(self, record: TaskRecord, now: float) -> None:
        """Keep a record of the id of a publish that replaced the contents of another task, as of an ended task."""
        record.state, record.updated_at = State.DISCARDED, now
        if (former := record.queue.records.get(record.task.id)) is not None:
            record.queue.clear(former)
        record.queue.records[record.task.id] = record
        record.shed()
        self.timers.ends.add(record.needed_until, record, record.seq)

    def _note_dead(self, record: TaskRecord) -> None:
        if record.state is State.DEAD:
            record.seq = next(self._seq)
            record.queue.dead[record.task.id] = record
            return
        del record.queue.dead[record.task.id]
        deadline = record.task.deadline
        if (
            deadline is not None and deadline <= record.updated_at
        ):  # the deadline passed while the task was dead
            self.timers.deadlines.add(deadline, record, record.seq)

    def _begin(self, record: TaskRecord) -> TaskRecord:
        """Store a new record. The caller then sets its first state with `_enter`."""
        queue, task = record.queue, record.task
        former = queue.records.setdefault(task.id, record)
        if former is not record:
            queue.clear(former)
            queue.records[task.id] = record
        if task.tags:
            self._index(record)
        if task.batch is not None:
            self.batches.begin(record)
        if queue.fair is not None:
            queue.fair.attach(record)
        if task.deadline is not None:
            self.timers.deadlines.add(task.deadline, record, record.seq)
        return record

    def _index(self, record: TaskRecord) -> None:
        """Let a record be found by those of its tags that the queue indexes."""
        queue = record.queue
        tags = indexed_tags(queue.settings.index, record.task.tags)
        queue.tags.add(record, tags, next(self._seq))

    def _offer(self, queue: QueueState) -> None:
        if not queue.available:  # otherwise all subscribers already have the queue in ``ready``
            for subscription in queue.subscribers:
                subscription.ready[queue] = None

    def _make_available(self, record: TaskRecord, event: str, now: float | None = None) -> None:
        """Put an entry into its lane and wake a subscription, or let the entry wait for its ordering key."""
        record.seq = next(self._seq)
        queue, key = record.queue, record.task.ordering_key
        if key is not None:
            queue.turns.comes(record, key)
        if record.held:
            self._enter(record, State.WAITING, event, now=now)
        else:
            if not queue.available:  # asked here too, because most publishes then save a call
                self._offer(queue)
            queue.append(record)
            self._enter(record, State.WAITING, event, now=now)
            if queue.waiting:
                self.notify(queue, 1)
        record.available_at = record.updated_at

    def _pass_key_on(self, record: TaskRecord, key: str) -> None:
        """Release an ordering key, and put the next entry that waits for it into its lane."""
        queue = record.queue
        following = queue.turns.goes(record, key)
        if following is not None:
            self._offer(queue)
            queue.let_in(following, record.updated_at)
            if queue.changed is not None:
                queue.changed.append(following)
            self.notify(queue, 1)

    def _schedule(
        self,
        record: TaskRecord,
        at: float,
        event: str,
        *,
        worker: str | None = None,
        error: str | None = None,
        released: bool = False,
    ) -> None:
        """Set the time at which an entry becomes available. A blocked entry stays blocked unless ``released``."""
        if record.state is State.BLOCKED and not released:
            self._block(record, at, event, worker=worker, error=error)
            return
        record.seq = next(self._seq)
        record.at = at
        self._enter(record, State.SCHEDULED, event, worker=worker, error=error, due_at=at)
        self.timers.schedule(record, at)

    def _block(
        self,
        record: TaskRecord,
        at: float | None,
        event: str,
        *,
        worker: str | None = None,
        error: str | None = None,
    ) -> None:
        record.seq = next(self._seq)
        record.at = at or 0.0
        self._enter(record, State.BLOCKED, event, worker=worker, error=error, due_at=at)

    def unblock(self, record: TaskRecord, change: Change) -> None:
        """Release a blocked entry, or end it."""
        record.reason = change.reason
        if change.state is State.CANCELLED:
            self._finish(record, State.CANCELLED, "cancelled")
        elif change.state is State.DONE:
            self._finish(record, State.DONE, "released")
        elif change.state is State.DEAD:
            self._enter(record, State.DEAD, "dead_lettered")
        elif record.at > self.clock.now():
            self._schedule(record, record.at, "released", released=True)
        else:
            self._make_available(record, "released")

    def _watch(self, record: TaskRecord) -> None:
        """Restart the timeout after which a delivery without progress is taken back, or end it if there is no limit."""
        patience = record.queue.settings.max_processing_time
        record.watch = 0 if patience is None else next(self._seq)
        if patience is not None:
            self.timers.watch(record, self.clock.now() + patience)

    def _end_receipt(self, record: TaskRecord, verb: str | None, *, revoke: bool = False) -> None:
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
        record.watch = 0

    def _finish(
        self,
        record: TaskRecord,
        state: State,
        event: str,
        *,
        verb: str | None = None,
        revoke: bool = False,
        error: str | None = None,
        now: float | None = None,
    ) -> None:
        worker = record.owner.consumer if record.owner else None
        self._end_receipt(record, verb, revoke=revoke)
        self._enter(record, state, event, worker=worker, error=error, now=now)
        if state is not State.DEAD:
            record.seq = next(self._seq)
            record.shed()
            self.timers.ends.add(record.needed_until, record, record.seq)

    def _expire(self, record: TaskRecord) -> Expired:
        self._finish(record, State.EXPIRED, "expired", revoke=True)
        return Expired(record.task.key, record.task.id, record.attempt)

    def _settled_before(self, delivery: Delivery, verb: str) -> Settled:
        record = self.find(delivery.task.key, delivery.task.id)
        return record.settled_before(delivery.receipt, verb) if record else Settled.LEASE_LOST
