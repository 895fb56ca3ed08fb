"""The file: an entry per task, counters per queue, and one step (a transaction) at a time."""

import itertools
import secrets
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.clock import Clock
from taskqueue_core.entries import Entry
from taskqueue_core.errors import BackendUnavailable, LeaseLost
from taskqueue_core.limits import check_time
from taskqueue_core.tasks import Confirmation, Delivery, Expired, Published, Settled, State, Task

_SCHEMA = """
PRAGMA locking_mode = EXCLUSIVE;
PRAGMA journal_mode = WAL;
PRAGMA synchronous = FULL;
CREATE TABLE IF NOT EXISTS entries (
    key TEXT, id TEXT, state TEXT, priority INT, seq INT, due REAL, deadline REAL, owner TEXT, data BLOB,
    PRIMARY KEY (key, id)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS lanes ON entries (key, state, priority DESC, seq);
CREATE INDEX IF NOT EXISTS dates ON entries (state, due);
CREATE INDEX IF NOT EXISTS dates_of_key ON entries (key, due) WHERE state = 'scheduled';
CREATE INDEX IF NOT EXISTS deadlines ON entries (deadline) WHERE deadline IS NOT NULL;
CREATE TABLE IF NOT EXISTS counts (key TEXT, name TEXT, n INT, PRIMARY KEY (key, name)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS settings (key TEXT PRIMARY KEY, data TEXT);
"""


class Row(Entry, kw_only=True, eq=False):
    """An entry and its place."""

    seq: int = 0
    """its place in its lane, or among the dead"""
    available_at: float = 0.0
    due: float | None = None
    """scheduled: when it is available; ended: when it may be forgotten"""
    owner: str | None = None


CHUNK = 1000
_FIRST = "key = ? AND state = 'waiting' ORDER BY priority DESC, seq LIMIT 1"
_decoder = msgspec.msgpack.Decoder(Row)


