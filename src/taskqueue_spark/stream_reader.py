"""Reading a journal as a stream. The position is stored only in the checkpoint of the query."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)  # fmt: skip
from pyspark.sql.types import StructType

from taskqueue_spark.batch_reader import (
    ReadPartition,
    choice_of,
    open_journal,
    parts_of,
    spans_of,
    starting,
)
from taskqueue_spark.journals.contract import Journal, Range, ReadRange, Watch
from taskqueue_spark.offsets import Offsets, admitted, checked, renamed
from taskqueue_spark.options import ReadOptions

_NO_LIMIT = 2**62


class JournalStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream of a journal. Reading between two offsets always returns the same rows, as long as they still exist."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        options.check(stream=True)
        self._options = options
        # The option startingTimestamp defines where a query begins; it must not filter batches after a restart.
        self._choice = choice_of(options, schema)._replace(since=None)
        self._journal: Journal | None = None
        self._until: dict[str, ReadRange] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Leave out the open journal: Spark sends the reader to its workers, which open their own.
        return {**self.__dict__, "_journal": None}

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark defines the names of the methods
        """Return the offsets at which a query without a checkpoint begins."""
        journal, spans = self._now()
        offsets = checked(starting(self._options.starting, spans), spans, fail=self._options.fail)
        since = self._options.since
        if since is not None:
            for shard, (run, position) in offsets.items():
                if shard in spans:
                    offsets[shard] = run, journal.at(shard, since, position, spans[shard].end)
        return _marked(journal, spans, offsets).plain

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        if self._options.max_events is None and self._options.max_span is None:
            return ReadAllAvailable()
        return ReadMaxRows(self._options.max_events or _NO_LIMIT)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Return the offsets at which the next batch ends. Raises `HistoryMissing`."""
        journal, spans = self._now(quick=True)
        offsets = Offsets.of(start)
        if offsets == {shard: (span.run, span.end) for shard, span in spans.items()}:
            return start
        journal, spans = self._now()
        positions = checked(offsets, spans, fail=self._options.fail)
        for shard, span in spans.items():
            positions.setdefault(shard, (span.run, span.first))
        rows = limit.max_rows if isinstance(limit, ReadMaxRows) else _NO_LIMIT
        seconds = self._options.max_span if isinstance(limit, ReadMaxRows) else None
        ends = admitted(
            journal, positions, self._ends(spans), rows if rows < _NO_LIMIT else None, seconds
        )
        return start if ends == offsets else _marked(journal, spans, ends, offsets).plain

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Make the current end of the journal the end of the query."""
        self._until = self._now()[1]

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802
        """Return the offsets of the journal's end, for the progress of the query."""
        return Offsets(
            {shard: (span.run, span.end) for shard, span in self._now()[1].items()}
        ).plain

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Return the partitions to read between two offsets. Raises `HistoryMissing`."""
        journal, spans = self._now()
        begin, ends = Offsets.of(start), Offsets.of(end)
        former = renamed(begin, {shard: run for shard, (run, _) in ends.items()})
        marks = begin.marks
        begin = Offsets(
            {former.get(name, name): begin[name] for name in sorted(begin, key=former.__contains__)}
        )
        later = renamed(ends, {shard: span.run for shard, span in spans.items()})
        parts: list[InputPartition] = []
        for name, (run, position) in ends.items():
            shard = later.get(name, name)
            if shard not in spans and not self._options.fail:
                continue
            before, low = begin.get(name, ("", 0))
            if shard in spans and ((before and before != run) or name not in begin):
                # The shard is new, or was reset and failOnDataLoss is false.
                low = spans[shard].first
            offsets = checked(
                Offsets({shard: (run, low)}), spans, fail=self._options.fail and low < position
            )
            for there, (match, first) in offsets.items():
                if match == run:
                    mark = marks.get(name, "") if before == run else ""
                    part = Range(there, run, first, position, mark)
                    parts += self._parts(journal, part, low)
        return parts

    def _parts(self, journal: Journal, part: Range, low: int) -> list[InputPartition]:
        """Return the partitions that read one shard. ``low``: the position up to which the shard was read before."""
        if part.end < low and part.mark:
            # The store was restored to a state with fewer transitions.
            return [ReadPartition(part._replace(start=part.end), last=False)]
        if part.start != low:
            part = part._replace(mark="")
        return parts_of(journal, part, self._options.splits, last=part.start < part.end)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, ReadPartition):
            return
        watch = Watch.GAPS if self._options.fail else Watch.NOTHING
        with open_journal(self._options) as journal:
            yield from journal.read(partition.range, self._choice, watch)
            if partition.last:
                yield from journal.missing(partition.range, self._choice)

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing: only the settings of a journal determine how long it keeps transitions."""

    def stop(self) -> None:
        if self._journal is not None:
            journal, self._journal = self._journal, None
            journal.close()

    def _now(self, *, quick: bool = False) -> tuple[Journal, dict[str, ReadRange]]:
        if self._journal is None:
            journal = open_journal(self._options)
            spans_of(self._options, journal)
            self._journal = journal
        return self._journal, self._journal.spans(quick=quick)

    def _ends(self, spans: dict[str, ReadRange]) -> dict[str, ReadRange]:
        if self._until is None:
            return spans
        return {
            shard: span._replace(end=min(span.end, self._until[shard].end))
            for shard, span in spans.items()
            if shard in self._until
        }


def _marked(
    journal: Journal, spans: dict[str, ReadRange], offsets: Offsets, known: Offsets | None = None
) -> Offsets:
    """Add the mark of each position to ``offsets``. For a position that ``known`` contains, copy its mark."""
    for shard, position in offsets.items():
        if known is not None and known.get(shard) == position:
            mark = known.marks.get(shard, "")
        else:
            mark = journal.mark(shard, position[1]) if shard in spans else ""
        if mark:
            offsets.marks[shard] = mark
    return offsets
