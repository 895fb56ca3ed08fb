"""The file, and steps on it. What can be done in a step stands in verbs.sql."""

import asyncio
import itertools
import json
import math
import os
import re
import sqlite3
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, ParamSpec, TypeVar

import msgspec
from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict
from taskqueue_core.capabilities import Maintained, QueueSettings
from taskqueue_core.clock import Clock
from taskqueue_core.errors import BackendUnavailable, TaskQueueError
from taskqueue_core.limits import LIMITS
from taskqueue_core.tasks import Expired, Task

if TYPE_CHECKING:
    from taskqueue_sqlite.subscription import Subscription

A = ParamSpec("A")
P = TypeVar("P", bound="Part")
T = TypeVar("T")
Row = dict[str, Any]
_SCHEMA, _VERBS = ((files(__package__) / f"{name}.sql").read_text() for name in ("schema", "verbs"))
_SQL = dict(re.findall(r"-- (\w+): .*\n([^;]+);", _VERBS))


class SqliteSettings(BaseSettings):
    """Settings, from the environment (``TASKQUEUE_SQLITE_…``) or a ``.env`` file."""

    model_config = SettingsConfigDict(
        env_prefix="TASKQUEUE_SQLITE_", env_file=".env", extra="ignore"
    )
    path: Path = Path("taskqueue.db")
    flush: bool = True
    """whether answers wait for the disk; if not, a power cut may take the last ones back"""
    grace: float = Field(10.0, ge=0, le=3600, allow_inf_nan=False)
    """seconds that workers have after a crash of this process to come back for what they run"""


class Store:
    """Entries in a file. No step awaits anything, so that no cancellation can split one."""

    def __init__(self, settings: SqliteSettings, clock: Clock) -> None:
        self.clock, self.now, self._settings = clock, clock.now, settings
        self.subscriptions, self.names = dict[str, "Subscription"](), set[str]()
        self.recovery = self._grace_ends = clock.now() + settings.grace
        self._db: sqlite3.Connection | None = None
        self._log, self._disk, self._flushed, self._closed = "", asyncio.Lock(), 0, False
        self._changed = list[Row]()

    @property
    def db(self) -> sqlite3.Connection:
        """The connection, made by its first use."""
        if self._closed:
            raise BackendUnavailable("the backend is closed")
        if self._db is None:
            path = self._settings.path.resolve()
            db = sqlite3.connect(path, timeout=1, isolation_level=None)
            try:
                db.create_function("now", 0, self.now)
                db.create_function("setting", 2, _setting)
                db.executescript(_SCHEMA)
                ((last,),) = db.execute("SELECT ifnull(max(seq), 0) FROM entries")
                db.create_function("next", 0, itertools.count(last + 1).__next__)
            except BaseException:
                db.close()
                raise
            self._db, self._log = db, f"{path}-wal"
        return self._db

    @contextmanager
    def step(self) -> Iterator[None]:
        """Do all of it or nothing, and tell of it only when it is done."""
        self._changed = []
        try:
            db = self.db
            db.execute("BEGIN IMMEDIATE")
            try:
                yield
                db.execute("COMMIT")
            finally:
                if db.in_transaction:
                    db.rollback()
                    self.recovery = self._grace_ends  # it may have been in that step
        except sqlite3.Error as error:
            raise BackendUnavailable(f"SQLite: {error}") from error
        available = {e["key"] for e in self._changed if e["state"] in ("waiting", "scheduled")}
        revoked = [(e["owner"], e["receipt"]) for e in self._changed if e.get("revoked")]
        for subscription in self.subscriptions.values():
            lost = [receipt for owner, receipt in revoked if owner == subscription.id]
            subscription.lost += lost
            if lost or not available.isdisjoint(subscription.keys):
                subscription.news.set()

    def do(self, verb: str, **values: Any) -> list[Row]:
        """Do one of the verbs; return the entries that it changed, or what it found."""
        rows = self.db.execute(_SQL[verb], values)
        names = [column[0] for column in rows.description or ()]
        found = [dict(zip(names, row, strict=True)) for row in rows]
        if "state" in names and not _SQL[verb].startswith("SELECT"):
            self._changed += found
        return found

    def tidy(self, keys: str) -> tuple[Maintained, list[Row]]:
        """Do what it is time for in the queues that JSON names; return also those where there is something."""
        recovered, promoted, expired = list[Row](), list[Row](), list[Row]()
        if self.now() >= self.recovery:
            self.recovery = math.inf
            recovered = self.do("recover", open=json.dumps([*self.subscriptions]))
        busy = self.do("busy", keys=keys)
        if any((queue["due"] or math.inf) <= self.now() for queue in busy):
            expired, promoted = self.do("expire", keys=keys), self.do("promote", keys=keys)
            busy = self.do("busy", keys=keys)
        ended = tuple(Expired(entry["key"], entry["id"], entry["attempt"]) for entry in expired)
        numbers = {"promoted": len(promoted), "recovered": len(recovered)}
        return Maintained(expired=ended, **numbers), busy

    def release(self, *subscriptions: "Subscription") -> None:
        """Hand back what subscriptions hold, and let them go."""
        if subscriptions:
            with self.step():
                self.do("release", owners=json.dumps([each.id for each in subscriptions]))
        for subscription in subscriptions:
            del self.subscriptions[subscription.id]
            subscription.news.set()

    async def flush(self) -> None:
        """Wait until the disk has every step so far. Who comes meanwhile shares the next flush."""
        wanted = self.db.total_changes
        async with self._disk:
            if self._settings.flush and self._flushed < wanted and not self._closed:
                changes = self.db.total_changes
                await asyncio.to_thread(_flush, self._log)
                self._flushed = changes

    async def aclose(self) -> None:
        """Close the file for good."""
        async with self._disk:
            self._closed = True
            if self._db is not None:
                self._db.close()


class Part:
    """A part of the backend, over the store."""

    unsure: ClassVar[type[TaskQueueError]] = BackendUnavailable
    """says that a step was done, but perhaps is not on the disk"""

    def __init__(self, store: Store) -> None:
        self.store = store


def step(
    method: Callable[Concatenate[P, A], T],
) -> Callable[Concatenate[P, A], Coroutine[Any, Any, T]]:
    """Make a method one atomic step, and a coroutine that answers once the disk has it."""

    @wraps(method)
    async def call(self: P, /, *args: A.args, **kwargs: A.kwargs) -> T:
        with self.store.step():
            answer = method(self, *args, **kwargs)
        try:
            await self.store.flush()
        except OSError as error:
            raise self.unsure(f"the disk did not confirm: {error.strerror}") from error
        return answer

    return call


def pick(kind: type[T], row: Row, **given: Any) -> T:
    """Make a thing of the contract, of the columns that are called like its fields and what is given."""
    names: tuple[str, ...] = kind.__struct_fields__  # type: ignore[attr-defined]
    return kind(**{name: row[name] for name in names if name in row} | given)


def task_of(entry: Row) -> Task:
    """Return the task of an entry, as it was published."""
    return msgspec.msgpack.decode(entry["body"], type=Task)


def cut(text: str | None) -> str | None:
    """Return a text as it can be stored."""
    return text and text[: LIMITS.text].encode(errors="replace").decode()


def _setting(settings: str, name: str) -> float:
    return float(getattr(QueueSettings.model_validate_json(settings), name))


def _flush(path: str) -> None:
    with open(path, "rb") as log:  # noqa: PTH123
        os.fsync(log.fileno())
