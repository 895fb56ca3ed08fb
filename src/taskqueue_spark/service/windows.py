"""Metrics of time windows: counts, rates, waiting and running times, in one Parquet file per hour."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from taskqueue_spark.columns import TASK_EVENTS
from taskqueue_spark.pipeline.tables import replace_file
from taskqueue_spark.service.state import WindowCounts

LEAST = 0.001
"""lower limit of the first class of durations, in seconds; shorter durations are counted in this class too"""
_GROWTH = 1.1
CLASSES_PER_E = 1 / math.log(_GROWTH)
"""number of duration classes between 1 s and e s; the limits of a class are 10 % above those of the previous class.
Durations are counted by class, so that the counts of batches can be added up
"""
_HOUR = 3600

METRICS = pa.schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("window_start", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("seconds", pa.int32(), nullable=False),
        *(pa.field(event, pa.int64(), nullable=False) for event in TASK_EVENTS),
        *(pa.field(f"{event}_rate", pa.float64(), nullable=False) for event in TASK_EVENTS),
        pa.field("failed_share", pa.float64()),
        *(
            pa.field(f"{of}_{name}", pa.float64())
            for of in ("wait", "run")
            for name in ("p50", "p95", "p99")
        ),
    ]
)
"""schema of one row per queue and window with events; rates are per second, durations in seconds"""


def seconds_of(index: int) -> float:
    """Return the middle of a class of durations in seconds. It is within 5 % of each duration of at least `LEAST`."""
    return LEAST * math.exp((index + 0.5) / CLASSES_PER_E)


def quantile(classes: Mapping[int, int], share: float) -> float | None:
    """Return a quantile of durations in seconds; ``None`` if there are no durations."""
    due = share * sum(classes.values())
    for index in sorted(classes):
        due -= classes[index]
        if due <= 0:
            return seconds_of(index)
    return None


def failed(window: WindowCounts) -> tuple[int, int]:
    """Return the number of failed executions in a window, and the number of all executions in it."""
    bad = window.events.get("retried", 0) + window.events.get("dead_lettered", 0)
    return bad, bad + window.events.get("acked", 0)


def write_hours(
    folder: Path,
    windows: Mapping[str, Mapping[int, WindowCounts]],
    seconds: int,
    hours: Iterable[int],
) -> None:
    """Replace the files of the given hours. An hour is the Unix time of its beginning."""
    for hour in hours:
        rows = [
            _row(key, start, seconds, window)
            for key, of_key in sorted(windows.items())
            for start, window in sorted(of_key.items())
            if hour <= start < hour + _HOUR
        ]
        moment = dt.datetime.fromtimestamp(hour, dt.UTC)
        path = folder / f"date={moment:%Y-%m-%d}"
        path.mkdir(parents=True, exist_ok=True)
        buffer = pa.BufferOutputStream()
        pq.write_table(pa.Table.from_pylist(rows, schema=METRICS), buffer)
        replace_file(path / f"{moment:%H}.parquet", buffer.getvalue().to_pybytes())


def _row(key: str, start: int, seconds: int, window: WindowCounts) -> dict[str, object]:
    bad, all_of_them = failed(window)
    counts = {event: window.events.get(event, 0) for event in TASK_EVENTS}
    return {
        "key": key,
        "window_start": dt.datetime.fromtimestamp(start, dt.UTC),
        "seconds": seconds,
        **counts,
        **{f"{event}_rate": number / seconds for event, number in counts.items()},
        "failed_share": bad / all_of_them if all_of_them else None,
        **{
            f"{of}_{name}": quantile(classes, share)
            for of, classes in (("wait", window.waits), ("run", window.runs))
            for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))
        },
    }
