"""Test of the pipeline over Spark Connect, with the commands in a separate process."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import SparkSession

from taskqueue_spark.service.state import load
from tests.spark.as_lines import lines_of
from tests.spark.spark_servers import connect, taskqueue
from tests.spark.synthetic import made


def test_the_same_commands_over_connect(spark: SparkSession, tmp_path: Path) -> None:
    """Over Spark Connect, an audit and the streaming service give the correct results for a journal (G12)."""
    told = made(11, 30, keys=1, shards=1)
    journal, out, stream = tmp_path / "journal.jsonl", tmp_path / "out", tmp_path / "stream"
    text = lines_of(told.table)
    journal.write_bytes(b"".join(text))
    with connect(spark) as url:
        where = ("--journal", str(journal), "--remote", url, "--json")
        found, done = taskqueue(
            ("audit", "--out", str(out), *where),
            ("stream", "--once", "--out", str(stream), *where),
        )
    (row,) = found["conservation"]
    truth = {verdict: number for (_, verdict), number in told.truth.items()}
    assert (row["published"], row["balanced"]) == (sum(truth.values()), True)
    assert {name: row[name] for name in truth} == truth
    assert (done["transitions"], done["balanced"]) == (len(text), True)
    assert load(stream / "stream/state.json").books["k0"].published == row["published"]
