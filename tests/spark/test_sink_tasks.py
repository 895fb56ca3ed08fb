"""Tests of converting rows to tasks, and of the sink's options, without Spark and without a store."""

from __future__ import annotations

import pickle
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import types as spark

from taskqueue_core.errors import ConfigurationError, InvalidInput
from taskqueue_core.tasks import Task
from taskqueue_spark.sink import writer
from taskqueue_spark.sink.options import RedriveOptions, SinkOptions
from taskqueue_spark.sink.rejected_rows import RejectedRows, job_of, reveal, sweep
from taskqueue_spark.sink.store import SparkStore
from taskqueue_spark.sink.tasks import TaskReader
from taskqueue_spark.task_reader import TasksOptions

TEXT, TIME = spark.StringType(), spark.TimestampType()


def columns(**more: spark.DataType) -> spark.StructType:
    """Return a schema with the column ``task_id`` and these columns."""
    fields = {"task_id": TEXT} | more
    return spark.StructType([spark.StructField(name, kind) for name, kind in fields.items()])


def test_every_field_of_a_task_has_a_column() -> None:
    """Each field of a task can be set by a column; null means the field's default (G8)."""
    schema = columns(
        key=TEXT,
        payload=TEXT,
        headers=spark.MapType(TEXT, TEXT),
        priority=spark.IntegerType(),
        tenant=TEXT,
        ordering_key=TEXT,
        deadline=TIME,
        not_before=spark.DoubleType(),
        max_attempts=spark.ShortType(),
    )
    moment = datetime(2030, 1, 1, 0, 0, 0, 250_000, tzinfo=UTC)
    rows: dict[str, list[Any]] = {
        "task_id": ["a", "b"],
        "key": ["resize", None],
        "payload": ['{"n": "ü"}', None],
        "headers": [[("trace", "1")], None],
        "priority": [9, None],
        "tenant": ["acme", None],
        "ordering_key": ["o", None],
        "deadline": [moment, None],
        "not_before": [12.5, None],
        "max_attempts": [3, None],
    }
    types = [pa.string()] * 3 + [
        pa.map_(pa.string(), pa.string()), pa.int32(), pa.string(), pa.string(), pa.timestamp("us", "UTC"),
        pa.float64(), pa.int16(),
    ]  # fmt: skip
    batch = pa.record_batch(
        [pa.array(values, kind) for values, kind in zip(rows.values(), types, strict=True)],
        names=list(rows),
    )
    found = TaskReader.of(schema, "other").read(batch)
    assert found.tasks == [
        Task(
            key="resize",
            id="a",
            payload='{"n": "ü"}'.encode(),
            headers={"trace": "1"},
            priority=9,
            tenant="acme",
            ordering_key="o",
            deadline=moment.timestamp(),
            not_before=12.5,
            max_attempts=3,
        ),
        Task(key="other", id="b"),
    ]


def test_rows_that_are_no_tasks_are_separated() -> None:
    """An invalid row does not affect the other rows of its batch, and its error shows none of its values (G8)."""
    schema = columns(payload=spark.BinaryType())
    batch = pa.record_batch(
        {"task_id": ["a", None, "b", "s e c r e t"], "payload": [b"1", b"2", b"{secret", b"4"]}
    )
    found = TaskReader.of(schema, "k").read(batch)
    assert [task.id for task in found.tasks] == ["a"]
    assert found.bad == [1, 2, 3]
    assert all("secret" not in str(error) and "s e c" not in str(error) for error in found.errors)
    assert TaskReader.of(schema, "k").read(batch.slice(0, 0)).tasks == []


@pytest.mark.parametrize(
    ("schema", "queue", "words"),
    [
        (spark.StructType().add("payload", TEXT), "k", "column task_id: got a schema without"),
        (columns(), None, "column key: got a schema without"),
        (columns(task=TEXT), "k", "column task: got an unknown column"),
        (columns(payload=spark.DoubleType()), "k", "allowed: binary or string"),
        (columns(headers=spark.MapType(TEXT, TIME)), "k", "a map of string to string"),
        (columns(deadline=TEXT), "k", "column deadline: got string"),
    ],
)
def test_a_schema_is_refused_early(schema: spark.StructType, queue: str | None, words: str) -> None:
    """An unsuitable schema is refused before anything is written, with what is allowed (G8)."""
    with pytest.raises(InvalidInput, match=words):
        TaskReader.of(schema, queue)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"chunkSize": "0"}, "option chunkSize: got a number out of range"),
        ({"wait": "nan"}, "option wait: got a number out of range"),
        ({"wait": "long"}, "option wait: got text that is not a number"),
        ({"rateLimit": "5"}, "options rateLimit and writers: only one is set"),
        ({"onInvalid": "drop"}, "option onInvalid: got an unknown value; allowed: fail or skip"),
        ({"invalidPath": "x"}, "option invalidPath is allowed only with onInvalid=skip"),
        ({"queue": "a b"}, "option queue: got"),
        ({"chunksise": "1"}, "unknown options: chunksise; allowed: resource, queue, chunkSize"),
        ({"url": "redis://u:secret@h"}, "option url: got a URL with a password"),
        ({"url": "redis://h", "urlEnv": "X"}, "options url and urlEnv: both are set"),
        ({"backend": "x.y", "url": "redis://h"}, "allowed only with the backends redis and server"),
        ({"backend": "server", "prefix": "x"}, "options prefix and partitions"),
        ({"partitions": "many"}, "option partitions: got text"),
        ({"path": "x"}, "option path is not supported"),
    ],
)
def test_options_are_checked(options: dict[str, str], words: str) -> None:
    """A wrong option raises an error that names it and what is allowed, and does not show its value (G8)."""
    with pytest.raises((InvalidInput, ConfigurationError), match=words) as told:
        SinkOptions.read(options)
    assert "secret" not in str(told.value)


