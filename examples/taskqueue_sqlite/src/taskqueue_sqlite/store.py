"""The file, what is in it, and the consumers in this process that wait for that."""

import asyncio
import itertools
import json
import os
import secrets
import sqlite3
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib.resources import files
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec

from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.clock import Clock
from taskqueue_core.errors import BackendUnavailable
from taskqueue_core.limits import LIMITS
from taskqueue_core.tasks import Delivery, Expired, Settled, State, Task

A, P, T = ParamSpec("A"), TypeVar("P", bound="Part"), TypeVar("T")
Row = sqlite3.Row

_MOVE = "UPDATE entries SET state = '{}', since = :now{} WHERE {} RETURNING *"
_AGENDA = """SELECT q.key, waiting, (SELECT min(due) FROM entries e WHERE e.key = q.key AND due NOTNULL) AS due
    FROM json_each(:keys) JOIN queues q ON q.key = value WHERE waiting + scheduled + in_flight > 0"""
_DUE = "key IN (SELECT value FROM json_each(:keys)) AND due <= :now AND ifnull(deadline <= :now, 0) = "


class Consumer:
    """An open subscription, as the store knows it."""

    def __init__(self, worker: str, keys: tuple[str, ...], since: float) -> None:
        self.id, self.worker, self.keys, self.since = secrets.token_hex(8), worker, keys, since
        self.news, self.revoked = asyncio.Event(), list[str]()


