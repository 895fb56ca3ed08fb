"""Reading what is in the store now: dead letters, and the tasks that are live.

Nothing is handed out for that and nothing changes. A read has a partition of Spark per queue; it sees each task as it
is when its turn comes, so what is read is no snapshot: every row says when it was looked at (``as_of``).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
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
from taskqueue_spark.sink.options import given_options
from taskqueue_spark.sink.store import SparkStore

_TEXT, _WHOLE, _TIME = spark.StringType(), spark.IntegerType(), spark.TimestampType()
_FAILURE = spark.StructType().add("attempt", _WHOLE).add("at", _TIME).add("error", _TEXT)

DEAD_LETTERS = (
    spark.StructType()
    .add("key", _TEXT, nullable=False)
    .add("task_id", _TEXT, nullable=False)
    .add("attempt", _WHOLE, nullable=False)
    .add("losses", _WHOLE, nullable=False)
    .add("reason", _TEXT, nullable=False)
    .add("failed_at", _TIME, nullable=False)
    .add("payload", spark.BinaryType(), nullable=False)
    .add("headers", spark.MapType(_TEXT, _TEXT))
    .add("priority", _WHOLE, nullable=False)
    .add("tenant", _TEXT)
    .add("ordering_key", _TEXT)
    .add("deadline", _TIME)
    .add("max_attempts", _WHOLE)
    .add("history", spark.ArrayType(_FAILURE))
    .add("as_of", _TIME, nullable=False)
)
"""one row per dead letter, by the names of `taskqueue_core.tasks.DeadLetter` and its task"""
TASKS = (
    spark.StructType()
    .add("key", _TEXT, nullable=False)
    .add("task_id", _TEXT, nullable=False)
    .add("state", _TEXT, nullable=False)
    .add("attempt", _WHOLE, nullable=False)
    .add("losses", _WHOLE, nullable=False)
    .add("priority", _WHOLE, nullable=False)
    .add("tenant", _TEXT)
    .add("ordering_key", _TEXT)
    .add("since", _TIME, nullable=False)
    .add("as_of", _TIME, nullable=False)
)
"""one row per task, by the names that a journal has for queues: each shard by its own. ``since``: as of `Listed`"""
_SCHEMAS = {"dead_letters": DEAD_LETTERS, "tasks": TASKS}
_OPTIONS = ("resource", "keys", "states")
_PAGE = 200
_LIVE = frozenset(state for state in State if state.live)
_US = 1_000_000


class TasksOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is read."""

    store: SparkStore
    resource: Literal["dead_letters", "tasks"]
    keys: tuple[str, ...] | None = None
    """of these queues; ``None`` for all"""
    states: frozenset[State] = _LIVE

    @classmethod
    def read(cls, options: Mapping[str, str]) -> Self:
        """Read options; lists are separated by commas. Raises `InvalidInput` or `ConfigurationError`."""
        given = given_options(options, _OPTIONS)
        resource = given.get("resource", "").lower()
        if resource not in _SCHEMAS:
            raise InvalidInput("option resource", "an unknown value", " or ".join(_SCHEMAS))
        keys, states, store = given.get("keys"), given.get("states"), SparkStore.read(options)
        if resource == "tasks" and store.name != "redis":
            raise ConfigurationError(
                "option backend: another one; allowed with resource=tasks: redis, whose records can be listed"
            )
        if resource != "tasks" and states is not None:
            raise ConfigurationError("option states: set; allowed with: resource=tasks")
        names = None if keys is None else tuple(name.strip() for name in keys.split(","))
        for name in names or ():
            check_name("option keys", name)
        return cls(
            store=store,
            resource=cast("Literal['dead_letters', 'tasks']", resource),
            keys=names,
            states=_LIVE if states is None else frozenset(map(_state, states.split(","))),
        )


def _state(name: str) -> State:
    try:
        return State(name.strip())
    except ValueError:
        raise InvalidInput("option states", "an unknown value", ", ".join(State)) from None


class _OfQueue(InputPartition):
    """The rows of one queue."""


