"""All moves of records in any store: each inside one step, each change of state by `move`."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TypeVar

from taskqueue_core.authoring.helpers import QueueRoom, room_of
from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.clock import Clock
from taskqueue_core.errors import BackendUnavailable, TaskQueueError
from taskqueue_core.rate_limit import bucket_after
from taskqueue_core.recordstore.notify import Hints, OpenSubscriptions, RecordRoomNotifier
from taskqueue_core.recordstore.store import Record, RecordStore
from taskqueue_core.tasks import State

__all__ = ["STEP", "Transitions"]

STEP = 500
"""how many records a step changes at the most where others can follow: the event loop waits for each"""

T = TypeVar("T")


class Transitions:
    """The records of a store. Nothing awaits inside a step, so a cancelled call has done each of its steps or not."""

    def __init__(self, store: RecordStore, clock: Clock) -> None:
        """Start closed: the first step opens the store."""
        self.store = store
        self.clock = clock
        self.subscriptions = OpenSubscriptions()
        self.signals = RecordRoomNotifier()
        self.hints = Hints()
        self.owners = itertools.count(1)
        """source of unique owner numbers, one per subscription"""
        self.opened = False
        self._ended = False
        self._place = 0
        self._touched: set[str] = set()
        self._news: set[str] = set()
        self._room: set[str] = set()

    # steps

    @contextmanager
    def step(self, unsure: type[TaskQueueError] = BackendUnavailable) -> Iterator[float]:
        """Do the whole body or nothing, then wake the receivers that wait for its result. Yield the time."""
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
        finally:  # after an error too: what is not certain may have been done
            for key in self._news:
                for subscription in self.subscriptions.of(key):
                    subscription.notify()
            self.signals.notify(self._room)

    def ensure_open(self) -> None:
        """Raise `BackendUnavailable` after the end."""
        if self._ended:
            raise BackendUnavailable("the backend is closed")

    def close(self) -> None:
        """Let go of the store, for good. If that fails, call it again."""
        if self.opened:
            self.store.close()
        self.opened, self._ended = False, True

    def _open(self) -> None:
        """Open the store, and take back as lost what the process before had in flight."""
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

    # moves, inside a step

    def find(self, key: str, task_id: str, now: float) -> Record | None:
        """Return the record of a task, unless it is unknown or has outlived its time."""
        record = self.store.load(key, task_id)
        return None if record is None or (record.ended and record.forget_at <= now) else record

    def move(self, record: Record, state: State, now: float) -> None:
        """Bring a record into a state, and the counters with it. A delivery and a release keep its place."""
        key = record.task.key
        self._touched.add(key)
        if record.state is State.IN_FLIGHT and self.store.settings(key).max_inflight:
            self._news.add(key)  # a place came free
        if {record.state, state} != {State.WAITING, State.IN_FLIGHT}:
            self._place += 1
            record.seq, record.available_at = self._place, now
        if record.state is None:
            self.store.count(key, "published")
        else:
            self.store.count(key, record.state.value, -1)
        self.store.count(key, state.value)
        record.state, record.updated_at = state, now
        if change := record.recount():
            self.store.count(key, "fresh", change)
            if change < 0:
                self._room.add(key)
        if state is not State.IN_FLIGHT:
            record.receipt = record.owner = None
        if record.ended:
            retained = now if record.result is None else record.result_until
            record.forget_at = max(now + self.store.settings(key).dedupe_window, retained)
        elif state is State.WAITING:
            self.hints.waiting.add(key)
            self._news.add(key)
        elif record.due is not None:
            self.hints.note_due(key, record.due)
            self._news.add(key)
        self.store.save(record)

    def take_back(self, record: Record, now: float, *, lost: bool) -> None:
        """Put a delivery back into its lane, or among the dead if it was lost once too often."""
        key = record.task.key
        self.store.count(key, "redelivered")
        if lost:
            self.store.count(key, "lost")
        dies = lost and record.lose(self.store.settings(key).max_losses, now)
        self.move(record, State.DEAD if dies else State.WAITING, now)

    def configure(self, key: str, settings: QueueSettings, now: float) -> QueueSettings:
        """Apply settings, and wake the receivers that they let through. Return them with their version."""
        before = self.store.settings(key)
        changed = before.followed_by(settings)
        self.store.configure(key, changed)
        if before.rate_limit or changed.rate_limit:
            limits = before.rate_limit, changed.rate_limit
            self.store.save_bucket(key, bucket_after(self.store.bucket(key), *limits, now))
        self._news.add(key)
        self._room.add(key)
        return changed

    def room(self, key: str, now: float) -> QueueRoom:
        """Return what the limits of a queue leave to be delivered."""
        settings = self.store.settings(key)
        in_flight = self.store.counters(key)["in_flight"] if settings.max_inflight else 0
        bucket = self.store.bucket(key) if settings.rate_limit else None
        return room_of(settings, bucket, in_flight, now)

    def take_token(self, key: str, now: float) -> None:
        """Count a delivery, if the settings have a rate."""
        limit = self.store.settings(key).rate_limit
        if limit and (bucket := self.store.bucket(key)):
            bucket.fill(limit, now)
            bucket.tokens -= 1
            self.store.save_bucket(key, bucket)

    def promote(self, keys: Collection[str], now: float) -> float:
        """Make wait what is due, or count it as lost, as much as a step may.

        Return when more is due; not after ``now``: go on.
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
        """Make a due one wait. Return whether it was in flight, for too long without progress."""
        hung = record.state is State.IN_FLIGHT
        if hung:
            self.take_back(record, now, lost=True)
        else:
            self.move(record, State.WAITING, now)
        return hung

    # as many steps as it takes

    async def when_promoted(
        self,
        keys: Collection[str],
        change: Callable[[float], T],
        unsure: type[TaskQueueError] = BackendUnavailable,
    ) -> T:
        """Call ``change`` in a step in which nothing of the keys is due any more: what fell due before comes first."""
        while True:
            with self.step(unsure) as now:
                if self.promote(keys, now) > now:
                    return change(now)
            await asyncio.sleep(0)

    async def sweep(
        self, key: str, states: Collection[State], change: Callable[[Record, float], None]
    ) -> int:
        """Change as many records as the states have now, the oldest first; return how many were found."""
        with self.step():
            counters = self.store.counters(key)
        result = remaining = sum(counters[state] for state in states)
        while remaining and (
            changed := await self.when_promoted(
                [key], partial(self._page, key, states, change, min(remaining, STEP))
            )
        ):
            remaining -= changed
            await asyncio.sleep(0)
        return result - remaining

    def _page(
        self,
        key: str,
        states: Collection[State],
        change: Callable[[Record, float], None],
        limit: int,
        now: float,
    ) -> int:
        page: list[Record] = []
        for state in states:
            page += self.store.in_state(key, state, limit - len(page))
        for record in page:
            change(record, now)
        return len(page)