class Store:
    """Entries, found and moved. Everything but `flush` and `aclose` is done in a step, and no step awaits."""

    def __init__(self, path: Path, clock: Clock, *, flush: bool, grace: float) -> None:
        self.clock, self.now, self._path, self._full = clock, clock.now, path, flush
        self.consumers, self.names = dict[str, Consumer](), set[str]()
        self.recovery = clock.now() + grace  # when what an earlier process handed out is lost
        self._db: sqlite3.Connection | None = None
        self._disk, self._flushed, self._closed = asyncio.Lock(), 0, False
        self._seq = itertools.count(1)
        self._available, self._revoked = set[str](), list[Row]()

    @property
    def db(self) -> sqlite3.Connection:
        """The connection; the first use makes it."""
        if self._closed:
            raise BackendUnavailable("the backend is closed")
        if self._db is None:
            db = sqlite3.connect(self._path, isolation_level=None)
            db.row_factory = Row
            db.executescript((files(__package__) / "schema.sql").read_text())
            ((last,),) = db.execute("SELECT ifnull(max(seq), 0) FROM entries")
            self._db, self._seq = db, itertools.count(last + 1)
        return self._db

    @contextmanager
    def step(self) -> Iterator[None]:
        """Do all of it or nothing, and tell of it only when it is done."""
        self._available, self._revoked = set(), []
        try:
            self.db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self.db.execute("COMMIT")
            finally:
                self.db.rollback()  # what was not committed
        except sqlite3.Error as error:
            raise BackendUnavailable(f"SQLite: {error}") from error
        for consumer in self.consumers.values():
            if not self._available.isdisjoint(consumer.keys):
                consumer.news.set()
        for entry in self._revoked:
            if consumer := self.consumers.get(entry["owner"]):
                consumer.revoked.append(entry["receipt"])
                consumer.news.set()

    async def flush(self) -> None:
        """Wait until the disk has every step so far. Who comes meanwhile shares the next flush."""
        wanted = self.db.total_changes
        async with self._disk:
            if self._full and self._flushed < wanted and not self._closed:
                changes = self.db.total_changes
                try:
                    await asyncio.to_thread(_flush, f"{self._path}-wal")
                except OSError as error:
                    raise BackendUnavailable(f"the disk: {error.strerror}") from error
                self._flushed = changes

    async def aclose(self) -> None:
        """Close the file for good."""
        async with self._disk:
            self._closed = True
            if self._db is not None:
                self._db.close()

    def run(self, sql: str, **values: object) -> list[Row]:
        """Run a statement and return its rows."""
        return self.db.execute(sql, {"now": self.now(), **values}).fetchall()

    def known(self, key: str, task_id: str) -> Row | None:
        """Return what is known of a task."""
        self.forget(key, task_id)
        return next(iter(self.run("SELECT * FROM entries WHERE key = :key AND id = :id", key=key, id=task_id)), None)

    def add(self, task: Task, attempt: int = 1) -> Row:
        """Make the entry of a task that is not known; its first move puts it somewhere."""
        sql = """INSERT INTO entries (key, id, task, priority, deadline, attempt)
            VALUES (:key, :id, :task, :priority, :deadline, :attempt) RETURNING *"""
        values = msgspec.structs.asdict(task) | {"task": msgspec.msgpack.encode(task), "attempt": attempt}
        return self.run(sql, ...)[0]

    def move(self, state: State, where: str, changes: str = "", **values: object) -> list[Row]:
        """Bring entries into a state; return them, with the delivery that each has left by it."""
        moved = self.run(_MOVE.format(state, changes, where), **values)
        if state in (State.WAITING, State.SCHEDULED):
            self._available.update(entry["key"] for entry in moved)
        return moved

    def place(self, entry, state, at)

    def end(self, state: State, where: str, **values: object) -> list[Row]:
        """End entries over the heads of those who hold them."""
        ended = self.move(state, where, ", reason = state", **values)
        self._revoked += ended
        return ended

    def lose(self, entry: Row) -> Settled:
        """Take an entry back from a consumer that is gone; one that was lost too often is dead."""
        self.note(entry, "lost with its consumer")
        dead = entry["losses"] >= self.settings(entry["key"]).max_losses
        changes = ", losses = losses + 1" + ", reason = 'max_losses_exceeded'" * dead
        self.move(State.DEAD if dead else State.WAITING, "n = :n", changes, n=entry["n"])
        return Settled.DEAD if dead else Settled.OK

    def note(self, entry: Row, error: str | None) -> None:
        """Add an error to a task's history."""
        sql = "INSERT INTO failures SELECT n, attempt, :now, :error FROM entries WHERE n = :n AND :error NOTNULL"
        self.run(sql, n=entry["n"], error=error and error[: LIMITS.text])

    def settings(self, key: str) -> QueueSettings:
        """Return a queue's settings."""
        for (text,) in self.run("SELECT settings FROM queues WHERE key = :key", key=key):
            return QueueSettings.model_validate_json(text)
        return QueueSettings()

    def tidy(self, keys: Iterable[str]) -> tuple[list[Row], list[Row]]:
        """Promote and expire what has fallen due in these queues."""
        values = {"keys": json.dumps([*keys])}
        expired = self.end(State.EXPIRED, _DUE + "1", **values)
        return self.move(State.WAITING, _DUE + "0", **values), expired

    def recover(self) -> int:
        """Once their time to come back is over, take back what an earlier process's workers had, as lost."""
        if self.now() < self.recovery:
            return 0
        self.recovery = math.inf
        held = self.run("SELECT * FROM entries WHERE state = 'in_flight'")
        return sum(1 for entry in held if entry["owner"] not in self.consumers and self.lose(entry))


def _flush(path: str) -> None:
    with open(path, "rb") as log:  # noqa: PTH123
        os.fsync(log.fileno())


class Part:
    """A part of the backend: methods over the store."""

    def __init__(self, store: Store) -> None:
        self.store = store


def step(method: Callable[Concatenate[P, A], T]) -> Callable[Concatenate[P, A], Coroutine[Any, Any, T]]:
    """Make an atomic step of a method, and a coroutine that answers once the disk has it."""

    @wraps(method)
    async def call(self: P, /, *args: A.args, **kwargs: A.kwargs) -> T:
        with self.store.step():
            answer = method(self, *args, **kwargs)
        await self.store.flush()
        return answer

    return call
