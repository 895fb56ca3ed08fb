"""The columns of transitions, and batches of transitions in Arrow's format."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from taskqueue_redis.journal.reader import COLUMNS, HEAD, JournalSteps

_TIME = pa.timestamp("us", tz="UTC")

_REQUIRED = {
    "shard": pa.int32(), "run": pa.string(), "seq": pa.int64(), "ts": _TIME, "event": pa.string(), "key": pa.string(),
    "task_id": pa.string(), "attempt": pa.int32(), "losses": pa.int32(), "state": pa.string(), "priority": pa.int8(),
}  # fmt: skip
_OPTIONAL = {
    "tenant": pa.string(), "ordering_key": pa.string(), "worker": pa.string(), "error": pa.string(),
    "reason": pa.string(), "due_at": _TIME, "digest": pa.string(),
}  # fmt: skip
TRANSITIONS = pa.schema(
    [pa.field(name, kind, name in _OPTIONAL) for name, kind in (_REQUIRED | _OPTIONAL).items()]
)
"""The schema of transitions, one row each.

``run`` identifies the installation of Redis, or the process of the memory backend, that numbered the transition
(``seq``). ``shard`` is the number of a Redis partition, and 0 for the memory backend.

An entry that cannot be read is a row with the event `DAMAGED`, whose ``reason`` says where and why. It belongs to no
run: its ``run`` is empty and its ``seq`` is 0. If the last transitions of a run are missing, a row with the event
`MISSING` has the run and the number after the missing ones, so that the numbers show this gap like any other.
"""
DAMAGED = "damaged"
MISSING = "missing"
Event: TypeAlias = Literal[
    "published", "released", "available", "delivered", "acked", "redelivered", "lost", "retried", "rescheduled",
    "replaced", "dead_lettered", "redriven", "discarded", "expired", "cancelled", "configured", "closed",
]  # fmt: skip
After: TypeAlias = Literal[
    "",
    "blocked",
    "scheduled",
    "waiting",
    "in_flight",
    "done",
    "dead",
    "expired",
    "cancelled",
    "discarded",
]
"""the state of a task after an event; empty for an event that concerns no task"""
EVENTS = frozenset(get_args(Event))
TASK_EVENTS = tuple(name for name in get_args(Event) if name not in {"configured", "closed"})
"""names of the events that concern a task"""
_EVENTS, _STATES = ({text.encode() for text in texts} for texts in (EVENTS, get_args(After)))
BEYOND = 253_402_300_800_000_000
"""the first microsecond after the year 9999, the last year of Python's dates"""
_AHEAD = 86_400_000_000
_ENTRY_NUMBER = {name: index for index, name in enumerate((*HEAD, *COLUMNS))}
Values: TypeAlias = Sequence[bytes]


