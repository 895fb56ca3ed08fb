"""Reading a journal as a DataFrame: where it begins and ends is settled when the read is planned."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import (
    DataSourceReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)  # fmt: skip
from pyspark.sql.types import (
    ByteType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)  # fmt: skip

from taskqueue_core.errors import InvalidInput
from taskqueue_spark.columns import TRANSITIONS
from taskqueue_spark.journals import Choice, Journal, Range, ReadRange, Watch
from taskqueue_spark.offsets import Offsets, checked, renamed
from taskqueue_spark.options import OffsetMap, ReadOptions, microseconds, redis_settings


def opened(options: ReadOptions, *, torn: bool = False) -> Journal:
    """Return the journal that options name, as a context manager of this process.

    ``torn``: a last line without an end counts as there. Raises `ConfigurationError`.
    """
    if options.backend == "lines":
        from taskqueue_spark.journals.lines import LinesJournal  # noqa: PLC0415 - a worker loads what it needs

        return LinesJournal(options.path, torn=torn)
    from taskqueue_spark.journals.redis import RedisJournal  # noqa: PLC0415 - as above

    settings = redis_settings(options.url, options.url_env, options.prefix, options.partitions)
    return RedisJournal(settings, options.fetch)


_KINDS: dict[str, DataType] = {
    "int32": IntegerType(), "int64": LongType(), "int8": ByteType(), "string": StringType(),
    "timestamp[us, tz=UTC]": TimestampType(),
}  # fmt: skip


@dataclass
class ReadPartition(InputPartition):
    """A range of a shard that one task reads."""

    range: Range
    last: bool
    """whether what is read of the shard ends here"""


def spark_schema() -> StructType:
    """Return `TRANSITIONS` as Spark has it."""
    return StructType(
        [StructField(field.name, _KINDS[str(field.type)], field.nullable) for field in TRANSITIONS]
    )


def choice_of(options: ReadOptions, schema: StructType) -> Choice:
    """Return what is wanted. Raises `InvalidInput` for columns that a transition does not have."""
    known = {field.name: field for field in spark_schema()}
    for field in schema:
        own = known.get(field.name)
        if own is None or own.dataType != field.dataType or (own.nullable and not field.nullable):
            allowed = ", ".join(
                f"{field.name} {field.dataType.simpleString()}" for field in known.values()
            )
            raise InvalidInput(
                "schema", "an unknown column, or one of another type", f"some of: {allowed}"
            )
    columns = [
        pa.field(field.name, TRANSITIONS.field(field.name).type, field.nullable) for field in schema
    ]
    return Choice(
        pa.schema(columns),
        options.events,
        options.keys,
        options.since,
        options.until,
        options.batch,
    )


class JournalReader(DataSourceReader):
    """Reads a journal once: what there is when it is planned, if nothing else is told."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        options.check(stream=False)
        self._options = options
        self._choice = choice_of(options, schema)

    def partitions(self) -> list[InputPartition]:
        """Plan."""
        options, choice = self._options, self._choice
        with opened(options, torn=True) as journal:
            spans = spans_of(options, journal)
            start = checked(starting(options.starting, spans), spans, fail=options.fail)
            offsets = ending(options.ending, spans)
            # Where there was nothing to read nothing can be missing.
            batch = {
                name: offsets[name]
                for name in offsets
                if start.get(name, ("", 0))[1] < offsets[name][1]
            }
            checked(Offsets(batch), spans, fail=options.fail)
            ends = checked(offsets, spans, fail=False)
            parts: list[InputPartition] = []
            for shard in sorted(spans.keys() & ends.keys()):
                run, low = start[shard]
                low, high = _between(journal, shard, low, ends[shard][1], choice)
                last = choice.until is None
                part = Range(shard, run, low, high)
                parts += parts_of(journal, part, options.splits, last=last)
        return parts

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read a part."""
        if not isinstance(partition, ReadPartition):
            return
        watch = Watch.NOTHING
        if self._options.fail:
            # Who asks for the earliest means what is there; a full journal is cut off all the time.
            watch = Watch.CUT if isinstance(self._options.starting, Offsets) else Watch.RESET
        with opened(self._options) as journal:
            yield from journal.read(partition.range, self._choice, watch)
            if partition.last:
                yield from journal.strays(partition.range, self._choice)
                yield from journal.missing(partition.range, self._choice)


class FilteringReader(JournalReader):
    """A reader that takes filters, where Spark is told to pass them on."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        """Take what narrows the read; give back what Spark has to look at again."""
        for condition in filters:
            taken, whole = _narrowed(self._choice, condition)
            if taken is not None:
                self._choice = taken
            if not whole:
                yield condition


def _narrowed(choice: Choice, condition: Filter) -> tuple[Choice | None, bool]:
    """Return the choice that a filter leaves, if it can be said, and whether that is all that the filter asks."""
    match condition:
        case EqualTo(("event" | "key" as name,), value):
            return _among(choice, name, [value]), True
        case In(("event" | "key" as name,), values):
            return _among(choice, name, values), True
        case EqualTo(("ts",), value):
            time = microseconds(value)
            return _within(choice, time, time + 1), False
        case GreaterThan(("ts",), value) | GreaterThanOrEqual(("ts",), value):
            return _within(choice, microseconds(value), None), False
        case LessThan(("ts",), value) | LessThanOrEqual(("ts",), value):
            return _within(choice, None, microseconds(value) + 1), False
        case _:
            return None, False


def _among(choice: Choice, name: str, values: Iterable[Any]) -> Choice:
    names = frozenset(values)
    if name == "event":
        return choice._replace(events=names if choice.events is None else choice.events & names)
    return choice._replace(keys=names if choice.keys is None else choice.keys & names)


def _within(choice: Choice, since: int | None, until: int | None) -> Choice:
    low = [time for time in (choice.since, since) if time is not None]
    high = [time for time in (choice.until, until) if time is not None]
    return choice._replace(since=max(low, default=None), until=min(high, default=None))


def spans_of(options: ReadOptions, journal: Journal) -> dict[str, ReadRange]:
    """Return what there is. Raises `InvalidInput` where a path names nothing at all, as it may be mistyped."""
    spans = journal.spans()
    if not spans and not Path(options.path.removeprefix("file://")).is_dir():
        allowed = "a file, folder or pattern that this machine and all executors can read"
        raise InvalidInput("path", "a path that does not exist", allowed)
    return spans


def starting(result: OffsetMap, spans: dict[str, ReadRange]) -> Offsets:
    """Return where a read begins; a shard that is not named at its first position."""
    if result == "latest":
        return Offsets({shard: (span.run, span.end) for shard, span in spans.items()})
    first = Offsets({shard: (span.run, span.first) for shard, span in spans.items()})
    if not isinstance(result, Offsets):
        return first
    names = renamed(result, {shard: span.run for shard, span in spans.items()})
    return Offsets(
        {**first, **{names.get(shard, shard): position for shard, position in result.items()}}
    )


def ending(result: OffsetMap, spans: dict[str, ReadRange]) -> Offsets:
    """Return behind which positions a read ends; a shard that is not named is not read."""
    if isinstance(result, Offsets):
        return result
    last = result == "latest"
    return Offsets(
        {shard: (span.run, span.end if last else span.first) for shard, span in spans.items()}
    )


def _between(journal: Journal, shard: str, low: int, high: int, choice: Choice) -> tuple[int, int]:
    high = max(low, high)
    if choice.since is not None and low < high:
        low = journal.at(shard, choice.since, low, high)
    if choice.until is not None and low < high:
        high = journal.at(shard, choice.until, low, high)
    return low, high


def parts_of(
    journal: Journal, part: Range, splits: int, *, last: bool = False
) -> list[InputPartition]:
    """Return the tasks that read a range. ``splits``: how many; 0 for as many as it is worth."""
    shard, _, start, end, _ = part
    if start >= end:
        return [ReadPartition(part, last=True)] if last else []
    indexes = journal.split(shard, start, end, splits)
    parts = [
        ReadPartition(
            part._replace(start=a, end=b, mark=part.mark if a == start else ""), last=False
        )
        for a, b in pairwise(indexes)
    ]
    parts[-1].last = last
    return [*parts]


def pinned(options: ReadOptions) -> str:
    """Return where a read would end now, as ``endingOffsets``."""

    def poll() -> dict[str, ReadRange]:
        with opened(options, torn=True) as journal:
            return spans_of(options, journal)

    with ThreadPoolExecutor(1) as thread:  # a notebook's own has an event loop that runs
        spans = thread.submit(poll).result()
    return ending(options.ending, spans).text


def fewer(options: ReadOptions, than: int) -> bool:
    """Whether a journal has fewer transitions than so many, without a look at more than those.

    Raises `ConfigurationError` and `BackendUnavailable`.
    """
    with opened(options, torn=True) as journal:
        for shard, span in spans_of(options, journal).items():
            if journal.after(shard, span.first, than, span.end) < span.end:
                return False
            than -= journal.rows(shard, span.first, span.end)
        return than > 0


def read_journal(
    spark: SparkSession, options: Mapping[str, str], *, pin: bool = True, pushdown: bool = False
) -> DataFrame:
    """Return the transitions of a journal. ``options`` are those of the source.

    ``pin``: the end is settled here, by this process, so that no look at the DataFrame sees more than another. A
    journal that is full loses its oldest transitions meanwhile, which the numbers show; where ``startingOffsets``
    names the first, that is an error. ``pushdown``: filters narrow what is read; Spark's setting for it is made.

    Raises `InvalidInput`, `ConfigurationError`, `BackendUnavailable`.
    """
    reader = spark.read.format("taskqueue").options(**options)
    if pin:
        reader = reader.option("endingOffsets", pinned(ReadOptions.of(options)))
    if pushdown:
        spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
        reader = reader.option("pushdown", "true")
    return reader.load()
