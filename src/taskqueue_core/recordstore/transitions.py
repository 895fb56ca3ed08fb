"""Changes of records in a `RecordStore`: each happens inside one step, and `move` changes the state of a task."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from taskqueue_core.authoring.batches import is_batch
from taskqueue_core.authoring.helpers import LocalSubscription, QueueRoom, room_of
from taskqueue_core.authoring.waits import Change
from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.clock import Clock
from taskqueue_core.errors import BackendUnavailable, TaskQueueError
from taskqueue_core.rate_limit import bucket_after
from taskqueue_core.recordstore.event_streams import EventStreams
from taskqueue_core.recordstore.kept_tasks import KeptTasks
from taskqueue_core.recordstore.links import ASK_AFTER, Links
from taskqueue_core.recordstore.notify import ByKey, Hints, RecordRoomSignal
from taskqueue_core.recordstore.store import AFTER_ALL, Record, RecordStore
from taskqueue_core.recordstore.sweeps import Sweep
from taskqueue_core.recordstore.tags import add_tags, remove_tags
from taskqueue_core.tasks import State, Task

STEP = 500
"""number of records after which a long change continues in another step, because a step blocks the event loop"""
ALL_SCHEDULES = ""
"""name under which the signals of schedules are open; no queue has it"""
ALL_LINES = " "
"""the same for the signal of lines between partitions"""

_RELEASED = Change(State.WAITING)

T = TypeVar("T")


class Transitions:
    """Changes the records of a store. A step contains no ``await``, so a cancelled call never interrupts a step."""

    def __init__(self, store: RecordStore, clock: Clock) -> None:
        self.store = store
        self.clock = clock
        self.subscriptions = ByKey[LocalSubscription]()
        self.signals = ByKey[RecordRoomSignal]()
        self.hints = Hints()
        self.owners = itertools.count(1)
        """source of unique owner numbers, one per subscription"""
        self.opened = False
        self._ended = False
        self._place = 0
        self._touched: set[str] = set()
        self._news: set[str] = set()
        self._room: set[str] = set()
        self._sweeps: list[Sweep] = []
        self.links = Links(store, self._unblock)
        self.streams = EventStreams(store, self._notify_readers)
        self.kept = KeptTasks(store, self.drop)

    @contextmanager
    def step(self, unsure: type[TaskQueueError] = BackendUnavailable) -> Iterator[float]:
        """Run the body as one transaction and yield the current time; afterwards, notify receivers and room signals.

        ``unsure`` is the class of the exception that is raised if it is unknown whether the transaction was stored.
        """
        self.ensure_open()
        self._touched, self._news, self._room = set(), set(), set()
        try:
            if not self.opened:
                self._open()
            with self.store.transaction(unsure):
                yield self.clock.now()
        except BaseException:
            self.hints.forget(self._touched)
            raise
        finally:  # also after an error, because the transaction may have been stored
            if self.links.written:
                self.links.written = False
                self._room.add(ALL_LINES)
            self.subscriptions.notify(self._news)
            self.signals.notify(self._room)

    def ensure_open(self) -> None:
        if self._ended:
            raise BackendUnavailable("the backend is closed")

    def close(self) -> None:
        """Close the store permanently. If this raises an exception, the store stays open; try again."""
        if self.opened:
            self.store.close()
        self.opened, self._ended = False, True

    def _open(self) -> None:
        """Open the store, and release, as lost, the deliveries that an earlier process left in flight."""
        try:
            self.store.open()
            with self.store.transaction(BackendUnavailable):
                self._place = self.store.last_position()
                self.hints.forget(self.store.queues())
                for record in self.store.owned():
                    self.take_back(record, self.clock.now(), lost=True)
        except BaseException:
            with suppress(TaskQueueError):
                self.store.close()
            raise
        self.opened = True

    def find(self, key: str, task_id: str, now: float) -> Record | None:
        """Return the record of a task; ``None`` if the task is unknown or its record may be deleted."""
        record = self.store.load(key, task_id)
        return None if record is None or record.is_over(now) else record

    def first_waiting(self, key: str) -> Record | None:
        """Return the task of a queue that is delivered next: of the highest priority, the one that comes first."""
        return next(iter(self.store.listed(key, State.WAITING, "", AFTER_ALL, 1)), None)

    def move(self, record: Record, state: State, now: float) -> None:
        """Change a record's state, and update counters and hints. A delivered or released record keeps its position."""
        key, before = record.task.key, record.state
        self._touched.add(key)
        if record.state is State.IN_FLIGHT and self.store.settings(key).max_inflight:
            self._news.add(key)  # another task may now be delivered
        self._set_place(record, state, now)
        self.store.count(
            key, "published" if before is None else before.value, 1 if before is None else -1
        )
        self.store.count(key, state.value)
        record.state, record.updated_at = state, now
        if change := record.recount():
            self.store.count(key, "fresh", change)
            if change < 0:
                self._room.add(key)
        if state is not State.IN_FLIGHT:
            record.receipt = record.owner = None
        if record.stream:
            self.streams.changed(record, before, state, now)
        if record.ended:
            self._end(record, now)
        elif state is State.WAITING:
            self.hints.waiting.add(key)
            self._news.add(key)
        elif record.due is not None:
            self.hints.note_due(key, record.due)
            self._news.add(key)
        self.store.save(record)
        self.links.changed(record, before, now)

    def _set_place(self, record: Record, state: State, now: float) -> None:
        """Set the positions of a record that is about to change its state."""
        if {record.state, state} != {State.WAITING, State.IN_FLIGHT}:
            self._place += 1
            record.seq, record.available_at, record.returned = self._place, now, 0
        elif state is State.WAITING:
            record.returned = 1
        elif record.returned:
            self._place += 1
            record.returned = self._place

    def _end(self, record: Record, now: float) -> None:
        """Set until when an ended record is kept, and remove what it needs no more."""
        retained = now if record.result is None else record.result_until
        settings, streamed = self.store.settings(record.task.key), record.stream_until or now
        window = now + settings.dedupe_window
        record.needed_until = max(window, retained, record.period_end, streamed)
        record.forget_at = max(record.needed_until, now + settings.keep_ended)
        record.shed()

    def drop(self, record: Record) -> None:
        """Delete a record."""
        self.clear(record)
        self.store.drop(record)

    def clear(self, record: Record) -> None:
        """Delete what belongs to a record that the caller deletes, or replaces by another one with its id."""
        remove_tags(self.store, record)
        if record.stream:
            self.streams.leave(record)
        self.kept.removed(record)

    def index(self, record: Record) -> None:
        """Let a record be found by the tags of its task. The caller saves it."""
        if record.task.tags:
            self._place += 1
            add_tags(self.store, record, self._place)

    def begin(self, record: Record, now: float, former: Record | None) -> None:
        """Store a new record, in its first state, in place of a ``former`` one of its id. Its time is set."""
        after, change = record.task.after, None
        if former is not None:
            self.clear(former)
        self.index(record)
        self.links.batches.begin(record, now)
        if after is not None:
            change = self.links.begin(record, after, now)
        elif not is_batch(record.task):
            change = _RELEASED
        if change == _RELEASED:
            self.release(record, now)
            return
        record.ask_at = now + ASK_AFTER
        self.move(record, State.BLOCKED, now)
        if change is not None:
            self._unblock(record, change, now)

    def release(self, record: Record, now: float) -> None:
        """Make a task available, or schedule it if its time has not come."""
        self.move(record, State.SCHEDULED if record.at > now else State.WAITING, now)

    def _unblock(self, record: Record, change: Change, now: float) -> None:
        """Release a blocked task, or end it."""
        if self.swept(record, now):
            return
        record.reason = change.reason
        if change == _RELEASED:
            self.release(record, now)
        else:
            self.move(record, change.state, now)

    def schedule(self, record: Record, at: float, now: float) -> None:
        """Give a task another time. A blocked one stays blocked until it is released."""
        record.at = at
        blocked = record.state is State.BLOCKED
        self.move(record, State.BLOCKED if blocked else State.SCHEDULED, now)

    def replace(self, record: Record, task: Task, now: float, former: Record | None) -> None:
        """Give a task that was never delivered the contents and the time of another one, whose id is remembered.

        ``former`` is the record of that id.
        """
        unique, key = task.unique, task.key
        at = unique.due_at(task.not_before, now, record.published_at) if unique else None
        remove_tags(self.store, record)
        record.replace(task)
        self.index(record)
        if record.state is State.BLOCKED or (at is not None and at > now):
            self.schedule(record, at or now, now)
        elif record.state is State.SCHEDULED:
            self.move(record, State.WAITING, now)
        else:  # it keeps its place
            record.updated_at = now
            self.store.save(record)
        window = self.store.settings(key).dedupe_window
        if former is not None:
            self.clear(former)
        self._place += 1
        remembered = Record(task=task, state=State.DISCARDED, replaced=record.task.id)
        remembered.updated_at, remembered.seq = now, self._place
        remembered.needed_until = remembered.forget_at = now + window
        remembered.shed()
        self.store.save(remembered)

    def take_back(self, record: Record, now: float, *, lost: bool) -> None:
        """Release a delivery. If it was ``lost``, and its task was lost too often, the task becomes a dead letter."""
        key = record.task.key
        self.store.count(key, "redelivered")
        if lost:
            self.store.count(key, "lost")
        dies = lost and record.lose(self.store.settings(key).max_losses, now)
        self.move(record, State.DEAD if dies else State.WAITING, now)

    def configure(self, key: str, settings: QueueSettings, now: float) -> QueueSettings:
        """Replace the settings of a queue, notify its receivers and publishers, and return the new settings."""
        before = self.store.settings(key)
        changed = before.followed_by(settings)
        self.store.configure(key, changed)
        if before.keep_ended != changed.keep_ended:
            self.kept.configured(key, keeps=bool(changed.keep_ended))
        if before.rate_limit or changed.rate_limit:
            limits = before.rate_limit, changed.rate_limit
            self.store.save_bucket(key, bucket_after(self.store.bucket(key), *limits, now))
        self._news.add(key)
        self._room.add(key)
        return changed

    def remove(self, key: str) -> None:
        """Delete what the store keeps of a queue without records, and notify its publishers."""
        if self.store.settings(key).keep_ended:
            self.kept.configured(key, keeps=False)
        self.store.remove(key)
        self._touched.add(key)
        self._room.add(key)

    def notify_schedules(self) -> None:
        """Notify the signals of schedules."""
        self._room.add(ALL_SCHEDULES)

    def _notify_readers(self, record: Record) -> None:
        self._room.add(f"{record.task.key}/{record.task.id}")

    def room(self, key: str, now: float) -> QueueRoom:
        """Return how many deliveries the limits of a queue allow now."""
        settings = self.store.settings(key)
        in_flight = self.store.counters(key)["in_flight"] if settings.max_inflight else 0
        bucket = self.store.bucket(key) if settings.rate_limit else None
        return room_of(settings, bucket, in_flight, now)

    def take_token(self, key: str, now: float) -> None:
        """Count a delivery against the rate limit of its queue, if the queue has a rate limit."""
        limit = self.store.settings(key).rate_limit
        if limit and (bucket := self.store.bucket(key)):
            bucket.fill(limit, now)
            bucket.tokens -= 1
            self.store.save_bucket(key, bucket)

    def promote(self, keys: Collection[str], now: float) -> float:
        """Make due tasks available, and release, as lost, deliveries without progress: at most `STEP` records in total.

        Return the time at which the next task becomes due. If it is not after ``now``, call this method again.
        """
        room = STEP
        for key in keys:
            if room and self.hints.due(key) <= now:
                due = self.store.due(key, now, room)
                for record in due:
                    self.promote_one(record, now)
                room -= len(due)
                self.hints.nothing_due(key)
                for record in self.store.due(key, math.inf, 1):
                    self.hints.note_due(key, record.due or now)
        return min((self.hints.due(key) for key in keys), default=math.inf)

    def promote_one(self, record: Record, now: float) -> bool:
        """Make the task of a due record available. Return whether its delivery was lost."""
        hung = record.state is State.IN_FLIGHT
        if self.swept(record, now):
            pass
        elif hung:
            self.take_back(record, now, lost=True)
        else:
            self.move(record, State.WAITING, now)
        return hung

    def present(self, record: Record) -> Record | None:
        """Return a record that was read earlier in this step. If it was blocked, other changes may have changed it."""
        if record.state is not State.BLOCKED:
            return record
        return self.store.load(record.task.key, record.task.id)

    def swept(self, record: Record, now: float) -> bool:
        """Change a record that a sweep in progress has not reached yet. Return False if there is no such sweep."""
        sweep = next((sweep for sweep in self._sweeps if sweep.covers(record)), None)
        if sweep is not None:
            sweep.take(record, now)
        return sweep is not None

    async def when_promoted(
        self,
        keys: Collection[str],
        change: Callable[[float], T],
        unsure: type[TaskQueueError] = BackendUnavailable,
    ) -> T:
        """Make all due tasks of the keys available, in as many steps as necessary; in the last step, call ``change``.

        This keeps the order: tasks that became due earlier come before tasks that ``change`` makes available.
        """
        while True:
            with self.step(unsure) as now:
                if self.promote(keys, now) > now:
                    return change(now)
            await asyncio.sleep(0)

    async def sweep(
        self, key: str, states: Collection[State], change: Callable[[Record, float], None]
    ) -> int:
        """Call ``change``, in several steps, for all records in these states, oldest first, and return their number.

        Records that come into these states after the call are not included. A scheduled record that becomes due during
        the call is changed, too, instead of becoming available.
        """
        with self.step():
            sweep = Sweep(key, states, change, self._place)

        def change_page(now: float) -> int:
            page: list[Record] = []
            for state in states:
                found = self.store.in_state(key, state, STEP - len(page))
                page += [record for record in found if record.seq <= sweep.last]
            number = 0
            for read in page:
                record = self.present(read)
                if record is not None and sweep.covers(record):
                    change(record, now)
                    number += 1
            return number

        self._sweeps.append(sweep)
        try:
            while changed := await self.when_promoted([key], change_page):
                sweep.number += changed
                await asyncio.sleep(0)
        finally:
            self._sweeps.remove(sweep)
        return sweep.number