def latest_time() -> int:
    """Return the time (microseconds since 1970) after which a transition cannot have happened.

    It is a day ahead of this machine's clock, because the clock of a store may differ. A time in the distant future
    would make every other transition look old.
    """
    return min(BEYOND, time.time_ns() // 1000 + _AHEAD)


class Damaged(Exception):
    """Raised for a journal entry that no version of this package could have written."""


def batch_of(
    shard: int,
    run: str,
    steps: JournalSteps,
    start: int,
    end: int,
    *,
    schema: pa.Schema = TRANSITIONS,
) -> pa.RecordBatch:
    """Return the transitions numbered ``start`` to ``end`` from steps that are sorted by number.

    ``schema``: the columns to return, all or some of `TRANSITIONS`. Raises `Damaged` for an invalid step.
    """
    try:
        block = _Block(steps)
        columns = [block.column(name, shard, run) for name in schema.names]
        batch = pa.RecordBatch.from_arrays(columns, schema=schema)
    except (pa.ArrowException, ValueError, OverflowError) as error:
        raise Damaged(str(error)) from error
    low, high = np.searchsorted(block.seqs, (start, end + 1))
    return batch if high - low == len(batch) else batch.slice(low, high - low)


def damage(
    rows: Sequence[tuple[int, int, str]],
    schema: pa.Schema = TRANSITIONS,
    run: str = "",
    seq: int = 0,
) -> pa.RecordBatch:
    """Return a row for each entry that cannot be read. ``rows``: their shards, times (microseconds) and reasons.

    With ``run`` and ``seq``, the rows instead report transitions that are missing before the number ``seq``.
    """
    shards, times, reasons = zip(*rows, strict=True)
    given: dict[str, Any] = {"shard": shards, "ts": times, "reason": reasons}
    same = {"event": MISSING if run else DAMAGED, "run": run, "seq": seq}
    for field in TRANSITIONS:
        nothing = None if field.nullable else "" if pa.types.is_string(field.type) else 0
        given.setdefault(field.name, [same.get(field.name, nothing)] * len(rows))
    columns = [pa.array(given[field.name], field.type) for field in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


class _Block:
    def __init__(self, steps: JournalSteps) -> None:
        self._seqs, self._sizes, self._columns = steps
        self._number = sum(self._sizes)
        for name, known in (("event", _EVENTS), ("state", _STATES)):
            values = self._columns[_ENTRY_NUMBER[name]]
            if not (values[0] in known if _uniform(values) else known.issuperset(values)):
                raise ValueError("an unknown event or state")

    @cached_property
    def seqs(self) -> Any:
        first, last = self._seqs[0], self._seqs[-1]
        if last + self._sizes[-1] - first == self._number:
            return np.arange(first, first + self._number)
        offsets = np.cumsum([0, *self._sizes[:-1]])
        begins = np.repeat(np.array(self._seqs) - offsets, self._sizes)
        return begins + np.arange(self._number)

    @cached_property
    def _entry_numbers(self) -> pa.Array:
        return pa.array(np.repeat(np.arange(len(self._sizes), dtype=np.int32), self._sizes))

    def column(self, name: str, shard: int, run: str) -> pa.Array:
        match name:
            case "shard":
                return pa.repeat(pa.scalar(shard, pa.int32()), self._number)
            case "run":
                return pa.repeat(run, self._number)
            case "seq":
                return pa.array(self.seqs)
        values = self._columns[_ENTRY_NUMBER[name]]
        make = _MAKERS[name]
        if name != "task_id" and _uniform(values) and b"\0" not in values[0]:
            return pa.repeat(make([values[0]])[0], self._number)
        if name in HEAD:
            made = make(values)
            return made if self._number == len(values) else made.take(self._entry_numbers)
        return make(self._rows(values))

    def _rows(self, values: Values) -> Values:
        """Return the values of a column, one per transition.

        A step has one value for all its transitions, or one for each, separated by zero bytes.
        """
        joined = b"\0".join(values)
        if self._number == len(values):
            if joined.count(b"\0") != self._number - 1:
                raise ValueError("more values than transitions")
            return values
        whole = []
        for value, size in zip(values, self._sizes, strict=True):
            if b"\0" not in value:
                whole.extend([value] * size)
                continue
            parts = value.split(b"\0")
            if len(parts) != size:
                raise ValueError("a step has more or fewer values than transitions")
            whole.extend(parts)
        return whole


def _uniform(values: Values) -> bool:
    return values[-1] == values[0] and values.count(values[0]) == len(values)


def _name(values: Values) -> pa.Array:
    return pa.array(values, pa.binary()).cast(pa.string())  # raises an error for invalid UTF-8


def _text(values: Values) -> pa.Array:
    texts = _name(values)
    return pc.if_else(pc.equal(texts, ""), pa.scalar(None, pa.string()), texts)


def _free_text(values: Values) -> pa.Array:
    """Return texts like `_text`, but replace invalid UTF-8, because applications write these texts."""
    try:
        return _text(values)
    except pa.ArrowInvalid:
        return pa.array([value.decode(errors="replace") or None for value in values], pa.string())


def _times(values: Values, end: int = BEYOND) -> pa.Array:
    times = _name(values).cast(pa.int64())
    ends = pc.min_max(times)
    if ends["min"].as_py() < 0 or ends["max"].as_py() >= end:
        raise ValueError("a timestamp is out of range")
    return times.cast(_TIME)


def _times_if_any(values: Values) -> pa.Array:
    times = _times([value or b"0" for value in values])
    return pc.if_else(pa.array([*map(bool, values)]), times, pa.scalar(None, _TIME))


_MAKERS: dict[str, Callable[[Values], pa.Array]] = {
    "ts": lambda values: _times(values, latest_time()),
    "event": _name,
    "key": _name,
    "task_id": _name,
    "attempt": lambda values: _name(values).cast(pa.int32()),
    "losses": lambda values: _name(values).cast(pa.int32()),
    "state": _name,
    "priority": lambda values: _name(values).cast(pa.int8()),
    "tenant": _text,
    "ordering_key": _text,
    "worker": _text,
    "error": _free_text,
    "reason": _free_text,
    "due_at": _times_if_any,
    "digest": _text,
}
