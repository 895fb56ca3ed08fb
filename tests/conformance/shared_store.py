"""A record store in one SQLite file that several processes share, with switches for mistakes."""

# ruff: noqa: D102 - the docstrings are those of RecordStore
from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.errors import BackendUnavailable, TaskQueueError
from taskqueue_core.rate_limit import Bucket
from taskqueue_core.recordstore import Record, RecordStore, ScheduleRecord
from taskqueue_core.recordstore.store import AFTER_ALL
from taskqueue_core.tasks import State

_SCHEMA = """
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS records (
    key TEXT, id TEXT, state TEXT, place TEXT, seq INTEGER, due REAL, alarm REAL, owner INTEGER, unique_key TEXT,
    record BLOB,
    PRIMARY KEY (key, id)
);
CREATE INDEX IF NOT EXISTS lists ON records (key, state, place);
CREATE INDEX IF NOT EXISTS states ON records (key, state, seq);
CREATE INDEX IF NOT EXISTS dues ON records (key, due, seq) WHERE due IS NOT NULL;
CREATE INDEX IF NOT EXISTS alarms ON records (alarm, seq) WHERE alarm IS NOT NULL;
CREATE INDEX IF NOT EXISTS owners ON records (owner) WHERE owner IS NOT NULL;
CREATE INDEX IF NOT EXISTS sharing ON records (key, unique_key, seq) WHERE unique_key IS NOT NULL;
CREATE INDEX IF NOT EXISTS places ON records (seq);
CREATE TABLE IF NOT EXISTS counters (key TEXT, name TEXT, value INTEGER, PRIMARY KEY (key, name));
CREATE TABLE IF NOT EXISTS settings (key TEXT PRIMARY KEY, value TEXT);
CREATE TABLE IF NOT EXISTS buckets (key TEXT PRIMARY KEY, tokens REAL, at REAL);
CREATE TABLE IF NOT EXISTS schedules (name TEXT, key TEXT, due REAL, record BLOB, PRIMARY KEY (name, key));
CREATE TABLE IF NOT EXISTS links (name TEXT PRIMARY KEY, value BLOB);
CREATE TABLE IF NOT EXISTS lives (owner INTEGER PRIMARY KEY, consumer TEXT, keys BLOB, since REAL, silent_at REAL);
COMMIT;
"""


class Life(NamedTuple):
    """The sign of life of one open subscription."""

    owner: int
    consumer: str
    keys: tuple[str, ...]
    since: float
    silent_at: float
    """time from which the subscription counts as dead, unless it gives another sign of life"""


