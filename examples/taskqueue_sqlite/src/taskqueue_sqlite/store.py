"""The file, and what every verb is made of: steps, and entries that move."""

import asyncio
import itertools
import json
import math
import os
import sqlite3
from collections.abc import Callable, Coroutine, Iterator
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
_ADD = """INSERT INTO entries (key, id, body, priority, deadline, state, since, at, seq, attempt)
    VALUES (:key, :id, :body, :priority, :deadline, :state, now(), :at, next(), :attempt) RETURNING *"""
_MOVE = "UPDATE entries SET state = {}, since = now(), error = :error{} WHERE {} RETURNING *"
_DUE = """n IN (SELECT n FROM entries JOIN json_each(:keys) ON key = value
    WHERE due <= now() AND ifnull(deadline <= now(), FALSE) = {} ORDER BY due LIMIT 1000)"""
_SURVIVES = "losses < (SELECT setting(settings, 'max_losses') FROM queues WHERE key = entries.key)"


class Store:
    """All of it but `flush` and `aclose` belongs into a step. No step awaits, so no cancellation can split one."""

    def __init__(self, path: Path, clock: Clock, *, flush: bool, grace: float) -> None:
        self.clock, self.now, self._path, self._flushes = clock, clock.now, path, flush
        self.recovery = clock.now() + grace  # when what an earlier process handed out is lost
        self.consumers = dict[str, Consumer]()
        self._db: sqlite3.Connection | None = None
        self._disk, self._flushed, self._closed = asyncio.Lock(), 0, False
        self._available, self._revoked = set[str](), list[Row]()

    def _connect(self) -> sqlite3.Connection:
        if self._closed:
            raise BackendUnavailable("the backend is closed")
        if self._db is None:
            db = sqlite3.connect(self._path, isolation_level=None)
            db.create_function("now", 0, self.now)
            db.create_function("setting", 2, lambda text, name: getattr(QueueSettings.model_validate_json(text), name))
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
            db = self._connect()
            db.execute("BEGIN IMMEDIATE")
            try:
                yield
                db.execute("COMMIT")
            finally:
                db.rollback()  # what was not committed
        except sqlite3.Error as error:
            raise BackendUnavailable(f"SQLite: {error}") from error
        for consumer in self.consumers.values():
            ended = [e["receipt"] for e in self._revoked if e["owner"] == consumer.id]
            consumer.ended += ended
            if ended or not self._available.isdisjoint(consumer.keys):
                consumer.news.set()

    async def flush(self) -> None:
        """Wait until the disk has every step so far. Who comes meanwhile shares the next flush."""
        wanted = self._connect().total_changes
        async with self._disk:
            if self._flushes and self._flushed < wanted and not self._closed:
                changes = self._connect().total_changes
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

    def run(self, sql: str, **values: Any) -> list[Row]:
        """Run a statement and return its rows."""
        rows = self._connect().execute(sql, values)
        names = [column[0] for column in rows.description or ()]
        return [dict(zip(names, row, strict=True)) for row in rows]

    def known(self, key: str, task_id: str) -> Row | None:
        """Return what is known of a task."""
        rows = self.run("SELECT * FROM known WHERE key = :key AND id = :id", key=key, id=task_id)
        return rows[0] if rows else None

    def add(self, task: Task, state: str, at: float, attempt: int = 1) -> Row:
        """Make the entry of a task that is not known, or no more."""
        self._available.add(task.key)
        values = {name: getattr(task, name) for name in ("key", "id", "priority", "deadline")}
        self.run("DELETE FROM entries WHERE key = :key AND id = :id", **values)
        body = msgspec.msgpack.encode(task)
        return self.run(_ADD, **values, body=body, state=state, at=at, attempt=attempt)[0]

    def move(self, state: str, where: str, changes: str = "", **values: Any) -> list[Row]:
        """Bring entries into a state; return them, each still with the delivery that ends thereby."""
        values["error"] = values.get("error") and values["error"][: LIMITS.text]
        moved = self.run(_MOVE.format(state, changes, where), **values)
        self._available |= {e["key"] for e in moved if e["state"] in ("waiting", "scheduled")}
        return moved

    def lose(self, where: str, changes: str = "", **values: Any) -> list[Row]:
        """Take entries back from consumers that are gone; one that was lost too often is dead."""
        ...
