"""A minimal record store for tests: it keeps all data in dicts, scans all rows per query, and fails on demand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import msgspec

from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.errors import BackendUnavailable, TaskQueueError
from taskqueue_core.rate_limit import Bucket
from taskqueue_core.recordstore import Record, RecordStore, ScheduleRecord
from taskqueue_core.tasks import State

_decoder = msgspec.msgpack.Decoder(Record)


class Row(NamedTuple):
    """A stored record with the columns by which queries find it."""

    key: str
    place: str
    state: State | None
    seq: int
    due: float | None
    alarm: float | None
    owner: int | None
    unique_key: str | None
    record: bytes


class Disk:
    """The data that survive when the process that uses them dies."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], Row] = {}
        self.counters: dict[tuple[str, str], int] = {}
        self.settings: dict[str, QueueSettings] = {}
        self.buckets: dict[str, Bucket] = {}
        self.schedules: dict[tuple[str, str], ScheduleRecord] = {}
        self.links: dict[str, bytes] = {}

    def copy(self) -> Disk:
        """Return a copy, so that changes to its dicts leave the original unchanged."""
        made = Disk()
        made.rows, made.counters = dict(self.rows), dict(self.counters)
        made.settings, made.buckets = dict(self.settings), dict(self.buckets)
        made.schedules = dict(self.schedules)
        made.links = dict(self.links)
        return made


