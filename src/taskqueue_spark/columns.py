"""Transitions as Arrow batches: the form in which Spark and every other reader gets them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import chain

import pyarrow as pa
import pyarrow.compute as pc

from taskqueue_redis.journal import COLUMNS, HEAD, JOURNAL_VERSION, Entry

__all__ = ["TRANSITIONS", "Damaged", "batch_of"]

_TIME = pa.timestamp("us", tz="UTC")

TRANSITIONS = pa.schema(
    [
        pa.field("shard", pa.int32(), nullable=False),
        pa.field("run", pa.string(), nullable=False),
        pa.field("seq", pa.int64(), nullable=False),
        pa.field("ts", _TIME, nullable=False),
        pa.field("event", pa.string(), nullable=False),
        pa.field("key", pa.string(), nullable=False),
        pa.field("task_id", pa.string(), nullable=False),
        pa.field("attempt", pa.int32(), nullable=False),
        pa.field("losses", pa.int32(), nullable=False),
        pa.field("state", pa.string(), nullable=False),
        pa.field("priority", pa.int8(), nullable=False),
        pa.field("tenant", pa.string()),
        pa.field("ordering_key", pa.string()),
        pa.field("worker", pa.string()),
        pa.field("error", pa.string()),
        pa.field("reason", pa.string()),
        pa.field("due_at", _TIME),
    ]
)
"""one row per transition. ``run`` names the count that ``seq`` belongs to: an installation, or the start of a process"""

class Damaged(Exception):
    """Something in a journal that no version of this package has written."""


def batch_of(
    shard: int, run: str, entries: Sequence[Entry], start: int, end: int
) -> pa.RecordBatch:
    """Return the transitions from ``start`` to ``end`` of some entries, which come in their order.

    Raises `Damaged` where an entry is not one of ours.
    """
    sizes = [entry.size for entry in entries]
    seqs = [*chain.from_iterable(range(seq, seq + size) for seq, _, size in entries)]
    try:
        once = list(zip(*(entry.values for entry in entries), strict=True))
        columns = [_rows(values, sizes) for values in once[len(HEAD) :]]
        places = [*chain.from_iterable([place] * size for place, size in enumerate(sizes))]
        batch = _batch(shard, run, seqs, pa.array(places, pa.int32()), once, columns)
    except (pa.ArrowInvalid, ValueError) as error:
        raise Damaged(str(error)) from error
    low, high = bisect_left(seqs, start), bisect_right(seqs, end)
    return batch.slice(low, high - low)


def _rows(values: Sequence[bytes], sizes: Sequence[int]) -> list[bytes]:
    """Return a column's value of each transition."""
    whole = [
        value if size == 1 or b"\0" in value else b"\0".join([value] * size)
        for value, size in zip(values, sizes, strict=True)
    ]
    return b"\0".join(whole).split(b"\0") if whole else []


def _batch(
    shard: int,
    run: str,
    seqs: list[int],
    places: pa.Array,
    once: Sequence[Sequence[bytes]],
    columns: Sequence[Sequence[bytes]],
) -> pa.RecordBatch:
    head = {name: _text(values).take(places) for name, values in zip(HEAD, once, strict=False)}
    row = {name: _text(values) for name, values in zip(COLUMNS, columns, strict=True)}
    number = len(seqs)
    if pc.any(pc.not_equal(head["v"], str(JOURNAL_VERSION))).as_py():
        raise ValueError("a version that is not known")
    given = {
        "shard": pa.repeat(pa.scalar(shard, pa.int32()), number),
        "run": pa.repeat(run, number),
        "seq": pa.array(seqs, pa.int64()),
        "ts": _moments(head["ts"]),
        "event": head["event"],
        "key": head["key"],
        "task_id": row["task_id"],
        "attempt": row["attempt"].cast(pa.int32()),
        "losses": row["losses"].cast(pa.int32()),
        "state": head["state"],
        "priority": row["priority"].cast(pa.int8()),
        "tenant": _known(row["tenant"]),
        "ordering_key": _known(row["ordering_key"]),
        "worker": _known(head["worker"]),
        "error": _known(row["error"]),
        "reason": _known(head["reason"]),
        "due_at": _moments(_known(row["due_at"])),
    }
    return pa.RecordBatch.from_arrays([given[name] for name in TRANSITIONS.names], schema=TRANSITIONS)


def _text(values: Sequence[bytes]) -> pa.Array:
    return pa.array(values, pa.binary()).cast(pa.string())  # which looks whether it is UTF-8


def _known(texts: pa.Array) -> pa.Array:
    return pc.if_else(pc.equal(texts, ""), pa.scalar(None, pa.string()), texts)


def _moments(texts: pa.Array) -> pa.Array:
    return texts.cast(pa.int64()).cast(_TIME)
