"""The audit of a Parquet journal: in a new session, in a session in use, and with ten times as many events."""

from __future__ import annotations

import time
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import spark_stage
from pyspark.sql import SparkSession
from spark_sizes import Sizes

from taskqueue_spark.pipeline.audit import audit, conservation
from tests.spark.synthetic import made

_TIMES = 10
_EVENTS_PER_TASK = 3.1


def measure(sizes: Sizes, turn: int) -> dict[str, list[float]]:
    """Return the durations in seconds, and the growth of the cost per event."""
    with spark_stage.folder() as place:
        one, ten = place / "one", place / "ten"
        ten.mkdir()
        for number in range(_TIMES):
            table = _journal(turn, number, sizes.events)
            pq.write_table(table, ten / f"{number}.parquet")
        one.mkdir()
        events = table.num_rows
        pq.write_table(table, one / "0.parquet")
        with spark_stage.spark() as session:
            cold = _audited(session, one, place / "out")
            warm = [_audited(session, one, place / "out") for _ in range(3)]
            large = _audited(session, ten, place / "out")
    growth = large / _TIMES / min(warm)
    return {
        f"audit of {sizes.events:,} events, just after the start of the session, s": [cold],
        f"audit of {sizes.events:,} events, warm, s": warm,
        f"audit of {_TIMES * sizes.events:,} events, warm, s": [large],
        "audit, cost per event of ten times as many events, x": [growth],
        "audit, warm, events/s": [events / one for one in warm],
    }


def _journal(turn: int, number: int, events: int) -> pa.Table:
    """Return a journal whose queues and shards are different for each ``number``."""
    table: pa.Table = made(100 * turn + number, int(events / _EVENTS_PER_TASK)).table
    keys = pc.binary_join_element_wise(table["key"], str(number), ".")
    shards = pc.add(table["shard"], pa.scalar(100 * number, pa.int32()))
    fields = table.schema
    for name, values in (("key", keys), ("shard", shards)):
        place = fields.get_field_index(name)
        table = table.set_column(place, fields.field(place), values)
    return table


def _audited(session: SparkSession, path: Path, out: Path) -> float:
    start = time.perf_counter()
    audit(session.read.parquet(str(path))).write.mode("overwrite").parquet(str(out))
    rows = conservation(session.read.parquet(str(out))).collect()
    assert rows
    assert all(row["balanced"] for row in rows)
    return time.perf_counter() - start
