"""What the verbs are made of: entries found and moved, and news for those who wait for them."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import secrets
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import msgspec

from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.clock import Clock
from taskqueue_core.limits import LIMITS
from taskqueue_core.tasks import Delivery, Expired, Failure, Settled, State, Task
from taskqueue_sqlite.database import Database

ENDED = (State.DONE, State.EXPIRED, State.CANCELLED, State.DISCARDED)
_HISTORY = 20  # failures that are kept
_INSERT = "INSERT INTO entries (key, id, task, priority, deadline, attempt) VALUES (?, ?, ?, ?, ?, ?)"
_AGENDA = """SELECT q.key, waiting, (SELECT min(due) FROM entries e WHERE e.key = q.key AND due NOTNULL)
    FROM json_each(?) JOIN queues q ON q.key = value WHERE waiting + scheduled + in_flight > 0"""


class Entry(SimpleNamespace):
    """A row of ``entries``; schema.sql tells its fields."""

    @property
    def task(self) -> Task:
        """The task as it was published."""
        return msgspec.msgpack.decode(self.body, type=Task)

    @property
    def failures(self) -> tuple[Failure, ...]:
        """The last failures, oldest first."""
        return msgspec.json.decode(self.history, type=tuple[Failure, ...])

    def delivery(self) -> Delivery:
        """Return the delivery that it is in."""
        return Delivery(
            task=self.task,
            receipt=self.receipt,
            attempt=self.attempt,
            losses=self.losses,
            prior=self.prior,
            delivered_at=self.since,
        )


class Consumer:
    """An open subscription, as the store knows it."""

    def __init__(self, worker: str, keys: tuple[str, ...], since: float) -> None:
        self.id, self.worker, self.keys, self.since = secrets.token_hex(8), worker, keys, since
        self.news, self.revoked = asyncio.Event(), list[str]()


class Store(Database):
    """The entries, and the consumers that wait for them."""

    def __init__(self, path: Path, clock: Clock, *, synchronous: bool, grace: float) -> None:
        super().__init__(path, synchronous=synchronous)
        self.clock, self.now, self._grace = clock, clock.now, grace
        self.consumers, self.names = dict[str, Consumer](), set[str]()
        self.recovery = math.inf  # when the deliveries of an earlier process are taken for lost
        self.seq = itertools.count(1)
        self._available, self._revoked = set[str](), list[tuple[str, str]]()

    def opened(self, db: sqlite3.Connection) -> None:
        """Count on from where the earlier process stopped, and give its workers time to come back."""
        ((last,),) = db.execute("SELECT ifnull(max(seq), 0) FROM entries")
        self.seq, self.recovery = itertools.count(last + 1), self.now() + self._grace

    @contextmanager
    def step(self) -> Iterator[None]:
        """Do all of it or nothing, and tell of it only when it is done."""
        self._available, self._revoked = set(), []
        with super().step():
            yield
        for consumer in self.consumers.values():
            if not self._available.isdisjoint(consumer.keys):
                consumer.news.set()
        for owner, receipt in self._revoked:
            if holder := self.consumers.get(owner):
                holder.revoked.append(receipt)
                holder.news.set()

    def some(self, where: str, *values: object) -> list[Entry]:
        """Return the entries that fulfil a condition."""
        rows = self.db.execute("SELECT rowid, * FROM entries WHERE " + where, values)  # noqa: S608
        names = [column[0] for column in rows.description]
        return [Entry(**dict(zip(names, row, strict=True))) for row in rows]

    def one(self, key: str, task_id: str) -> Entry | None:
        """Return what is known of a task. What is to be forgotten by now is forgotten."""
        for entry in self.some("key = ? AND id = ?", key, task_id):
            if entry.state not in ENDED or self.now() < entry.since + self.memory(key)[entry.result is None]:
                return entry
            self.forget(entry)
        return None

    def add(self, task: Task, attempt: int = 1) -> Entry:
        """Make the entry of a task that is not known; its first move puts it somewhere."""
        body = msgspec.msgpack.encode(task)
        row = self.db.execute(_INSERT, (task.key, task.id, body, task.priority, task.deadline, attempt))
        return self.some("rowid = ?", row.lastrowid)[0]

    def forget(self, entry: Entry) -> None:
        """Drop what is known of a task; the ledger keeps its count."""
        self.db.execute("DELETE FROM entries WHERE rowid = ?", (entry.rowid,))

    def move(self, entry: Entry, state: State, *, at: float = math.inf, error: str | None = None, **changes: object) -> Settled:
        """Bring an entry into a state; the delivery that it was in is over. An error goes to its history."""
        due = min(at, math.inf if entry.deadline is None else entry.deadline)
        changes = {"state": state.value, "since": self.now(), "due": due if state.live and due < math.inf else None, 
            "receipt": None, "worker": None, "owner": None, "reason": None} | changes
        if error is not None:
            failure = Failure(attempt=entry.attempt, at=self.now(), error=error[: LIMITS.text])
            changes["history"] = msgspec.json.encode([*entry.failures, failure][-_HISTORY:])
        names = ", ".join(f"{name} = :{name}" for name in changes)
        self.db.execute(f"UPDATE entries SET {names} WHERE rowid = :rowid", changes | {"rowid": entry.rowid})  # noqa: S608
        vars(entry).update(changes)
        if state in (State.WAITING, State.SCHEDULED):
            self._available.add(entry.key)
        return Settled.OK

    def lose(self, entry: Entry) -> Settled:
        """Hand an entry back because its consumer is gone; one that is lost too often is dead."""
        losses, error = entry.losses + 1, "lost with its consumer"
        if losses <= self.settings(entry.key).max_losses:
            return self.move(entry, State.WAITING, error=error, losses=losses)
        self.move(entry, State.DEAD, error=error, losses=losses, reason="max_losses_exceeded", seq=next(self.seq))
        return Settled.DEAD

    def end(self, entry: Entry, state: State) -> Expired:
        """End an entry over the head of whoever holds it."""
        self.revoke(entry)
        self.move(entry, state, reason=state.value)
        return Expired(entry.key, entry.id, entry.attempt)

    def revoke(self, entry: Entry) -> None:
        """Have the holder of an entry told that it is theirs no more."""
        if entry.receipt is not None:
            self._revoked.append((entry.owner, entry.receipt))

    def settings(self, key: str) -> QueueSettings:
        """Return a queue's settings."""
        for (text,) in self.db.execute("SELECT settings FROM queues WHERE key = ? AND settings NOTNULL", (key,)):
            return QueueSettings.model_validate_json(text)
        return QueueSettings()

    def memory(self, key: str) -> tuple[float, float]:
        """Return how long the ended tasks of a queue are remembered, with a result and without."""
        settings = self.settings(key)
        return max(settings.dedupe_window, settings.result_ttl), settings.dedupe_window

    def agenda(self, keys: Iterable[str]) -> list[tuple[str, int, float | None]]:
        """Return those of the queues where something lives: key, number of waiting entries, next due time."""
        return self.db.execute(_AGENDA, (json.dumps([*keys]),)).fetchall()

    def tidy(self, keys: Iterable[str]) -> tuple[int, list[Expired]]:
        """Promote and expire what fell due in these queues, in the order of its times."""
        promoted, expired, now = 0, list[Expired](), self.now()
        for key in [key for key, _, due in self.agenda(keys) if due is not None and due <= now]:
            for entry in self.some("key = ? AND due <= ? ORDER BY due, seq LIMIT 1000", key, now):
                if entry.deadline is not None and entry.deadline <= now:
                    expired.append(self.end(entry, State.EXPIRED))
                else:
                    self.move(entry, State.WAITING, seq=next(self.seq))
                    promoted += 1
        return promoted, expired

    def recover(self) -> int:
        """Once their time to come back is over, take back as lost what an earlier process's workers had."""
        if self.now() < self.recovery:
            return 0
        self.recovery = math.inf
        orphans = [e for e in self.some("state = 'in_flight'") if e.owner not in self.consumers]
        return sum(1 for entry in orphans if self.lose(entry))