class Store:
    """Steps on the file. None awaits anything, so no cancellation can split one."""

    def __init__(self, path: Path, clock: Clock, changed: Callable[[set[str]], None]) -> None:
        """Call ``changed`` with the queues that a step has touched."""
        self.now = clock.now
        self._path, self._changed = path, changed
        self._db: sqlite3.Connection | None = None
        self._touched, self._seq = set[str](), itertools.count(1)
        self._opened = self._recovered = self._closed = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """Do all of it or nothing; it is on the disk before this ends. Raises `BackendUnavailable`."""
        self.run("BEGIN IMMEDIATE")
        try:
            if not self._recovered:  # what an earlier process had in flight is lost
                self.recover()
            yield
            self.run("COMMIT")
            self._recovered = True
        finally:
            self.db.rollback()  # what was not committed
        touched, self._touched = self._touched, set()
        self._changed(touched)

    def run(self, sql: str, *values: object) -> list[Any]:
        """Run one statement and return its rows. Raises `BackendUnavailable`."""
        try:
            return self.db.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            raise BackendUnavailable(f"the SQLite file cannot be used: {error}") from error

    @property
    def db(self) -> sqlite3.Connection:
        """The connection, made by its first use."""
        if self._closed:
            raise BackendUnavailable("the backend is closed")
        if self._db is None:
            self._db = sqlite3.connect(self._path, isolation_level=None, timeout=0.1)
        if not self._opened:  # perhaps because another process had the file
            self._db.executescript(_SCHEMA)
            (last,) = self._db.execute("SELECT ifnull(max(seq), 0) FROM entries").fetchone()
            self._seq, self._opened = itertools.count(last + 1), True
        return self._db

    def select(self, where: str, *values: object) -> list[Row]:
        """Return the entries for which a condition of this package holds."""
        sql = f"SELECT data FROM entries WHERE {where}"  # noqa: S608
        return [_decoder.decode(data) for (data,) in self.run(sql, *values)]

    def find(self, key: str, task_id: str) -> Row | None:
        """Return what is known of a task."""
        return next(iter(self.select("key = ? AND id = ?", key, task_id)), None)

    def enter(self, row: Row, state: State) -> None:
        """Change an entry's state: the only way, so that the counters always go along."""
        key, now = row.task.key, self.now()
        self.count(key, "published" if row.state is None else row.state, 1 if row.state is None else -1)
        self.count(key, state)
        returned = state is State.WAITING and row.state is State.IN_FLIGHT
        if state is not State.IN_FLIGHT and not returned:  # a returned entry keeps its place
            row.seq, row.available_at = next(self._seq), now
        row.state, row.updated_at = state, now
        if row.ended:
            settings = self.settings(key)
            row.due = now + max(settings.dedupe_window, settings.result_ttl if row.result else 0)
        elif state is not State.SCHEDULED:
            row.due = None
        self.save(row)
        self._touched.add(key)

    def save(self, row: Row) -> None:
        """Write an entry."""
        task = row.task
        deadline = task.deadline if row.state and row.state.live else None
        columns = (task.key, task.id, row.state, task.priority, row.seq, row.due, deadline, row.owner)
        insert = "INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
        self.run(insert, *columns, msgspec.msgpack.encode(row))

    def count(self, key: str, name: str, n: int = 1) -> None:
        """Add to a counter."""
        self.run("INSERT INTO counts VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET n = n + excluded.n", key, name, n)

    def counts(self, key: str) -> dict[str, int]:
        """Return a queue's counters."""
        return dict(self.run("SELECT name, n FROM counts WHERE key = ?", key))

    def settings(self, key: str) -> QueueSettings:
        """Return a queue's settings."""
        found = self.run("SELECT data FROM settings WHERE key = ?", key)
        return QueueSettings.model_validate_json(found[0][0]) if found else QueueSettings()

    def close(self) -> None:
        """Close the file."""
        self._closed = True
        if self._db is not None:
            self._db.close()

    # transitions: each runs within a step; the rules are those of Entry

    def recover(self) -> None:
        for row in self.select("state = 'in_flight'"):
            self.hand_back(row, lost=True)

    def publish(self, task: Task) -> Confirmation:
        known = self.find(task.key, task.id)
        window = self.settings(task.key).dedupe_window
        status = known.recognise(task, self.now(), window) if known else None
        if status is None:
            later = task.not_before is not None and task.not_before > self.now()
            self.enter(Row(task=task, due=task.not_before), State.SCHEDULED if later else State.WAITING)
        return _confirm(task, status or Published.ACCEPTED)

    def retry(
        self, task: Task, at: float, error: str | None, token: str | None, settles: Delivery | None
    ) -> Confirmation:
        check_time("at", at)
        row = self.find(task.key, task.id) or Row(task=task)
        token = row.retry_token(token, settles)
        if token in row.tokens:
            return _confirm(task, Published.DUPLICATE)
        if settles and row.receipt != settles.receipt:
            raise LeaseLost("the receipt is not current: settled before, taken back, or never issued")
        if settles:
            row.settle("retry")
        row.receipt = None  # ended by others, it was not settled: the settlement before stays the last one
        row.retry(token, error, self.now())
        row.state = None if row.ended else row.state  # a retry after the end is a new entry
        row.due = at
        self.count(task.key, "retried")
        self.enter(row, State.SCHEDULED)
        return _confirm(task, Published.ACCEPTED)

    def take(self, key: str, owner: str, expired: list[Expired]) -> Delivery | None:
        """Hand out the first waiting entry of a queue; what is past its deadline expires instead."""
        while rows := self.select(_FIRST, key):
            (row,) = rows
            if row.task.deadline is not None and row.task.deadline <= self.now():
                expired.append(self.expire(row))
                continue
            row.owner = owner
            delivery = row.hand_out(secrets.token_urlsafe(12), self.now())
            self.count(key, "delivered")
            self.enter(row, State.IN_FLIGHT)
            return delivery
        return None

    def ack(self, delivery: Delivery, result: bytes | None) -> Settled:
        if row := self.current(delivery, "ack"):
            row.store_result(result, self.now(), self.settings(row.task.key).result_ttl)
            self.enter(row, State.DONE)
        return self.answer(delivery, "ack")

    def redeliver(self, delivery: Delivery, loser: str | None) -> Settled:
        verb = "lost" if loser else "redeliver"
        if row := self.current(delivery, verb, loser):
            self.hand_back(row, lost=loser is not None)
        return self.answer(delivery, verb)

    def dead_letter(self, delivery: Delivery, reason: str, error: str | None) -> Settled:
        if row := self.current(delivery, "dead"):
            row.bury(reason, error, self.now())
            self.enter(row, State.DEAD)
        return self.answer(delivery, "dead")

    def current(self, delivery: Delivery, verb: str, owner: str | None = None) -> Row | None:
        """End the receipt if it is current (and the owner's), and return its entry."""
        row = self.find(delivery.task.key, delivery.task.id)
        if row is None or row.receipt != delivery.receipt or owner not in (None, row.owner):
            return None
        row.settle(verb)
        return row

    def answer(self, delivery: Delivery, verb: str) -> Settled:
        """Answer a settlement, now or when it is sent again."""
        row = self.find(delivery.task.key, delivery.task.id)
        return row.settled_before(delivery.receipt, verb) if row else Settled.LEASE_LOST

    def hand_back(self, row: Row, *, lost: bool) -> None:
        """End a delivery, and make its entry available again; one that was lost too often dies."""
        key, row.receipt, row.owner = row.task.key, None, None
        self.count(key, "redelivered")
        self.count(key, "lost", int(lost))
        dead = lost and row.lose(self.settings(key).max_losses, self.now())
        self.enter(row, State.DEAD if dead else State.WAITING)

    def end(self, row: Row, state: State) -> None:
        """End an entry by time or by an operator, whoever has it."""
        row.receipt = row.owner = None
        self.enter(row, state)

    def expire(self, row: Row) -> Expired:
        self.end(row, State.EXPIRED)
        return Expired(row.task.key, row.task.id, row.attempt)

    def promote(self) -> int:
        """Make available what has fallen due, in the order of its times."""
        due = self.select("state = 'scheduled' AND due <= ? ORDER BY due, seq LIMIT ?", self.now(), CHUNK)
        for row in due:
            self.enter(row, State.WAITING)
        return len(due)


def _confirm(task: Task, status: Published) -> Confirmation:
    return Confirmation(key=task.key, task_id=task.id, status=status)