def test_options_travel_and_do_not_care_for_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options can be pickled; a URL with a password is read from a variable on the executor (G8)."""
    options = SinkOptions.read(
        {"RATELIMIT": "100", "writers": "4", "urlENV": "QUEUE_URL", "path": "", "spark.x": "y"}
    )
    assert options.rate == 25
    store = pickle.loads(pickle.dumps(options)).store  # noqa: S301 - pickled by this test itself
    with pytest.raises(
        ConfigurationError, match="there is no environment variable 'QUEUE_URL' in this process"
    ):
        store.redis_settings()
    monkeypatch.setenv("QUEUE_URL", "redis://:secret@127.0.0.1:1")
    assert store.redis_settings().address.password == "secret"
    assert "secret" not in repr(store)


async def test_a_store_of_one_process_is_refused() -> None:
    """The memory backend is refused, because tasks in one executor's memory would be visible to no consumer (G8)."""
    with pytest.raises(ConfigurationError, match="use a shared backend"):
        async with SparkStore(name="memory").opened():
            pass


def test_what_a_sink_refuses() -> None:
    """Overwriting a queue, and unknown resources, actions and states are refused (G8)."""
    with pytest.raises(ConfigurationError, match="a queue cannot be overwritten"):
        writer.writer({"queue": "k"}, columns(), overwrite=True)
    with pytest.raises(ConfigurationError, match="a queue cannot be overwritten"):
        writer.writer({"queue": "k"}, columns(), overwrite=True, stream=True)
    with pytest.raises(InvalidInput, match="allowed: tasks or dead_letters"):
        writer.writer({"resource": "journal"}, columns(), overwrite=False)
    with pytest.raises(InvalidInput, match="allowed: redrive or discard"):
        RedriveOptions.read({"action": "forget"})
    with pytest.raises(ConfigurationError, match="resource=tasks needs the backend redis"):
        TasksOptions.read({"resource": "tasks", "backend": "server"})
    with pytest.raises(InvalidInput, match="option states: got an unknown value"):
        TasksOptions.read({"resource": "tasks", "states": "waiting,asleep"})


def spoil(folder: str, batch: pa.RecordBatch) -> None:
    """Fail after a row was set aside."""
    with RejectedRows(folder, "job") as aside:
        aside.put(batch, [1], ["this"])
        aside.put(batch, [9], ["what is not there"])


def test_bad_rows_are_put_aside_once(tmp_path: Any) -> None:
    """Rows set aside are hidden until the commit; a replay replaces and an abort removes them (G8; fault L1)."""
    folder = str(tmp_path / "aside")
    batch = pa.record_batch({"task_id": ["a", "b", "c"]})
    names = []
    for _ in range(3):
        with RejectedRows(folder, "job") as aside:
            aside.put(batch, [0], ["this"])
            aside.put(batch, [2], ["that"])
        names.append(aside.name)
    with pytest.raises(IndexError):
        spoil(folder, batch)
    reveal(folder, names[0], "7-00000")
    reveal(folder, names[1], "7-00000")
    reveal(folder, names[1], "7-00000")
    with RejectedRows(folder, "other") as aside:
        aside.put(batch, [0], ["this"])
    assert {job_of(name) for name in names} == {"job"}
    sweep(folder, "job")
    assert len(list((tmp_path / "aside").iterdir())) == 2
    sweep(folder, "other")
    sweep(str(tmp_path / "none"), "other")
    (file,) = (tmp_path / "aside").iterdir()
    assert file.name == "7-00000.parquet"
    assert pq.read_table(file).to_pydict() == {"task_id": ["a", "c"], "reason": ["this", "that"]}
    for nothing in (RejectedRows(folder, "job"), RejectedRows(None, "job")):
        with nothing:
            nothing.put(batch, [], [])
        assert nothing.name == ""
