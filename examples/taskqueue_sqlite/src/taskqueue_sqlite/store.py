"""The file, what is in it, and the consumers in this process that wait for that."""

import asyncio
import itertools
import json
import math
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
from taskqueue_core.tasks import Expired, Task

A, P, T = ParamSpec("A"), TypeVar("P", bound="Part"), TypeVar("T")
Row = dict[str, Any]
ENDED = ("done", "expired", "cancelled", "discarded")
_ADD = """INSERT INTO entries (key, id, body, priority, deadline, state, since, at, seq, attempt)
    VALUES (:key, :id, :body, :priority, :deadline, :state, :now, :at, next(), :attempt) RETURNING *"""
_MOVE = "UPDATE entries SET state = {}, since = :now, error = :error{} WHERE {} RETURNING *"
_DUE = """n IN (SELECT n FROM entries JOIN json_each(:keys) ON key = value
    WHERE due <= :now AND ifnull(deadline <= :now, FALSE) = {} ORDER BY due LIMIT 1000)"""
_LOST = """, losses = losses + 1, answer = iif(losses < :max, 'ok', 'dead'),
    reason = 'max_losses_exceeded', seq = iif(losses < :max, seq, next())"""


class Store:
    """Entries, found and moved. All of it but `flush` and `aclose` belongs into a step, and no step awaits."""

    def __init__(self, path: Path, clock: Clock, *, flush: bool, grace: float) -> None:
        self.clock, self.now, self._path, self._flushes = clock, clock.now, path, flush
        self.consumers, self.names = dict[str, Consumer](), set[str]()
        self.recovery = clock.now() + grace  # when what an earlier process handed out is lost
        self._db: sqlite3.Connection | None = None
        self._disk, self._flushed, self._closed = asyncio.Lock(), 0, False
        self._available, self._revoked = set[str](), list[Row]()

    @property
    def db(self) -> sqlite3.Connection:
        """The connection; its first use makes it."""
        if self._closed:
            raise BackendUnavailable("the backend is closed")
        if self._db is None:
            db = sqlite3.connect(self._path, isolation_level=None)
            db.executescript((files(__package__) / "schema.sql").read_text())
            ((last,),) = db.execute("SELECT ifnull(max(seq), 0) FROM entries")
            db.create_function("next", 0, itertools.count(last + 1).__next__)
            self._db = db
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
        for entry in self._revoked:
            if holder := self.consumers.get(entry["owner"]):
                holder.ended.append(entry["receipt"])
                holder.news.set()
        for consumer in self.consumers.values():
            if not self._available.isdisjoint(consumer.keys):
                consumer.news.set()

    async def flush(self) -> None:
        """Wait until the disk has every step so far. Who comes meanwhile shares the next flush."""
        wanted = self.db.total_changes
        async with self._disk:
            if self._flushes and self._flushed < wanted and not self._closed:
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
        rows = self.db.execute(sql, {"now": self.now(), **values})
        names = [column[0] for column in rows.description or ()]
        return [dict(zip(names, row, strict=True)) for row in rows]

    def known(self, key: str, task_id: str, *, dedupe: bool = False) -> Row | None:
        """Return what is known of a task; what is to be forgotten by now is."""
        find = "SELECT * FROM entries WHERE key = :key AND id = :id"
        for entry in self.run(find, key=key, id=task_id):
            keeps, keeps_result = self.windows(key)
            keep = keeps if dedupe or entry["result"] is None else keeps_result
            if entry["state"] not in ENDED or self.now() < entry["since"] + keep:
                return entry
            self.run("DELETE FROM entries WHERE n = :n", n=entry["n"])
        return None

    def add(self, task: Task, state: str, at: float, attempt: int = 1) -> Row:
        """Make the entry of a task that is not known."""
        self._available.add(task.key)
        values = {name: getattr(task, name) for name in ("key", "id", "priority", "deadline")}
        values |= {"state": state, "at": at, "attempt": attempt}
        return self.run(_ADD, body=msgspec.msgpack.encode(task), **values)[0]

    def move(self, state: str, where: str, changes: str = "", **values: Any) -> list[Row]:
        """Bring entries into a state; return them, each still with the delivery that ends thereby."""
        values["error"] = (values.get("error") or "")[: LIMITS.text] or None
        moved = self.run(_MOVE.format(state, changes, where), **values)
        self._available |= {e["key"] for e in moved if e["state"] in ("waiting", "scheduled")}
        return moved

    def lose(self, where: str, changes: str = "", *, key: str, **values: Any) -> list[Row]:
        """Take entries back from a consumer that is gone; those that were lost too often are dead."""
        values |= {"max": self.settings(key).max_losses, "error": "lost with its consumer"}
        state = "iif(losses < :max, 'waiting', 'dead')"
        return self.move(state, where, _LOST + changes, key=key, **values)

    def end(self, state: str, where: str, **values: object) -> tuple[Expired, ...]:
        """End entries over the heads of those who hold them."""
        ended = self.move(f"'{state}'", where, f", reason = '{state}'", **values)
        self.revoke(ended)
        return tuple(pick(Expired, entry, task_id=entry["id"]) for entry in ended)

    def revoke(self, entries: Iterable[Row]) -> None:
        """Tell those who hold entries that they are theirs no more."""
        self._revoked += entries

    def settings(self, key: str) -> QueueSettings:
        """Return a queue's settings."""
        for queue in self.run("SELECT settings FROM queues WHERE key = :key", key=key):
            return QueueSettings.model_validate_json(queue["settings"])
        return QueueSettings()

    def windows(self, key: str) -> tuple[float, float]:
        """Return how long a queue remembers ended tasks without a result, and with one."""
        settings = self.settings(key)
        return settings.dedupe_window, max(settings.dedupe_window, settings.result_ttl)

    def busy(self, keys: Iterable[str]) -> list[Row]:
        """Return those of the queues where something lives."""
        find = "SELECT busy.* FROM json_each(:keys) JOIN busy ON key = value"
        return self.run(find, keys=json.dumps([*keys]))

    def tidy(self, keys: Iterable[str]) -> tuple[int, tuple[Expired, ...]]:
        """Expire and promote what has fallen due in these queues."""
        busy, now = self.busy(keys), self.now()
        due = json.dumps([q["key"] for q in busy if q["due"] is not None and q["due"] <= now])
        expired = self.end("expired", _DUE.format("TRUE"), keys=due)
        return len(self.move("'waiting'", _DUE.format("FALSE"), keys=due)), expired

    def recover(self) -> int:
        """When the workers of an earlier process have had their time to come back, take back what they held."""
        if self.now() < self.recovery:
            return 0
        self.recovery = math.inf
        held = self.run("SELECT n, key, owner FROM entries WHERE state = 'in_flight'")
        orphans = [entry for entry in held if entry["owner"] not in self.consumers]
        return sum(len(self.lose("n = :n", **entry)) for entry in orphans)

    def release(self, *consumers: "Consumer") -> None:
        """Hand back what consumers hold, and let them go."""
        if consumers:
            with self.step():
                ids = json.dumps([consumer.id for consumer in consumers])
                held = "state = 'in_flight' AND owner IN (SELECT value FROM json_each(:ids))"
                self.move("'waiting'", held, ids=ids)
        for consumer in consumers:
            del self.consumers[consumer.id]
            consumer.news.set()


