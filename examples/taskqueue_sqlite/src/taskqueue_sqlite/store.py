"""The database file, with one row for each task, one transaction for each step, and an index for each lookup."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
from pydantic import ValidationError
from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.errors import BackendUnavailable, ConfigurationError, TaskQueueError
from taskqueue_core.rate_limit import Bucket
from taskqueue_core.recordstore import Record, RecordStore, ScheduleRecord
from taskqueue_core.tasks import State

_FORMAT = 6
_SORTED = {False: "ASC", True: "DESC"}
_FAULTS = (sqlite3.Error, msgspec.DecodeError, ValidationError)
_FOUND = "SELECT user_version, (SELECT count(*) FROM sqlite_master) FROM pragma_user_version"
_OPEN = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = FULL;
"""
_SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE records (
    key TEXT NOT NULL,
    id TEXT NOT NULL,
    state TEXT NOT NULL,
    place TEXT NOT NULL,
    seq INTEGER NOT NULL,
    due REAL,
    alarm REAL,
    owner INTEGER,
    unique_key TEXT,
    record BLOB NOT NULL,
    PRIMARY KEY (key, id)
);
CREATE INDEX lists ON records (key, state, place);
CREATE INDEX states ON records (key, state, seq);
CREATE INDEX dues ON records (key, due, seq) WHERE due IS NOT NULL;
CREATE INDEX alarms ON records (alarm, seq) WHERE alarm IS NOT NULL;
CREATE INDEX owners ON records (owner) WHERE owner IS NOT NULL;
CREATE INDEX sharing ON records (key, unique_key, seq) WHERE unique_key IS NOT NULL;
CREATE INDEX places ON records (seq);
CREATE TABLE counters (
    key TEXT NOT NULL,
    name TEXT NOT NULL,
    value INTEGER NOT NULL,
    PRIMARY KEY (key, name)
) WITHOUT ROWID;
CREATE TABLE settings (
    key TEXT PRIMARY KEY,
    value TEXT NOT NULL
);
CREATE TABLE schedules (
    name TEXT NOT NULL,
    key TEXT NOT NULL,
    due REAL,
    record BLOB NOT NULL,
    PRIMARY KEY (name, key)
);
CREATE INDEX timetable ON schedules (due) WHERE due IS NOT NULL;
CREATE TABLE links (
    name TEXT PRIMARY KEY,
    value BLOB NOT NULL
) WITHOUT ROWID;
CREATE TABLE buckets (
    key TEXT PRIMARY KEY,
    tokens REAL NOT NULL,
    at REAL NOT NULL
);
PRAGMA user_version = {_FORMAT};
COMMIT;
"""


class SQLiteStore(RecordStore):
    """A record store in SQLite. Each row contains a record as a blob, and columns for looking up records."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None
        self._decoder = msgspec.msgpack.Decoder(Record)
        self._settings: dict[str, QueueSettings] = {}

    def open(self) -> None:
        """Lock the file until `close` or until this process ends, and create the tables if the file is new."""
        with self._mapped():
            if self._connection is None:
                self._connection = sqlite3.connect(self._path, timeout=0, isolation_level=None)
            self._connection.execute("PRAGMA locking_mode = EXCLUSIVE")
            found, tables = self._connection.execute(_FOUND).fetchone()
            if found != _FORMAT and (found or tables):  # check the file before changing it
                raise ConfigurationError(
                    f"the file {self._path.name} has format {found}, not {_FORMAT}"
                )
            self._connection.executescript(_OPEN)
            if found == 0:
                self._connection.executescript(_SCHEMA)

    def close(self) -> None:
        """Close the file and release its lock."""
        self._settings.clear()
        if self._connection is not None:
            with self._mapped():
                self._connection.close()
            self._connection = None

    @contextmanager
    def transaction(self, unsure: type[TaskQueueError]) -> Iterator[None]:
        """Run the body between BEGIN and COMMIT."""
        with self._mapped():
            self._database.rollback()  # has no effect unless the previous ROLLBACK failed
            self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
            with self._mapped(unsure):
                self._database.execute("COMMIT")
        except BaseException:
            self._settings.clear()
            with suppress(sqlite3.Error):
                self._database.rollback()
            raise

    @contextmanager
    def _mapped(self, to: type[TaskQueueError] = BackendUnavailable) -> Iterator[None]:
        try:
            yield
        except _FAULTS as error:
            name = getattr(error, "sqlite_errorname", "")
            if name.startswith("SQLITE_BUSY"):
                raise BackendUnavailable(f"another process has {self._path.name} open") from error
            kind = ConfigurationError if name == "SQLITE_NOTADB" else to
            raise kind(f"the file {self._path.name} failed: {error}") from error

    @property
    def _database(self) -> sqlite3.Connection:
        if self._connection is None:
            raise BackendUnavailable(f"the file {self._path.name} is not open")
        return self._connection

    def _run(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with self._mapped():
            return self._database.execute(query, values).fetchall()

    def _select(self, condition: str, *values: object) -> list[Record]:
        query = f"SELECT record FROM records WHERE {condition}"  # noqa: S608 - only conditions from this file
        rows = self._run(query, *values)
        with self._mapped():
            return [self._decoder.decode(blob) for (blob,) in rows]

    def last_position(self) -> int:
        """Return the highest position in use."""
        ((place,),) = self._run("SELECT coalesce(max(seq), 0) FROM records")
        return int(place)

    def load(self, key: str, task_id: str) -> Record | None:
        """Return the record of a task; None if there is none."""
        return next(iter(self._select("key = ? AND id = ?", key, task_id)), None)

    def save(self, record: Record) -> None:
        """Insert or replace the record of a task."""
        self._run(
            "REPLACE INTO records VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            record.task.key,
            record.task.id,
            record.state,
            record.place,
            record.seq,
            record.due,
            record.alarm,
            record.owner,
            record.unique_key,
            msgspec.msgpack.encode(record),
        )

    def drop(self, record: Record) -> None:
        """Delete the record of a task."""
        self._run("DELETE FROM records WHERE key = ? AND id = ?", record.task.key, record.task.id)

    def listed(
        self, key: str, state: State, first: str, last: str, limit: int, *, newest: bool = False
    ) -> list[Record]:
        """Return the next records in a state, sorted by place."""
        page = "key = ? AND state = ? AND place >= ? AND place < ? ORDER BY place"
        return self._select(f"{page} {_SORTED[newest]} LIMIT ?", key, state, first, last, limit)

    def in_state(self, key: str, state: State, limit: int, after: int = 0) -> list[Record]:
        """Return the next records in a state, ordered by position."""
        page = "key = ? AND state = ? AND seq > ? ORDER BY seq LIMIT ?"
        return self._select(page, key, state, after, limit)

    def sharing(self, key: str, unique_key: str, limit: int) -> list[Record]:
        """Return the records with a unique key, the last one first."""
        page = "key = ? AND unique_key = ? ORDER BY seq DESC LIMIT ?"
        return self._select(page, key, unique_key, limit)

    def due(self, key: str, until: float, limit: int) -> list[Record]:
        """Return the records of a key that are due, earliest first."""
        return self._select("key = ? AND due <= ? ORDER BY due, seq LIMIT ?", key, until, limit)

    def alarms(self, until: float, limit: int) -> list[Record]:
        """Return the records of all keys that are due, earliest first."""
        return self._select("alarm <= ? ORDER BY alarm, seq LIMIT ?", until, limit)

    def owned(self, owner: int | None = None) -> list[Record]:
        """Return the records in flight: those of one owner, or all."""
        if owner is None:
            return self._select("owner IS NOT NULL")
        return self._select("owner = ?", owner)

    def load_schedule(self, name: str, key: str | None) -> ScheduleRecord | None:
        """Return a schedule; None if there is none."""
        if key is None:
            found = self._schedules("name = ? ORDER BY key LIMIT 1", name)
        else:
            found = self._schedules("name = ? AND key = ?", name, key)
        return next(iter(found), None)

    def save_schedule(self, record: ScheduleRecord) -> None:
        """Insert or replace a schedule."""
        self._run(
            "REPLACE INTO schedules VALUES (?, ?, ?, ?)",
            record.schedule.name,
            record.schedule.key,
            record.due,
            msgspec.msgpack.encode(record),
        )

    def drop_schedule(self, record: ScheduleRecord) -> None:
        """Delete a schedule."""
        place = record.schedule.name, record.schedule.key
        self._run("DELETE FROM schedules WHERE name = ? AND key = ?", *place)

    def list_schedules(self, after: str, limit: int) -> list[ScheduleRecord]:
        """Return the next schedules, sorted by name."""
        return self._schedules("name > ? ORDER BY name, key LIMIT ?", after, limit)

    def due_schedules(self, until: float, limit: int) -> list[ScheduleRecord]:
        """Return the schedules that are due, earliest first."""
        return self._schedules("due <= ? ORDER BY due LIMIT ?", until, limit)

    def _schedules(self, condition: str, *values: object) -> list[ScheduleRecord]:
        query = f"SELECT record FROM schedules WHERE {condition}"  # noqa: S608 - only conditions from this file
        rows = self._run(query, *values)
        with self._mapped():
            return [msgspec.msgpack.decode(blob, type=ScheduleRecord) for (blob,) in rows]

    def load_link(self, name: str) -> bytes | None:
        """Read a row."""
        rows = self._run("SELECT value FROM links WHERE name = ?", name)
        return rows[0][0] if rows else None

    def save_link(self, name: str, value: bytes) -> None:
        """Insert or replace a row."""
        self._run("REPLACE INTO links VALUES (?, ?)", name, value)

    def drop_link(self, name: str) -> None:
        """Delete a row."""
        self._run("DELETE FROM links WHERE name = ?", name)

    def links(
        self, first: str, last: str, limit: int, *, newest: bool = False
    ) -> list[tuple[str, bytes]]:
        """Return the next rows, sorted by name."""
        query = "SELECT name, value FROM links WHERE name >= ? AND name < ? ORDER BY name"
        return self._run(f"{query} {_SORTED[newest]} LIMIT ?", first, last, limit)

    def count(self, key: str, name: str, by: int = 1) -> None:
        """Add to a counter, which starts from 0."""
        self._run(
            "INSERT INTO counters VALUES (?, ?, ?)"
            " ON CONFLICT (key, name) DO UPDATE SET value = value + excluded.value",
            key,
            name,
            by,
        )

    def counters(self, key: str) -> Counter[str]:
        """Read all counters of a queue."""
        return Counter(dict(self._run("SELECT name, value FROM counters WHERE key = ?", key)))

    def settings(self, key: str) -> QueueSettings:
        """Return the stored settings of a queue, or the defaults. They are read from the file once."""
        if key not in self._settings:
            rows = self._run("SELECT value FROM settings WHERE key = ?", key)
            with self._mapped():
                read = [QueueSettings.model_validate_json(text) for (text,) in rows]
            self._settings[key] = read[0] if read else QueueSettings()
        return self._settings[key]

    def configure(self, key: str, settings: QueueSettings) -> None:
        """Store the settings of a queue."""
        self._run("REPLACE INTO settings VALUES (?, ?)", key, settings.model_dump_json())
        self._settings[key] = settings

    def bucket(self, key: str) -> Bucket | None:
        """Read a row."""
        rows = self._run("SELECT tokens, at FROM buckets WHERE key = ?", key)
        return Bucket(*rows[0]) if rows else None

    def save_bucket(self, key: str, bucket: Bucket | None) -> None:
        """Store a token bucket, or delete it if ``bucket`` is None."""
        if bucket is None:
            self._run("DELETE FROM buckets WHERE key = ?", key)
        else:
            self._run("REPLACE INTO buckets VALUES (?, ?, ?)", key, bucket.tokens, bucket.at)

    def remove(self, key: str) -> None:
        """Delete the counters, the settings and the token bucket of a queue."""
        for table in ("counters", "settings", "buckets"):
            self._run(f"DELETE FROM {table} WHERE key = ?", key)  # noqa: S608 - only names from this method
        self._settings.pop(key, None)

    def queues(self) -> set[str]:
        """Return the keys of all queues that have records or settings."""
        return {
            key for (key,) in self._run("SELECT key FROM counters UNION SELECT key FROM settings")
        }
