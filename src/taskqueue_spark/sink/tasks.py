"""Conversion of rows to tasks: the allowed columns, and a fast conversion of Arrow batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as spark

from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import check_name
from taskqueue_core.tasks import DEFAULT_PRIORITY, Task

_TEXT = (spark.StringType,)
_WHOLE = (spark.ByteType, spark.ShortType, spark.IntegerType, spark.LongType)
_TIME = (spark.TimestampType, spark.DoubleType, spark.LongType, spark.IntegerType)

COLUMNS: dict[str, tuple[type[spark.DataType], ...]] = {
    "task_id": _TEXT,
    "key": _TEXT,
    "payload": (spark.BinaryType, spark.StringType),
    "headers": (spark.MapType,),
    "priority": _WHOLE,
    "tenant": _TEXT,
    "ordering_key": _TEXT,
    "deadline": _TIME,
    "not_before": _TIME,
    "max_attempts": _WHOLE,
}
"""the columns of tasks and their types. A time is a timestamp or Unix seconds; a payload is JSON text"""
_DEFAULTS = {"payload": b"null", "priority": DEFAULT_PRIORITY}
"""the value that replaces null in each of these columns"""
_ALWAYS = ("id", "key", "payload")
_MICROSECONDS = 1_000_000


class Rows(NamedTuple):
    """The result of converting a batch: its tasks and its invalid rows."""

    tasks: list[Task]
    bad: list[int]
    """indexes of the rows that are not valid tasks"""
    errors: list[InvalidInput]
    """the error of each invalid row, which quotes no values"""


def check_columns(
    schema: spark.StructType,
    allowed: dict[str, tuple[type[spark.DataType], ...]],
    needed: Sequence[str],
) -> None:
    """Raise `InvalidInput` if a schema lacks a column in ``needed``, or has a name or type that ``allowed`` lacks."""
    for field in schema.fields:
        if field.name not in allowed:
            raise InvalidInput(
                f"column {field.name[:100]}",
                "an unknown column",
                f"{', '.join(allowed)} (select only these)",
            )
        kinds = allowed[field.name]
        text_map = not isinstance(field.dataType, spark.MapType) or (
            isinstance(field.dataType.keyType, spark.StringType)
            and isinstance(field.dataType.valueType, spark.StringType)
        )
        if not isinstance(field.dataType, kinds) or not text_map:
            names = " or ".join(kind.__name__.removesuffix("Type").lower() for kind in kinds)
            raise InvalidInput(
                f"column {field.name}",
                field.dataType.simpleString()[:100],
                "a map of string to string" if kinds == (spark.MapType,) else names,
            )
    for name in needed:
        if name not in schema.names:
            raise InvalidInput(
                f"column {name}", "a schema without this column", "a schema with this column"
            )


class TaskReader(msgspec.Struct, frozen=True):
    """A converter of rows to tasks. All rows have the same schema."""

    names: tuple[str, ...]
    queue: str | None

    @classmethod
    def of(cls, schema: spark.StructType, queue: str | None) -> TaskReader:
        """Return a converter for a schema. ``queue``: the queue of rows that name none. Raises `InvalidInput`."""
        check_columns(schema, COLUMNS, ["task_id"] if queue else ["task_id", "key"])
        if queue is not None:
            check_name("option queue", queue)
        return cls(tuple(schema.names), queue)

    def read(self, batch: pa.RecordBatch) -> Rows:
        """Convert a batch to tasks, and report its invalid rows."""
        number = batch.num_rows
        columns = {name: self._column(name, batch) for name in COLUMNS if name in self.names}
        columns["id"] = columns.pop("task_id")
        columns.setdefault("key", [self.queue] * number)
        columns.setdefault("payload", [b"null"] * number)
        try:
            return Rows(_tasks(columns), [], [])
        except InvalidInput:
            return _one_by_one(columns)

    def _column(self, name: str, batch: pa.RecordBatch) -> list[Any]:
        column = batch.column(self.names.index(name))
        if name in {"deadline", "not_before"}:
            return _seconds(column)
        if name == "headers":
            return [dict(pairs) if pairs else {} for pairs in column.to_pylist()]
        values = (column.cast(pa.large_binary()) if name == "payload" else column).to_pylist()
        default = self.queue if name == "key" else _DEFAULTS.get(name)
        if column.null_count and default is not None:
            return [default if value is None else value for value in values]
        return list(values)


def _tasks(columns: dict[str, list[Any]]) -> list[Task]:
    id_, key, payload = (columns[name] for name in ("id", "key", "payload"))
    more = {name: values for name, values in columns.items() if name not in _ALWAYS}
    if not more:
        # Most tasks have no other columns, and this shortcut is faster for them.
        return [
            Task(id=item, key=queue, payload=text)
            for item, queue, text in zip(id_, key, payload, strict=True)
        ]
    rest = (dict(zip(more, row, strict=True)) for row in zip(*more.values(), strict=True))
    return [
        Task(id=item, key=queue, payload=text, **others)
        for item, queue, text, others in zip(id_, key, payload, rest, strict=True)
    ]


def _one_by_one(columns: dict[str, list[Any]]) -> Rows:
    rows = Rows([], [], [])
    for index, values in enumerate(zip(*columns.values(), strict=True)):
        row = dict(zip(columns, values, strict=True))
        try:
            rows.tasks.append(Task(**row))
        except InvalidInput as error:
            rows.bad.append(index)
            rows.errors.append(error)
    return rows


def _seconds(column: pa.Array) -> list[Any]:
    if not pa.types.is_timestamp(column.type):
        return list(column.to_pylist())
    whole = column.cast(pa.timestamp("us", column.type.tz)).cast(pa.int64())
    return list(pc.divide(whole.cast(pa.float64(), safe=False), _MICROSECONDS).to_pylist())
