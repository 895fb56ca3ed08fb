"""Reading a journal as a DataFrame, from a start to an end that are fixed when Spark plans the read."""

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
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from taskqueue_core.errors import InvalidInput
from taskqueue_spark.columns import TRANSITIONS
from taskqueue_spark.journals.contract import Choice, Journal, Range, ReadRange, Watch
from taskqueue_spark.offsets import Offsets, checked, renamed
from taskqueue_spark.option_values import microseconds
from taskqueue_spark.options import OffsetMap, ReadOptions


def open_journal(options: ReadOptions, *, torn: bool = False) -> Journal:
    """Return the journal that the options name. Raises `ConfigurationError`.

    ``torn``: if a journal file has not changed for 5 seconds, report a last line without a line end as damaged.
    """
    if options.backend == "lines":
        from taskqueue_spark.journals.lines import LinesJournal  # noqa: PLC0415 - Spark workers import only the reader that they need

        return LinesJournal(options.path, torn=torn)
    from taskqueue_spark.journals.redis import RedisJournal  # noqa: PLC0415

    return RedisJournal(options.store.redis_settings(), options.fetch)


@dataclass
class ReadPartition(InputPartition):
    """A range of a shard that one Spark task reads."""

    range: Range
    last: bool
    """whether damaged and missing entries after this range are also reported; true only for a shard's last range"""


def spark_schema() -> StructType:
    """Return `TRANSITIONS` as a Spark schema."""
    return from_arrow_schema(TRANSITIONS)


def choice_of(options: ReadOptions, schema: StructType) -> Choice:
    """Return the columns and rows to read. Raises `InvalidInput` if a column differs from `TRANSITIONS`."""
    known = {field.name: field for field in spark_schema()}
    for field in schema:
        own = known.get(field.name)
        if own is None or own.dataType != field.dataType or (own.nullable and not field.nullable):
            columns = (f"{field.name} {field.dataType.simpleString()}" for field in known.values())
            allowed = f"only these columns, without NOT NULL: {', '.join(columns)}"
            raise InvalidInput("schema", "an unknown column, a wrong type, or NOT NULL", allowed)
    fields = [TRANSITIONS.field(field.name).with_nullable(field.nullable) for field in schema]
    return Choice(
        pa.schema(fields), options.events, options.keys, options.since, options.until, options.batch
    )


class JournalReader(DataSourceReader):
    """A batch reader of a journal. By default, it reads all transitions that exist when Spark plans the read."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        options.check(stream=False)
        self._options = options
        self._choice = choice_of(options, schema)

    def partitions(self) -> list[InputPartition]:
        """Return the partitions to read. With ``failOnDataLoss``, raises `HistoryMissing` for missing transitions."""
        options, choice = self._options, self._choice
        with open_journal(options, torn=True) as journal:
            spans = spans_of(options, journal)
            start = checked(starting(options.starting, spans), spans, fail=options.fail)
            offsets = ending(options.ending, spans)
            # Check only shards with transitions to read; nothing that this read needs can be missing in other shards.
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
        if not isinstance(partition, ReadPartition):
            return
        watch = Watch.NOTHING
        if self._options.fail:
            # A full journal keeps losing its oldest entries. This is an error only if startingOffsets names positions,
            # because "earliest" means the first transition that still exists.
            watch = Watch.CUT if isinstance(self._options.starting, Offsets) else Watch.RESET
        with open_journal(self._options) as journal:
            yield from journal.read(partition.range, self._choice, watch)
            if partition.last:
                yield from journal.strays(partition.range, self._choice)
                yield from journal.missing(partition.range, self._choice)


class FilteringReader(JournalReader):
    """A batch reader that also accepts filters. Spark must be configured to push filters down."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark defines this signature
        """Restrict the read by the filters, and yield the filters that Spark must still evaluate itself."""
        for condition in filters:
            taken, whole = _narrowed(self._choice, condition)
            if taken is not None:
                self._choice = taken
            if not whole:
                yield condition


def _narrowed(choice: Choice, condition: Filter) -> tuple[Choice | None, bool]:
    """Return the choice restricted by a filter (``None`` if not supported), and whether Spark can drop the filter."""
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
    """Return the readable range of each shard. Raises `InvalidInput` for a path that does not exist."""
    spans = journal.spans()
    if not spans and not Path(options.path.removeprefix("file://")).is_dir():
        allowed = "a file, folder or pattern that this machine and all executors can read"
        raise InvalidInput("option path", "a path that does not exist", allowed)
    return spans


def starting(result: OffsetMap, spans: dict[str, ReadRange]) -> Offsets:
    """Return the position at which to start reading each shard. A shard without an offset is read from its start."""
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
    """Return the position at which to stop reading each shard. A shard without an offset is not read."""
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
    """Divide a range into partitions.

    ``splits``: maximum number of partitions; 0 for the default. ``last``: whether damaged and missing entries after the
    range must also be reported.
    """
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
    """Return where a read that is planned now would end, as a value of the option ``endingOffsets``."""

    def poll() -> dict[str, ReadRange]:
        with open_journal(options, torn=True) as journal:
            return spans_of(options, journal)

    with ThreadPoolExecutor(
        1
    ) as thread:  # an event loop may already be running in this thread, as in a notebook
        spans = thread.submit(poll).result()
    return ending(options.ending, spans).text


def has_fewer_rows(options: ReadOptions, than: int) -> bool:
    """Return whether a journal has fewer than ``than`` transitions, without counting all of them."""
    with open_journal(options, torn=True) as journal:
        for shard, span in spans_of(options, journal).items():
            if journal.after(shard, span.first, than, span.end) < span.end:
                return False
            than -= journal.rows(shard, span.first, span.end)
        return than > 0


def read_journal(
    spark: SparkSession, options: Mapping[str, str], *, pin: bool = True, pushdown: bool = False
) -> DataFrame:
    """Return the transitions of a journal. ``options``: options of the data source.

    ``pin``: fix the end of the read now, so that every evaluation of the DataFrame reads up to the same transition. A
    full journal may still lose its oldest transitions between two evaluations. The later evaluation then has a gap in
    the numbers. It fails instead if ``startingOffsets`` names positions and ``failOnDataLoss`` is true, the default.
    ``pushdown``: let Spark's filters restrict the read, and set the Spark option that this requires.

    Raises `InvalidInput`, `ConfigurationError`, `BackendUnavailable`.
    """
    reader = spark.read.format("taskqueue").options(**options)
    if pin:
        reader = reader.option("endingOffsets", pinned(ReadOptions.of(options)))
    if pushdown:
        spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
        reader = reader.option("pushdown", "true")
    return reader.load()
