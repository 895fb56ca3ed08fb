"""The file: one transaction per step, one flush for all who wait for the disk, news for all who wait for tasks."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import secrets
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

from msgspec.structs import astuple

from taskqueue_core.capabilities import Maintained, QueueSettings
from taskqueue_core.clock import Clock
from taskqueue_core.errors import BackendUnavailable, TaskQueueError
from taskqueue_core.tasks import Expired, State
from taskqueue_sqlite.entry import Entry

_FIELDS = Entry.__struct_fields__
_SELECT = f"SELECT {', '.join(_FIELDS)} FROM entries WHERE "  # noqa: S608
_SAVE = f"""INSERT INTO entries VALUES ({", ".join("?" * len(_FIELDS))}) ON CONFLICT (key, id)
    DO UPDATE SET {", ".join(f"{field} = excluded.{field}" for field in _FIELDS[2:])}"""  # noqa: S608
_AGENDA = """SELECT key, waiting, (SELECT min(due) FROM entries e WHERE e.key = q.key AND due IS NOT NULL)
    FROM json_each(?) JOIN queues q ON key = value WHERE waiting + scheduled + in_flight > 0"""


class Consumer:
    """An open subscription, as the store knows it."""

    def __init__(self, worker: str, keys: tuple[str, ...], since: float) -> None:
        self.id, self.worker, self.keys, self.since = secrets.token_hex(8), worker, keys, since
        self.news, self.revoked = asyncio.Event(), list[str]()


class Store:
    """The entries, and the consumers that wait for them."""

    def __init__(self, path: Path, clock: Clock, *, synchronous: bool, grace: float) -> None:
        self.clock, self.now, self.consumers = clock, clock.now, dict[str, Consumer]()
        self.recover_at = math.inf  # when the deliveries of a process that died are given up
        self._path, self._synchronous, self._grace = path, synchronous, grace
        self._db: sqlite3.Connection | None = None
        self._closed = False
        self._seq = itertools.count(1)
        self._news, self._revoked = set[str](), list[tuple[str | None, str | None]]()
        self._disk, self._flushed = asyncio.Lock(), 0

    @contextmanager
    def step(self) -> Iterator[sqlite3.Connection]:
        """Do one atomic step, which never awaits; once it is committed, tell those who wait what it changed."""
        if self._closed:
            raise BackendUnavailable("the backend is closed")
        try:
            db = self._db = self._db or self._open()
            db.execute("BEGIN IMMEDIATE")
            yield db
            db.execute("COMMIT")
        except BaseException as error:
            self._news, self._revoked = set(), []
            if self._db is not None:
                self._db.rollback()
            if isinstance(error, sqlite3.Error):
                raise BackendUnavailable(f"SQLite: {error}") from error
            raise
        for consumer in self.consumers.values():
            if not self._news.isdisjoint(consumer.keys):
                consumer.news.set()
        for owner, receipt in self._revoked:
            if receipt is not None and owner in self.consumers:
                self.consumers[owner].revoked.append(receipt)
                self.consumers[owner].news.set()
        self._news, self._revoked = set(), []

    async def flush(self, failure: type[TaskQueueError] = BackendUnavailable) -> None:
        """Wait until the disk has all steps that were done so far; those who wait together share one flush."""
        wanted = self._db.total_changes if self._db is not None else 0
        async with self._disk:
            if self._synchronous and self._flushed < wanted and self._db is not None:
                changes = self._db.total_changes
                try:
                    await asyncio.to_thread(_flush, f"{self._path}-wal")
                except OSError as error:
                    raise failure(f"the disk did not confirm: {error.strerror}") from error
                self._flushed = changes

    async def aclose(self) -> None:
        """Close the file."""
        async with self._disk:
            self._closed = True
            if self._db is not None:
                self._db.close()
                self._db = None

    def some(self, where: str, *values: object) -> list[Entry]:
        """Return the entries that fulfil a condition."""
        return [Entry(*row) for row in self._db.execute(_SELECT + where, values)]

    def one(self, key: str, task_id: str) -> Entry | None:
        """Return what is known of a task, unless its time to be remembered is over."""
        for entry in self.some("key = ? AND id = ?", key, task_id):
            if not entry.ended or self.now() - entry.since < self.memory(entry): 
                return entry
        return None

    def save(self, entry: Entry) -> None:
        """Write an entry that came into a new state."""
        entry.since = self.now()
        entry.seq = entry.seq or next(self._seq)
        self._db.execute(_SAVE, astuple(entry))
        if entry.state in _AVAILABLE:
            self._news.add(entry.key)
