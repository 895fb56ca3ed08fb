"""Reading the current content of the store: dead letters, and tasks (by default only live tasks).

Reading neither delivers nor changes tasks. A read has one Spark partition per queue. The rows of a queue are read page
by page, so they do not form a snapshot: the column ``as_of`` is the time at which a row was read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, Literal, Self, cast

import msgspec
import pyarrow as pa
from pyspark.sql import types as spark
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema

from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import control_of, dead_letters_of
from taskqueue_core.errors import ConfigurationError, InvalidInput
from taskqueue_core.limits import check_name
from taskqueue_core.tasks import DeadLetter, State
from taskqueue_redis.task_listing import Listed, TaskLister
from taskqueue_spark.async_items import items_of
from taskqueue_spark.option_values import OptionValues
from taskqueue_spark.sink.store import STORE_OPTIONS, SparkStore

_TEXT, _WHOLE, _TIME = spark.StringType(), spark.IntegerType(), spark.TimestampType()
_FAILURE = spark.StructType().add("attempt", _WHOLE).add("at", _TIME).add("error", _TEXT)


def _struct(*columns: tuple[str, spark.DataType], nullable: Sequence[str]) -> spark.StructType:
    return spark.StructType(
        [spark.StructField(name, kind, name in nullable) for name, kind in columns]
    )


_OPTIONAL = ("headers", "tenant", "ordering_key", "deadline", "max_attempts", "history")
_OWNERS = (("priority", _WHOLE), ("tenant", _TEXT), ("ordering_key", _TEXT))
DEAD_LETTERS = _struct(
    ("key", _TEXT), ("task_id", _TEXT), ("attempt", _WHOLE), ("losses", _WHOLE), ("reason", _TEXT),
    ("failed_at", _TIME), ("payload", spark.BinaryType()), ("headers", spark.MapType(_TEXT, _TEXT)), *_OWNERS,
    ("deadline", _TIME), ("max_attempts", _WHOLE), ("history", spark.ArrayType(_FAILURE)), ("as_of", _TIME),
    nullable=_OPTIONAL,
)  # fmt: skip
"""schema of one row per dead letter, with the field names of `taskqueue_core.tasks.DeadLetter` and of its task"""
TASKS = _struct(
    ("key", _TEXT), ("task_id", _TEXT), ("state", _TEXT), ("attempt", _WHOLE), ("losses", _WHOLE), *_OWNERS,
    ("since", _TIME), ("as_of", _TIME), nullable=_OPTIONAL,
)  # fmt: skip
"""schema of one row per task

If a queue has shards, ``key`` names the shard. ``since``: time of the last change of the record; see `Listed`.
"""
_SCHEMAS = {"dead_letters": DEAD_LETTERS, "tasks": TASKS}
_PAGE = 200
_LIVE = frozenset(state for state in State if state.live)
_US = 1_000_000


class TasksOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The resource to read, and the queues and states to which the read is restricted."""

    store: SparkStore
    resource: Literal["dead_letters", "tasks"]
    keys: tuple[str, ...] | None = None
    """the queues to read; ``None``: all queues"""
    states: frozenset[State] = _LIVE

    @property
    def schema(self) -> spark.StructType:
        """The columns of the resource, as a Spark schema."""
        return _SCHEMAS[self.resource]

    @classmethod
    def read(cls, options: Mapping[str, str]) -> Self:
        """Convert the options that Spark passes. Raises `InvalidInput` or `ConfigurationError`."""
        given = OptionValues(options, ("resource", "keys", "states", *STORE_OPTIONS))
        resource = given.choice("resource", *_SCHEMAS)
        keys, states, store = given.names("keys"), given.names("states"), SparkStore.read(options)
        if resource == "tasks" and store.name != "redis":
            raise ConfigurationError(
                "option backend: resource=tasks needs the backend redis, because only its tasks can be listed"
            )
        if resource != "tasks" and states is not None:
            raise ConfigurationError("option states is allowed only with resource=tasks")
        for name in keys or ():
            check_name("option keys", name)
        if not set(states or ()) <= set(State):
            raise InvalidInput("option states", "an unknown value", ", ".join(State))
        return cls(
            store=store,
            resource=cast("Literal['dead_letters', 'tasks']", resource),
            keys=keys,
            states=_LIVE if states is None else frozenset(map(State, states)),
        )