class StoreReader(DataSourceReader):
    """Reads a resource of the store."""

    def __init__(self, options: TasksOptions, schema: spark.StructType) -> None:
        """Give the columns of ``schema``, in its order. Raises `InvalidInput` for one that there is not."""
        full = {field.name: field for field in _SCHEMAS[options.resource].fields}
        for field in schema.fields:
            if field.name not in full or field.dataType != full[field.name].dataType:
                raise InvalidInput(
                    f"column {field.name[:100]}",
                    "another name or type",
                    f"columns of {options.resource}",
                )
        self._options = options
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        """Return one for each queue."""
        with asyncio.Runner() as runner:
            keys = self._options.keys or runner.run(self._queues())
        return [_OfQueue(key) for key in keys]

    async def _queues(self) -> tuple[str, ...]:
        store = self._options.store
        if self._options.resource == "tasks":
            async with TaskLister(store.redis_settings()) as lister:
                return await lister.queues()
        async with store.opened() as backend:
            return await control_of(backend).queues()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Give the rows of a queue."""
        if not isinstance(partition, _OfQueue):  # Spark makes one where there are none
            return
        pages = self._tasks if self._options.resource == "tasks" else self._dead_letters
        arrow = to_arrow_schema(self._schema, timezone="UTC")
        value = pages(str(partition.value))
        with asyncio.Runner() as runner:
            try:
                while (rows := runner.run(_next(value))) is not None:
                    columns = [[row[name] for row in rows] for name in arrow.names]
                    arrays = [
                        pa.array(values, field.type)
                        for values, field in zip(columns, arrow, strict=True)
                    ]
                    yield pa.RecordBatch.from_arrays(arrays, schema=arrow)
            finally:
                runner.run(value.aclose())

    async def _tasks(self, key: str) -> Any:
        async with TaskLister(self._options.store.redis_settings()) as lister:
            async for page in lister.read(key, self._options.states):
                yield [_task_row(key, item) for item in page]

    async def _dead_letters(self, key: str) -> Any:
        async with self._options.store.opened() as backend:
            async for page in _pages(backend, key):
                now = round(backend.now() * _US)
                yield [_dead_letter_row(dead_letter) | {"as_of": now} for dead_letter in page]


async def _next(pages: AsyncIterator[list[dict[str, Any]]]) -> list[dict[str, Any]] | None:
    return await anext(pages, None)


async def _pages(backend: Backend, key: str) -> AsyncIterator[list[DeadLetter]]:
    """Give the dead letters that there were at the beginning, each once, also while others redrive some.

    Of those who die meanwhile some are among them.
    """
    dead_letters, observed, after = dead_letters_of(backend), set[str](), None
    await backend.health()  # a backend elsewhere tells its time with its first answer
    while page := await dead_letters.list(key, limit=_PAGE, after=after):
        # Where the page before ends with one that is not dead any more, pages start again.
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
        "key": task.key,
        "task_id": task.id,
        "attempt": dead_letter.attempt,
        "losses": dead_letter.losses,
        "reason": dead_letter.reason,
        "failed_at": round(dead_letter.failed_at * _US),
        "payload": task.payload,
        "headers": list(task.headers.items()),
        "priority": task.priority,
        "tenant": task.tenant,
        "ordering_key": task.ordering_key,
        "deadline": None if task.deadline is None else round(task.deadline * _US),
        "max_attempts": task.max_attempts,
        "history": [
            {"attempt": failure.attempt, "at": round(failure.at * _US), "error": failure.error}
            for failure in dead_letter.history
        ],
    }


def _task_row(key: str, item: Listed) -> dict[str, Any]:
    return {"key": key, **item._asdict(), "state": item.state.value}


def schema(options: Mapping[str, str]) -> spark.StructType:
    """Return the columns of the resource that ``options`` name."""
    return _SCHEMAS[TasksOptions.read(options).resource]


def reader(options: Mapping[str, str], schema: spark.StructType) -> StoreReader:
    """Return what reads the resource that ``options`` name. Raises `InvalidInput` or `ConfigurationError`."""
    return StoreReader(TasksOptions.read(options), schema)
