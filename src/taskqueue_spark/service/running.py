"""The streaming service as a process: one query, watched until it ends or is asked to."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from taskqueue_core.errors import ConfigurationError
from taskqueue_spark.options import ReadOptions
from taskqueue_spark.service.alerts import Alerts, conditions
from taskqueue_spark.service.balance import RedisLedgers
from taskqueue_spark.service.batches import Batches
from taskqueue_spark.service.options import StreamOptions
from taskqueue_spark.service.state import State, load, replace

__all__ = ["Summary", "run"]

_TICK = 0.2
_DEFAULTS = {"startingOffsets": "earliest", "failOnDataLoss": "false"}
"""what is missing is an alert here, and no end"""
_TIMES = ("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
"""what every reader of Parquet takes for a time, and can skip files by; Spark's own is neither"""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What a run of the service did."""

    batches: int
    """that were worked off by this run"""
    transitions: int
    """in the archive"""
    damaged: int
    balanced: bool | None
    """over all queues; ``None`` where the journal cannot tell"""
    alerts: list[str]
    """what is amiss now"""


def run(
    spark: SparkSession,
    options: StreamOptions,
    *,
    say: Callable[[str], None] = lambda _: None,
    stop: threading.Event | None = None,
) -> Summary:
    """Archive and watch a journal until SIGTERM, SIGINT or ``stop``, or with ``once`` until all is read.

    ``say`` gets a line per batch. The batch that is being worked on is finished first; whatever ends
    the process before that, the next run goes on where this one was, and nothing is lost or doubled. Raises Spark's
    error where the query fails, and `ConfigurationError` where the folder is not the service's.
    """
    for folder in (options.archive, options.folder / "open"):
        folder.mkdir(parents=True, exist_ok=True)
    if any(not place.name.startswith("batch=") for place in options.archive.iterdir()):
        raise ConfigurationError(
            f"{options.archive}: a snapshot is there; allowed: a folder of the service's own"
        )
    watch = _Watch(options, say)
    with _asked_to_stop(stop or threading.Event()) as stopping:
        query = _start(spark, options)
        try:
            while query.isActive and not stopping.is_set():
                query.awaitTermination(_TICK)  # type: ignore[arg-type] # any number of seconds will do
                watch.look(query)
            _finish(query)
            if (failed := query.exception()) is not None:
                raise failed
        finally:
            query.stop()
    return watch.end(query)


def _start(spark: SparkSession, options: StreamOptions) -> StreamingQuery:
    spark.conf.set(*_TIMES)
    settings = dict(options.source)
    if options.format == "taskqueue":
        settings = _DEFAULTS | settings
        if options.max_events is not None:
            settings.setdefault("maxEventsPerTrigger", str(options.max_events))
    reader = spark.readStream.format(options.format).options(**settings)
    writer = reader.load().writeStream.option("checkpointLocation", str(options.checkpoint))
    writer = writer.queryName("taskqueue").foreachBatch(Batches(options, _ledgers(options)))
    if options.once:
        return writer.trigger(availableNow=True).start()
    return writer.trigger(processingTime=f"{options.trigger:g} seconds").start()


def _ledgers(options: StreamOptions) -> RedisLedgers | None:
    """Return who asks the store, where there is one that can be asked."""
    if options.format != "taskqueue" or not options.ledger:
        return None
    told = ReadOptions.of(options.source)
    if told.backend != "redis":
        return None
    return RedisLedgers(told.url, told.url_env, told.prefix, told.partitions)


def _finish(query: StreamingQuery) -> None:
    """Let the batch that is being worked on come to its end."""
    while query.isActive and query.status["isTriggerActive"]:
        query.awaitTermination(_TICK)  # type: ignore[arg-type] # as above