class DictStore(RecordStore):
    """A record store on a `Disk`: a transaction changes a copy, and the commit replaces the original with it."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self.failing: set[str] = set()
        """operations that fail: ``open``, ``close``, ``save``, ``bucket``, ``commit``, ``answer`` (after the commit)"""
        self.opened = False
        self.transactions = 0
        self.asked: list[str] = []
        """the queue key of each query that a receive made"""
        self._new = disk

    def fail(self, what: str) -> None:
        """Raise `BackendUnavailable` if the test put ``what`` into `failing`."""
        if what in self.failing:
            raise BackendUnavailable(f"{what} failed")

    def open(self) -> None:
        """Mark the store as open, or fail if the test asked for that."""
        self.fail("open")
        self.opened = True

    def close(self) -> None:
        """Mark the store as closed, or fail if the test asked for that."""
        self.fail("close")
        self.opened = False

    @contextmanager
    def transaction(self, unsure: type[TaskQueueError]) -> Iterator[None]:
        """Let the body change a copy of the disk; commit the copy at the end, unless the test asked for a failure."""
        self._new = self.disk.copy()
        self.transactions += 1
        yield
        if "commit" in self.failing:
            raise unsure("commit failed")
        vars(self.disk).update(vars(self._new))
        if "answer" in self.failing:
            raise unsure("it was done, and nobody can tell")

    def _find(self, chosen: Callable[[Row], bool], *order: str, limit: int | None) -> list[Record]:
        rows = sorted(
            filter(chosen, self._new.rows.values()),
            key=lambda row: [getattr(row, name) for name in order],
        )
        return [_decoder.decode(row.record) for row in rows[:limit]]

    def last_position(self) -> int:
        """Return the highest sequence number of any record, by scanning all rows."""
        return max((row.seq for row in self._new.rows.values()), default=0)

    def load(self, key: str, task_id: str) -> Record | None:
        """Return the record of a task, or None if there is none."""
        row = self._new.rows.get((key, task_id))
        return None if row is None else _decoder.decode(row.record)

    def save(self, record: Record) -> None:
        """Store a record, replacing any earlier version of it."""
        self.fail("save")
        task = record.task
        self._new.rows[task.key, task.id] = Row(
            task.key,
            record.place,
            record.state,
            record.seq,
            record.due,
            record.alarm,
            record.owner,
            record.unique_key,
            msgspec.msgpack.encode(record),
        )

    def drop(self, record: Record) -> None:
        """Delete a record."""
        del self._new.rows[record.task.key, record.task.id]

    def listed(
        self, key: str, state: State, first: str, last: str, limit: int, *, newest: bool = False
    ) -> Sequence[Record]:
        """Return records of a queue in one state by their places, by scanning all rows."""
        self.asked.append(key)
        rows = [
            row
            for row in self._new.rows.values()
            if (row.key, row.state) == (key, state) and first <= row.place < last
        ]
        rows.sort(key=lambda row: row.place, reverse=newest)
        return [_decoder.decode(row.record) for row in rows[:limit]]

    def in_state(self, key: str, state: State, limit: int, after: int = 0) -> Sequence[Record]:
        """Return records of a queue in one state, in sequence order, by scanning all rows."""
        return self._find(
            lambda row: (row.key, row.state) == (key, state) and row.seq > after, "seq", limit=limit
        )

    def sharing(self, key: str, unique_key: str, limit: int) -> Sequence[Record]:
        """Return the records of a queue with a unique key, the last one first, by scanning all rows."""
        rows = self._find(
            lambda row: (row.key, row.unique_key) == (key, unique_key), "seq", limit=None
        )
        return rows[::-1][:limit]

    def due(self, key: str, until: float, limit: int) -> Sequence[Record]:
        """Return records of a queue that are due by a time, by scanning all rows."""
        self.asked.append(key)
        return self._find(
            lambda row: row.key == key and row.due is not None and row.due <= until,
            "due",
            "seq",
            limit=limit,
        )

    def alarms(self, until: float, limit: int) -> Sequence[Record]:
        """Return records of all queues whose alarm is due by a time, by scanning all rows."""
        return self._find(
            lambda row: row.alarm is not None and row.alarm <= until, "alarm", "seq", limit=limit
        )

    def owned(self, owner: int | None = None) -> Sequence[Record]:
        """Return the records in flight, of one owner or of all, by scanning all rows."""
        return self._find(
            lambda row: row.owner is not None and owner in (None, row.owner), limit=None
        )

    def load_schedule(self, name: str, key: str | None) -> ScheduleRecord | None:
        """Return a schedule by its name, and perhaps its queue, by scanning all."""
        found = [
            place for place in self._new.schedules if place[0] == name and key in (None, place[1])
        ]
        return self._new.schedules[min(found)] if found else None

    def save_schedule(self, record: ScheduleRecord) -> None:
        """Store a schedule."""
        self.fail("save")
        self._new.schedules[record.schedule.name, record.schedule.key] = record

    def drop_schedule(self, record: ScheduleRecord) -> None:
        """Delete a schedule."""
        del self._new.schedules[record.schedule.name, record.schedule.key]

    def list_schedules(self, after: str, limit: int) -> Sequence[ScheduleRecord]:
        """Return schedules by name, by sorting all."""
        places = sorted(place for place in self._new.schedules if place[0] > after)
        return [self._new.schedules[place] for place in places[:limit]]

    def due_schedules(self, until: float, limit: int) -> Sequence[ScheduleRecord]:
        """Return schedules by their time, by sorting all."""
        due = [
            (one.due, place) for place, one in self._new.schedules.items() if one.due is not None
        ]
        return [self._new.schedules[place] for at, place in sorted(due)[:limit] if at <= until]

    def load_link(self, name: str) -> bytes | None:
        """Return the value of a link."""
        return self._new.links.get(name)

    def save_link(self, name: str, value: bytes) -> None:
        """Store a link."""
        self.fail("save")
        self._new.links[name] = value

    def drop_link(self, name: str) -> None:
        """Delete a link."""
        self._new.links.pop(name, None)

    def links(
        self, first: str, last: str, limit: int, *, newest: bool = False
    ) -> Sequence[tuple[str, bytes]]:
        """Return links by name, by sorting all."""
        found = (name for name in self._new.links if first <= name < last)
        names = sorted(found, reverse=newest)
        return [(name, self._new.links[name]) for name in names[:limit]]

    def count(self, key: str, name: str, by: int = 1) -> None:
        """Add to a counter of a queue."""
        self._new.counters[key, name] = self._new.counters.get((key, name), 0) + by

    def counters(self, key: str) -> Counter[str]:
        """Return all counters of a queue."""
        return Counter({name: n for (of, name), n in self._new.counters.items() if of == key})

    def settings(self, key: str) -> QueueSettings:
        """Return the settings of a queue, or the defaults if none are stored."""
        return self._new.settings.get(key, QueueSettings())

    def configure(self, key: str, settings: QueueSettings) -> None:
        """Store the settings of a queue."""
        self._new.settings[key] = settings

    def bucket(self, key: str) -> Bucket | None:
        """Return a copy of a queue's token bucket, or None if it has none."""
        self.fail("bucket")
        kept = self._new.buckets.get(key)
        return None if kept is None else msgspec.structs.replace(kept)

    def save_bucket(self, key: str, bucket: Bucket | None) -> None:
        """Store a queue's token bucket, or delete it if ``bucket`` is None."""
        self.fail("bucket")
        if bucket is None:
            self._new.buckets.pop(key, None)
        else:
            self._new.buckets[key] = bucket

    def remove(self, key: str) -> None:
        """Delete counters, settings and the rate-limit bucket of a queue."""
        for name in [name for name in self._new.counters if name[0] == key]:
            del self._new.counters[name]
        self._new.settings.pop(key, None)
        self._new.buckets.pop(key, None)

    def queues(self) -> set[str]:
        """Return the keys of all queues that have counters or settings."""
        return {key for key, _ in self._new.counters} | self._new.settings.keys()