class SharedStore(RecordStore):
    """A record store that several processes have open. Each transaction locks the file."""

    def __init__(self, path: Path, mistakes: Collection[str] = ()) -> None:
        self.mistakes = frozenset(mistakes)
        self.writes: int | None = None
        """number of writes that the store still carries out; ``None`` means that it carries out all"""
        self.unanswered = False
        """whether a commit is carried out and then reported as failed"""
        self._path = path
        self._connection: sqlite3.Connection | None = None
        self._decoder = msgspec.msgpack.Decoder(Record)
        self._settings: dict[str, QueueSettings] = {}
        self._later: list[tuple[str, str, int]] = []
        self._seen: dict[str, Record] = {}
        self._buckets: dict[str, Bucket | None] = {}

    def open(self) -> None:
        with self._mapped():
            self._connection = sqlite3.connect(self._path, timeout=10, isolation_level=None)
            self._connection.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = OFF;")
            self._connection.executescript(_SCHEMA)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @contextmanager
    def transaction(self, unsure: type[TaskQueueError]) -> Iterator[None]:
        unsure = BackendUnavailable if "wrong error of a commit" in self.mistakes else unsure
        with self._mapped():
            self._database.rollback()
            self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
            with self._mapped(unsure):
                self._database.execute("COMMIT")
                self._count_later()
                if self.unanswered:
                    raise sqlite3.OperationalError("disk I/O error")  # noqa: TRY301 - as SQLite does
        except BaseException:
            self.forget()
            with suppress(sqlite3.Error):
                if "commit for a rollback" in self.mistakes and self._database.in_transaction:
                    self._database.execute("COMMIT")
                else:
                    self._database.rollback()
            raise

    def forget(self) -> None:
        """Forget what was read, because another process may have changed it."""
        self._later.clear()
        if "own settings" not in self.mistakes:
            self._settings.clear()

    def version(self) -> int:
        """Return a number that changes with each commit of another process."""
        ((number,),) = self._run("PRAGMA data_version")
        return int(number)

    @contextmanager
    def _mapped(self, to: type[TaskQueueError] = BackendUnavailable) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, msgspec.DecodeError) as error:
            raise to(f"the file {self._path.name} failed: {error}") from error

    @property
    def _database(self) -> sqlite3.Connection:
        if self._connection is None:
            raise BackendUnavailable(f"the file {self._path.name} is not open")
        return self._connection

    def _run(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with self._mapped():
            return self._database.execute(query, values).fetchall()

    def _write(self, query: str, *values: object) -> None:
        if self.writes is not None:
            self.writes -= 1
            if self.writes < 0:
                raise BackendUnavailable(f"the file {self._path.name} failed: disk I/O error")
        self._run(query, *values)

    def _select(self, condition: str, *values: object) -> list[Record]:
        rows = self._run(f"SELECT record FROM records WHERE {condition}", *values)  # noqa: S608
        return [self._decoder.decode(blob) for (blob,) in rows]

    def last_position(self) -> int:
        ((place,),) = self._run("SELECT coalesce(max(seq), 0) FROM records")
        return int(place)

    def load(self, key: str, task_id: str) -> Record | None:
        return next(iter(self._select("key = ? AND id = ?", key, task_id)), None)

    def save(self, record: Record) -> None:
        task = record.task
        self._write(
            "REPLACE INTO records VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            *(task.key, task.id, record.state, record.place, record.seq),
            *(
                record.due,
                record.alarm,
                record.owner,
                record.unique_key,
                msgspec.msgpack.encode(record),
            ),
        )

    def drop(self, record: Record) -> None:
        if "keeps the ended" in self.mistakes:
            record.forget_at += 1e9
            self.save(record)
        else:
            self._write(
                "DELETE FROM records WHERE key = ? AND id = ?", record.task.key, record.task.id
            )

    def listed(
        self, key: str, state: State, first: str, last: str, limit: int, *, newest: bool = False
    ) -> list[Record]:
        if (seen := self._seen.pop(key, None)) is not None:
            return [seen]
        page = "key = ? AND state = ? AND place >= ? AND place < ? ORDER BY place"
        if "no index" in self.mistakes:
            page = "+key = ? AND +state = ? AND +place >= ? AND +place < ? ORDER BY +place"
        order = "DESC" if newest else "ASC"
        return self._select(f"{page} {order} LIMIT ?", key, state, first, last, limit)

    def look_ahead(self, keys: Collection[str]) -> None:
        """Read the next candidates before the lock is taken: a mistake."""
        found = {key: self.listed(key, State.WAITING, "", AFTER_ALL, 1) for key in keys}
        self._seen = {key: records[0] for key, records in found.items() if records}

    def in_state(self, key: str, state: State, limit: int, after: int = 0) -> list[Record]:
        page = "key = ? AND state = ? AND seq > ? ORDER BY seq LIMIT ?"
        return self._select(page, key, state, after, limit)

    def sharing(self, key: str, unique_key: str, limit: int) -> list[Record]:
        page = "key = ? AND unique_key = ? ORDER BY seq DESC LIMIT ?"
        return self._select(page, key, unique_key, limit)

    def due(self, key: str, until: float, limit: int) -> list[Record]:
        return self._select("key = ? AND due <= ? ORDER BY due, seq LIMIT ?", key, until, limit)

    def alarms(self, until: float, limit: int) -> list[Record]:
        return self._select("alarm <= ? ORDER BY alarm, seq LIMIT ?", until, limit)

    def owned(self, owner: int | None = None) -> list[Record]:
        if owner is None:
            return self._select("owner IS NOT NULL")
        return self._select("owner = ?", owner)

    def load_schedule(self, name: str, key: str | None) -> ScheduleRecord | None:
        if key is None:
            found = self._schedules("name = ? ORDER BY key LIMIT 1", name)
        else:
            found = self._schedules("name = ? AND key = ?", name, key)
        return next(iter(found), None)

    def save_schedule(self, record: ScheduleRecord) -> None:
        self._write(
            "REPLACE INTO schedules VALUES (?, ?, ?, ?)",
            record.schedule.name,
            record.schedule.key,
            record.due,
            msgspec.msgpack.encode(record),
        )

    def drop_schedule(self, record: ScheduleRecord) -> None:
        place = record.schedule.name, record.schedule.key
        self._write("DELETE FROM schedules WHERE name = ? AND key = ?", *place)

    def list_schedules(self, after: str, limit: int) -> list[ScheduleRecord]:
        return self._schedules("name > ? ORDER BY name, key LIMIT ?", after, limit)

    def due_schedules(self, until: float, limit: int) -> list[ScheduleRecord]:
        return self._schedules("due <= ? ORDER BY due LIMIT ?", until, limit)

    def _schedules(self, condition: str, *values: object) -> list[ScheduleRecord]:
        query = f"SELECT record FROM schedules WHERE {condition}"  # noqa: S608
        rows = self._run(query, *values)
        with self._mapped():
            return [msgspec.msgpack.decode(blob, type=ScheduleRecord) for (blob,) in rows]

    def load_link(self, name: str) -> bytes | None:
        rows = self._run("SELECT value FROM links WHERE name = ?", name)
        return rows[0][0] if rows else None

    def save_link(self, name: str, value: bytes) -> None:
        self._write("REPLACE INTO links VALUES (?, ?)", name, value)

    def drop_link(self, name: str) -> None:
        self._write("DELETE FROM links WHERE name = ?", name)

    def links(
        self, first: str, last: str, limit: int, *, newest: bool = False
    ) -> list[tuple[str, bytes]]:
        query = "SELECT name, value FROM links WHERE name >= ? AND name < ? ORDER BY name"
        return self._run(f"{query} {'DESC' if newest else 'ASC'} LIMIT ?", first, last, limit)

    def count(self, key: str, name: str, by: int = 1) -> None:
        if "counters in a second transaction" in self.mistakes:
            self._later.append((key, name, by))
        else:
            self._count(key, name, by)

    def _count(self, key: str, name: str, by: int) -> None:
        self._write(
            "INSERT INTO counters VALUES (?, ?, ?)"
            " ON CONFLICT (key, name) DO UPDATE SET value = value + excluded.value",
            *(key, name, by),
        )

    def _count_later(self) -> None:
        if self._later:
            self._database.execute("BEGIN IMMEDIATE")
            for change in self._later:
                self._count(*change)
            self._database.execute("COMMIT")
            self._later.clear()

    def counters(self, key: str) -> Counter[str]:
        found = Counter(dict(self._run("SELECT name, value FROM counters WHERE key = ?", key)))
        for changed, name, by in self._later:
            found[name] += by if changed == key else 0
        return found

    def settings(self, key: str) -> QueueSettings:
        if key not in self._settings:
            rows = self._run("SELECT value FROM settings WHERE key = ?", key)
            read = [QueueSettings.model_validate_json(text) for (text,) in rows]
            self._settings[key] = read[0] if read else QueueSettings()
        return self._settings[key]

    def configure(self, key: str, settings: QueueSettings) -> None:
        self._write("REPLACE INTO settings VALUES (?, ?)", key, settings.model_dump_json())
        self._settings[key] = settings

    def bucket(self, key: str) -> Bucket | None:
        if "own bucket" in self.mistakes:
            return self._buckets.get(key)
        rows = self._run("SELECT tokens, at FROM buckets WHERE key = ?", key)
        return Bucket(*rows[0]) if rows else None

    def save_bucket(self, key: str, bucket: Bucket | None) -> None:
        self._buckets[key] = bucket
        if bucket is None:
            self._write("DELETE FROM buckets WHERE key = ?", key)
        else:
            self._write("REPLACE INTO buckets VALUES (?, ?, ?)", key, bucket.tokens, bucket.at)

    def remove(self, key: str) -> None:
        for table in ("counters", "settings", "buckets"):
            self._write(f"DELETE FROM {table} WHERE key = ?", key)  # noqa: S608
        self._settings.pop(key, None)
        self._buckets.pop(key, None)

    def queues(self) -> set[str]:
        return {
            key for (key,) in self._run("SELECT key FROM counters UNION SELECT key FROM settings")
        }

    def give_sign(self, life: Life) -> None:
        """Store a sign of life."""
        encoded = msgspec.msgpack.encode(life.keys)
        row = (life.owner, life.consumer, encoded, life.since, life.silent_at)
        self._run("REPLACE INTO lives VALUES (?, ?, ?, ?, ?)", *row)

    def end_life(self, owner: int) -> None:
        """Forget a subscription."""
        self._run("DELETE FROM lives WHERE owner = ?", owner)

    def lives(self) -> list[Life]:
        """Return the signs of life of all subscriptions."""
        rows = self._run("SELECT * FROM lives")
        return [Life(o, c, tuple(msgspec.msgpack.decode(k)), *times) for o, c, k, *times in rows]

    def waiting_keys(self) -> set[str]:
        """Return the keys that have waiting tasks."""
        return {
            key for (key,) in self._run("SELECT DISTINCT key FROM records WHERE state = 'waiting'")
        }

    def size(self) -> int:
        """Return the number of rows in all tables."""
        tables = ("records", "schedules", "links", "counters", "settings", "buckets", "lives")
        return sum(self._run(f"SELECT count(*) FROM {table}")[0][0] for table in tables)  # noqa: S608