@contextmanager
def _asked_to_stop(stop: threading.Event) -> Iterator[threading.Event]:
    """Set the event at SIGTERM and SIGINT, where this is the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    former = {
        number: signal.signal(number, lambda *_: stop.set())
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield stop
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


class _Watch:
    """Looks at a query: a line per batch, status.json, and alerts."""

    def __init__(self, options: StreamOptions, say: Callable[[str], None]) -> None:
        self._options = options
        self._say = say
        self._alerts = Alerts(options.folder / "alerts.jsonl")
        self._batches = 0
        self._last: int | None = None
        self._looked = 0.0
        self._lag: int | None = None
        self._figures: dict[str, Any] = {}

    def look(self, query: StreamingQuery) -> None:
        """Take note of the batches since, and once per trigger of everything else."""
        fresh = self._progress(query)
        if fresh or time.monotonic() - self._looked >= max(self._options.trigger, 1.0):
            self._looked = time.monotonic()
            self._tell(caught_up=self._caught_up(query), running=True)

    def end(self, query: StreamingQuery) -> Summary:
        """Take note of the last batches and say what it all came to."""
        self._progress(query)
        state = self._tell(caught_up=self._options.once or self._lag == 0, running=False)
        balances = [books.balanced for books in state.books.values()]
        return Summary(
            batches=self._batches,
            transitions=state.transitions,
            damaged=state.damaged,
            balanced=False if False in balances else None if None in balances else True,
            alerts=[f"{kind} ({of}): {text}" for (kind, of), text in self._alerts.current.items()],
        )

    def _progress(self, query: StreamingQuery) -> bool:
        fresh = False
        for progress in query.recentProgress:
            told = msgspec.json.decode(progress.json)
            self._lag = _lag(told, self._lag)
            rows = sum(source.get("numInputRows", 0) for source in told["sources"])
            if not rows or (self._last is not None and told["batchId"] <= self._last):
                continue
            self._last = told["batchId"]
            self._batches += 1
            fresh = True
            seconds = told["durationMs"].get("triggerExecution", 0) / 1000
            self._figures = {
                "batch": told["batchId"],
                "rows": rows,
                "batch_seconds": seconds,
                "offset": _json(told["sources"][0].get("endOffset")),
            }
            behind = "" if self._lag is None else f", {self._lag} behind"
            self._say(f"batch {told['batchId']}: {rows} rows in {seconds:.1f} s{behind}")
        return fresh

    def _caught_up(self, query: StreamingQuery) -> bool:
        if self._lag is not None:
            return self._lag == 0
        status = query.status
        return not (status["isDataAvailable"] or status["isTriggerActive"])

    def _tell(self, *, caught_up: bool, running: bool) -> State:
        state = load(self._options.state)
        now = time.time()
        as_of = now if caught_up else state.frontier
        self._alerts.tell(conditions(state, self._options, as_of), now)
        replace(
            self._options.folder / "status.json",
            {
                "running": running,
                "at": now,
                **self._figures,
                "lag": self._lag,
                "transitions": state.transitions,
                "damaged": state.damaged,
                "late": state.late,
                "frontier": state.frontier,
                "queues": {
                    key: msgspec.to_builtins(books) | {"balanced": books.balanced}
                    for key, books in state.books.items()
                },
                "alerts": [
                    {"kind": kind, "of": of, "text": text}
                    for (kind, of), text in self._alerts.current.items()
                ],
            },
        )
        return state


def _lag(told: dict[str, Any], former: int | None) -> int | None:
    """Return how much the journal has that was not read, in the source's unit; as before where that is not told."""
    source = told["sources"][0] if told["sources"] else {}
    end, latest = (_json(source.get(name)) for name in ("endOffset", "latestOffset"))
    if not (isinstance(end, dict) and isinstance(latest, dict)):
        return former
    try:
        return sum(max(0, _next(latest[shard]) - _next(end.get(shard, 0))) for shard in latest)
    except (TypeError, KeyError, ValueError):
        return former


def _next(place: Any) -> int:
    return int(place["next"] if isinstance(place, dict) else place)


def _json(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value)
    except msgspec.DecodeError:
        return value