class Part:
    """A part of the backend, over the store."""

    def __init__(self, store: Store) -> None:
        self.store = store


class Consumer(Part):
    """An open subscription, as the store knows it."""

    def __init__(self, store: Store, worker: str, keys: tuple[str, ...]) -> None:
        super().__init__(store)
        self.id, self.worker, self.keys = secrets.token_hex(8), worker, keys
        self.since, self.news, self.ended = store.now(), asyncio.Event(), list[str]()
        store.consumers[self.id] = self
        store.names.update(keys)


def step(
    method: Callable[Concatenate[P, A], T],
) -> Callable[Concatenate[P, A], Coroutine[Any, Any, T]]:
    """Make a method one atomic step, and a coroutine that answers once the disk has it."""

    @wraps(method)
    async def call(self: P, /, *args: A.args, **kwargs: A.kwargs) -> T:
        with self.store.step():
            answer = method(self, *args, **kwargs)
        await self.store.flush()
        return answer

    return call


def pick(kind: type[T], row: Row, **given: object) -> T:
    """Make a thing of the contract from the columns that are called like its fields, and others."""
    fields = msgspec.structs.fields(kind)
    return kind(**{field.name: row[field.name] for field in fields if field.name in row} | given)


def task_of(entry: Row) -> Task:
    """Return the task of an entry, as it was published."""
    return msgspec.msgpack.decode(entry["body"], type=Task)


def _flush(path: str) -> None:
    with open(path, "rb") as log:  # noqa: PTH123
        os.fsync(log.fileno())