class _QueuePartition(InputPartition):
    """A partition with the rows of one queue."""


class StoreReader(DataSourceReader):
    """A batch reader of dead letters or tasks."""

    def __init__(self, options: Mapping[str, str], schema: spark.StructType) -> None:
        """Create a reader of the columns in ``schema``, in order. Raises `InvalidInput` or `ConfigurationError`."""
        self._options = TasksOptions.read(options)
        self._schema = schema
        types = {field.name: field.dataType for field in self._options.schema.fields}
        for field in schema.fields:
            if types.get(field.name) != field.dataType:
                column = f"column {field.name[:100]}"
                allowed = f"only the columns of resource={self._options.resource}, with their types"
                raise InvalidInput(column, "an unknown column, or a wrong column type", allowed)

    def partitions(self) -> list[InputPartition]:
        with asyncio.Runner() as runner:
            keys = self._options.keys or runner.run(self._queues())
        return [_QueuePartition(key) for key in keys]

    async def _queues(self) -> tuple[str, ...]:
        store = self._options.store
        if self._options.resource == "tasks":
            async with TaskLister(store.redis_settings()) as lister:
                return await lister.queues()
        async with store.opened() as backend:
            return await control_of(backend).queues()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, _QueuePartition):
            # Spark passes a partition of its own if there is no queue.
            return
        pages = self._tasks if self._options.resource == "tasks" else self._dead_letters
        arrow = to_arrow_schema(self._schema, timezone="UTC")
        with (
            asyncio.Runner() as runner,
            closing(items_of(runner, pages(str(partition.value)))) as groups,
        ):
            for rows in groups:
                arrays = [
                    pa.array([row[field.name] for row in rows], field.type) for field in arrow
                ]
                yield pa.RecordBatch.from_arrays(arrays, schema=arrow)

    async def _tasks(self, key: str) -> Any:
        async with TaskLister(self._options.store.redis_settings()) as lister:
            async for page in lister.read(key, self._options.states):
                yield [_task_row(key, item) for item in page]

    async def _dead_letters(self, key: str) -> Any:
        async with self._options.store.opened() as backend:
            async for page in _pages(backend, key):
                now = round(backend.now() * _US)
                yield [_dead_letter_row(dead_letter) | {"as_of": now} for dead_letter in page]


async def _pages(backend: Backend, key: str) -> AsyncIterator[list[DeadLetter]]:
    """Yield pages of dead letters. Each dead letter is included at most once.

    Dead letters that are redriven during the read may be left out. Tasks that become dead letters during the read may
    be included.
    """
    dead_letters, observed, after = dead_letters_of(backend), set[str](), None
    await backend.health()  # a remote backend learns the server's clock from the first response
    while page := await dead_letters.list(key, limit=_PAGE, after=after):
        # If the last dead letter of a page was redriven, the next page starts from the beginning again.
        fresh = [dead_letter for dead_letter in page if dead_letter.task.id not in observed]
        observed.update(dead_letter.task.id for dead_letter in fresh)
        if fresh:
            yield fresh
        after = page[-1].task.id
        if len(page) < _PAGE:
            return


def _dead_letter_row(dead_letter: DeadLetter) -> dict[str, Any]:
    task = dead_letter.task
    return {
        **msgspec.structs.asdict(task),
        **msgspec.structs.asdict(dead_letter),
        "task_id": task.id,
        "failed_at": round(dead_letter.failed_at * _US),
        "headers": list(task.headers.items()),
        "deadline": None if task.deadline is None else round(task.deadline * _US),
        "history": [
            {"attempt": failure.attempt, "at": round(failure.at * _US), "error": failure.error}
            for failure in dead_letter.history
        ],
    }


def _task_row(key: str, item: Listed) -> dict[str, Any]:
    return {"key": key, **item._asdict(), "state": item.state.value}
