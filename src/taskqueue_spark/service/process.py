"""The streaming service as a process: it runs one query until the query ends or is stopped."""

from __future__ import annotations

import datetime as dt
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from taskqueue_core.errors import ConfigurationError
from taskqueue_spark.options import ReadOptions
from taskqueue_spark.pipeline.tables import alone, replace_file
from taskqueue_spark.service.alerts import Alerts, Condition, conditions
from taskqueue_spark.service.balance import read_ledgers
from taskqueue_spark.service.batches import Batches
from taskqueue_spark.service.options import StreamOptions
from taskqueue_spark.service.state import Probe, ServiceState, load

_TICK = 0.2
_DEFAULTS = {"startingOffsets": "earliest", "failOnDataLoss": "false"}
"""default options of the source; missing transitions raise an alert and do not stop the service"""
_SINCE = "startingtimestamp"
_TIMES = ("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
"""Spark setting for timestamps that all readers of Parquet support and can use to skip files, unlike the default"""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one run of the service."""

    batches: int
    """number of batches in this run"""
    transitions: int
    """number of transitions in the archive"""
    damaged: int
    balanced: bool | None
    """whether all counts and ledgers balance; ``None`` if the journal is incomplete"""
    lost: int
    """number of live tasks that were lost when their store was reset"""
    alerts: list[str]
    """current alerts, and the one-off events (without an end) that this run has reported"""

    @property
    def sound(self) -> bool:
        """Whether no loss and no imbalance is known, and the journal was readable at all."""
        unreadable = self.damaged > 0 and not self.transitions
        return self.balanced is not False and not self.lost and not unreadable


def run(
    spark: SparkSession,
    options: StreamOptions,
    *,
    say: Callable[[str], None] = lambda _: None,
    stop: threading.Event | None = None,
) -> Summary:
    """Archive a journal and raise alerts until SIGTERM, SIGINT or ``stop``; with ``once``, until the journal is read.

    ``say`` is called with a text for each batch. The service finishes the current batch before it stops. If the
    process ends earlier, the next run continues from the same position, and no transition is lost or repeated. Raises
    Spark's error if the query fails, and the error of `locked`.
    """
    with locked(options):
        return run_locked(spark, options, say=say, stop=stop)


@contextmanager
def locked(options: StreamOptions) -> Iterator[None]:
    """Create the service's folder, and lock it while the context is open.

    Raises `ConfigurationError` if the folder contains a snapshot, or is used by another process.
    """
    for folder in (options.archive, options.folder / "open"):
        folder.mkdir(parents=True, exist_ok=True)
    if any(not path.name.startswith("batch=") for path in options.archive.iterdir()):
        raise ConfigurationError(
            f"{options.archive} contains a snapshot; use another folder for the service"
        )
    with alone(options.folder, options.folder / "lock", "service is using"):
        yield


def run_locked(
    spark: SparkSession,
    options: StreamOptions,
    *,
    say: Callable[[str], None] = lambda _: None,
    stop: threading.Event | None = None,
) -> Summary:
    """Do what `run` does, in a folder that the caller has `locked`."""
    with _stop_requested(stop or threading.Event()) as stopping:
        watch = _Watch(options, say)
        query = _start(spark, options)
        try:
            while query.isActive and not stopping.is_set():
                query.awaitTermination(_TICK)  # type: ignore[arg-type] # Spark accepts fractions too
                watch.update(query)
            _finish(query)
            if (failed := query.exception()) is not None:
                raise failed
        finally:
            query.stop()
        return watch.end(query, whole=options.once and not stopping.is_set())


def _start(spark: SparkSession, options: StreamOptions) -> StreamingQuery:
    spark.conf.set(*_TIMES)
    settings = dict(options.source)
    if options.format == "taskqueue":
        settings = _DEFAULTS | settings
        if options.state.exists() or any((options.checkpoint / "offsets").glob("*")):
            # The option --since applies only to the first run; a later run must not skip transitions.
            settings = {name: value for name, value in settings.items() if name.lower() != _SINCE}
        if options.max_events is not None:
            settings.setdefault("maxEventsPerTrigger", str(options.max_events))
    reader = spark.readStream.format(options.format).options(**settings)
    writer = reader.load().writeStream.option("checkpointLocation", str(options.checkpoint))
    writer = writer.queryName("taskqueue").foreachBatch(Batches(options, _ledgers(options)))
    if options.once:
        return writer.trigger(availableNow=True).start()
    return writer.trigger(processingTime=f"{round(options.trigger * 1000)} milliseconds").start()


def _ledgers(options: StreamOptions) -> Callable[[Sequence[str]], Probe | None] | None:
    """Return a function that reads the ledgers; ``None`` if the source is not a store with ledgers."""
    if options.format != "taskqueue" or not options.ledger:
        return None
    result = ReadOptions.of(options.source)
    return partial(read_ledgers, result.store) if result.backend == "redis" else None


def _finish(query: StreamingQuery) -> None:
    """Wait for the end of the current batch, so that the query can be stopped before the next batch."""
    before = _latest(query)
    while query.isActive and query.status["isTriggerActive"] and _latest(query) == before:
        query.awaitTermination(_TICK)  # type: ignore[arg-type] # Spark accepts fractions too


@contextmanager
def _stop_requested(stop: threading.Event) -> Iterator[threading.Event]:
    """Set the event on SIGTERM and SIGINT, if this is the main thread."""
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


def _latest(query: StreamingQuery) -> dict[str, Any] | None:
    """Return the last progress of the query, which Spark updates after each batch, and from time to time while idle."""
    progress = query.lastProgress
    return None if progress is None else msgspec.json.decode(progress.json)


class _Watch:
    """An observer of the query: it prints a line per batch, and writes status.json and alerts."""

    def __init__(self, options: StreamOptions, say: Callable[[str], None]) -> None:
        self._options = options
        self._say = say
        self._alerts = Alerts(options.folder / "alerts.jsonl")
        self._batches = 0
        self._began = time.time()
        self._reported: dict[str, Any] | None = None
        self._last = -1
        self._lag: int | None = None
        self._known_to: float | None = None
        """Unix time up to which all transitions are known, if the whole journal has been read"""
        self._metrics: dict[str, Any] = {}

    def update(self, query: StreamingQuery) -> None:
        """Process new progress of the query, and write the status. Without new progress, do nothing."""
        if self._progress(query):
            self._report(running=True)

    def end(self, query: StreamingQuery, *, whole: bool) -> Summary:
        """Process the last progress, and return the summary. ``whole``: whether all of the journal was read."""
        self._progress(query)
        if whole:
            self._known_to = max(self._known_to or 0.0, self._began)
        state = self._report(running=False)
        balances = [books.balanced for books in state.books.values()]
        wrong = False in balances or bool(state.differing)
        lasting = [f"{kind} ({of}): {text}" for (kind, of), text in self._alerts.current.items()]
        return Summary(
            batches=self._batches,
            transitions=state.transitions,
            damaged=state.damaged,
            balanced=False if wrong else None if None in balances else True,
            lost=sum(books.expired for books in state.books.values()),
            alerts=[*lasting, *self._alerts.reported],
        )

    def _progress(self, query: StreamingQuery) -> bool:
        """Process new progress of the query, and return whether there was any."""
        latest = _latest(query)
        if latest is None or latest == self._reported:
            return False
        results = [latest]
        if self._reported is None or latest["batchId"] > self._last + 1:
            results = [msgspec.json.decode(progress.json) for progress in query.recentProgress]
        for item in results:
            self._note(item)
        self._reported = latest
        return True

    def _note(self, fields: dict[str, Any]) -> None:
        self._lag = _lag(fields, self._lag)
        rows = sum(source.get("numInputRows", 0) for source in fields["sources"])
        all_read = not rows if self._lag is None else self._lag == 0
        self._known_to = (
            dt.datetime.fromisoformat(fields["timestamp"]).timestamp() if all_read else None
        )
        if not rows or fields["batchId"] <= self._last:
            return
        self._last = fields["batchId"]
        self._batches += 1
        seconds = fields["durationMs"].get("triggerExecution", 0) / 1000
        self._metrics = {
            "batch": fields["batchId"],
            "rows": rows,
            "batch_seconds": seconds,
            "offset": _json(fields["sources"][0].get("endOffset")),
        }
        behind = "" if self._lag is None else f", {self._lag} behind"
        self._say(
            f"batch {fields['batchId']}: {rows} row{'' if rows == 1 else 's'} in {seconds:.1f} s{behind}"
        )

    def _report(self, *, running: bool) -> ServiceState:
        state, matches = self._read_state()
        now = time.time()
        self._alerts.report(matches, now)
        status = {
            "running": running,
            "at": now,
            **self._metrics,
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
        }
        replace_file(self._options.folder / "status.json", msgspec.json.encode(status))
        return state

    def _read_state(self) -> tuple[ServiceState, list[Condition]]:
        """Return the state and its conditions. Retry if a commit deletes files of the state during the read."""
        while True:
            state = load(self._options.state)
            try:
                known_to = max(self._known_to or 0.0, state.frontier)
                return state, conditions(state, self._options, known_to)
            except FileNotFoundError:
                if load(self._options.state).open == state.open:
                    raise


def _lag(fields: dict[str, Any], former: int | None) -> int | None:
    """Return how much of the journal has not been read yet, in the source's unit; the former value if unknown."""
    source = fields["sources"][0] if fields["sources"] else {}
    end, latest = (_json(source.get(name)) for name in ("endOffset", "latestOffset"))
    if not (isinstance(end, dict) and isinstance(latest, dict)):
        return former
    try:
        return sum(max(0, _next(latest[shard]) - _next(end.get(shard, 0))) for shard in latest)
    except (TypeError, KeyError, ValueError):
        return former


def _next(position: Any) -> int:
    return int(position["next"] if isinstance(position, dict) else position)


def _json(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value)
    except msgspec.DecodeError:
        return value
