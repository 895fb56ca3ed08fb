"""A record store as small as it can be: a dict, whose look-ups read everything, and that can be told to fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec

from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.errors import BackendUnavailable, TaskQueueError
from taskqueue_core.recordstore import Record, RecordStore
from taskqueue_core.tasks import State


class DictStore(RecordStore):
    """Everything in one dict that a transaction copies. ``disk`` outlives the store, and is what another one opens."""

    def __init__(self, disk: dict[str, bytes]) -> None:
        self.disk = disk
        self.failing: set[str] = set()
        """which of ``open``, ``close``, ``save``, ``commit`` fail"""
        self.opened = False
        self.transactions = 0
        self.asked: list[str] = []
        """the keys of every look-up for a receive"""
        self._data: dict[str, bytes] = {}

    def fail(self, what: str) -> None:
        """Fail here if it was asked for."""
        if what in self.failing:
            raise BackendUnavailable(f"{what} failed")

    def open(self) -> None:
        """Note it."""
        self.fail("open")
        self.opened = True

    def close(self) -> None:
        """Note it."""
        self.fail("close")
        self.opened = False

    @contextmanager
    def transaction(self, unsure: type[TaskQueueError]) -> Iterator[None]:
        """Work on a copy."""
        self._data = dict(self.disk)
        self.transactions += 1
        yield
        if "commit" in self.failing:
            raise unsure("commit failed")
        self.disk.clear()
        self.disk.update(self._data)

    def _find(self, chosen: Callable[[Record], bool], *order: str) -> list[Record]:
        records = (
            msgspec.json.decode(text, type=Record)
            for name, text in self._data.items()
            if name.startswith("record ")
        )
        return sorted(
            filter(chosen, records), key=lambda one: [getattr(one, name) for name in order]
        )

    def last_place(self) -> int:
        """Look at all."""
        return max((record.seq for record in self._find(lambda _: True)), default=0)

    def load(self, key: str, task_id: str) -> Record | None:
        """Look it up."""
        text = self._data.get(f"record {key} {task_id}")
        return None if text is None else msgspec.json.decode(text, type=Record)

    def save(self, record: Record) -> None:
        """Write it as text."""
        self.fail("save")
        name = f"record {record.task.key} {record.task.id}"
        self._data[name] = msgspec.json.encode(record)

    def drop(self, record: Record) -> None:
        """Delete it."""
        del self._data[f"record {record.task.key} {record.task.id}"]

    def first_waiting(self, key: str) -> Record | None:
        """Look at all."""
        self.asked.append(key)
        waiting = self._find(lambda one: one.task.key == key and one.state is State.WAITING, "seq")
        return min(waiting, key=lambda one: -one.task.priority, default=None)

    def in_state(self, key: str, state: State, limit: int, after: int = 0) -> Sequence[Record]:
        """Look at all."""
        return self._find(
            lambda one: one.task.key == key and one.state is state and one.seq > after, "seq"
        )[:limit]

    def due(self, key: str, until: float, limit: int) -> Sequence[Record]:
        """Look at all."""
        self.asked.append(key)
        return self._find(
            lambda one: one.task.key == key and one.due is not None and one.due <= until,
            "due",
            "seq",
        )[:limit]

    def alarms(self, until: float, limit: int) -> Sequence[Record]:
        """Look at all."""
        return self._find(lambda one: one.alarm is not None and one.alarm <= until, "alarm", "seq")[
            :limit
        ]

    def owned(self, owner: int | None = None) -> Sequence[Record]:
        """Look at all."""
        return self._find(lambda one: one.owner is not None and owner in (None, one.owner))

    def _map(self, name: str) -> dict[str, int]:
        return msgspec.json.decode(self._data.get(name, b"{}"), type=dict[str, int])

    def count(self, key: str, name: str, by: int = 1) -> None:
        """Write all counters of the key anew."""
        counters = Counter(self._map(f"counters {key}"))
        counters[name] += by
        self._data[f"counters {key}"] = msgspec.json.encode(counters)

    def counters(self, key: str) -> Counter[str]:
        """Look them up."""
        return Counter(self._map(f"counters {key}"))

    def settings(self, key: str) -> QueueSettings:
        """Look them up."""
        return QueueSettings.model_validate_json(self._data.get(f"settings {key}", b"{}"))

    def configure(self, key: str, settings: QueueSettings) -> None:
        """Write them."""
        self._data[f"settings {key}"] = settings.model_dump_json().encode()

    def queues(self) -> set[str]:
        """Look at all."""
        names = (name.split() for name in self._data)
        return {name[1] for name in names if name[0] != "record"}
