"""Tests of the streaming service on Spark: each transition is archived and counted once, however the service ends."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import os
import signal
import threading
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from pydantic import SecretStr
from pyspark.sql import SparkSession

from taskqueue_core.tasks import Task
from taskqueue_redis import RedisBackend, RedisSettings
from taskqueue_redis.scripts.runner import Partitions
from taskqueue_spark.columns import TRANSITIONS
from taskqueue_spark.pipeline.tables import read, read_transitions
from taskqueue_spark.service import StreamOptions, Summary, batches, run
from taskqueue_spark.service.batches import Batches
from taskqueue_spark.service.state import ServiceState, load
from tests.redis.servers import RedisServer, wait_until
from tests.spark.as_lines import lines_of
from tests.spark.compiling import compiling
from tests.spark.journaling import START, Store
from tests.spark.small_journals import Row, SmallJournal
from tests.spark.synthetic import Made, made


def verdicts(state: ServiceState) -> Counter[tuple[str, str]]:
    """Return the number of lives by key and verdict, with the names that the audit uses."""
    names = {"done": "completed", "dead": "dead_lettered"}
    return +Counter(
        {
            (key, names.get(name, name)): number
            for key, books in state.books.items()
            for name, number in (books.ended | books.live).items()
        }
    )


def archived(out: Path) -> pa.Table:
    """Return the archived transitions, read without Spark."""
    return ds.dataset(out / "transitions", format="parquet", schema=TRANSITIONS).to_table()


def assert_once(out: Path, table: pa.Table) -> None:
    """Assert that the archive contains each row of the journal exactly once."""
    names = ["run", "shard", "seq", "key", "task_id", "event"]
    order: Any = [(name, "ascending") for name in names[:3]]
    found, expected = (one.select(names).sort_by(order) for one in (archived(out), table))
    assert found.num_rows == expected.num_rows
    assert found.equals(expected)


def test_crashes_between_any_two_steps(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that fails at any step can be repeated, with the same result (G11; fault L1)."""
    journal: Made = made(7, 200, shards=2)
    table = journal.table.sort_by("ts")
    options = StreamOptions(out=tmp_path / "out", window=3600, keep=1)
    for folder in (options.archive, options.folder / "open", options.checkpoint):
        folder.mkdir(parents=True)
    (options.checkpoint / "metadata").write_text('{"id": "0123456789"}')
    work = Batches(options)
    steps = (("write_hours",), ("_move_to", "save"))
    half = table.num_rows // 2 + 1

    class Crash(Exception):
        pass

    def crash(*_: Any) -> None:
        raise Crash

    spark.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
    for number, breaking in enumerate(steps):
        pq.write_table(table.slice(number * half, half), tmp_path / f"{number}.parquet")
        batch = spark.read.parquet(str(tmp_path / f"{number}.parquet"))
        for step in breaking:
            with monkeypatch.context() as patch:
                patch.setattr(batches, step, crash)
                with pytest.raises(Crash):
                    work(batch, number)
            shown = min(table.num_rows, half * (number + (step != "_move_to")))
            assert archived(options.out).num_rows == shown
        with compiling(spark) if number else nullcontext():
            work(batch, number)
        before = options.state.read_bytes()
        work(batch, number)
        assert options.state.read_bytes() == before
    state = load(options.state)
    assert_once(options.out, table)
    assert verdicts(state) == journal.truth
    assert all(books.balanced for books in state.books.values())
    counts = Counter(table["event"].to_pylist())
    metrics = ds.dataset(options.out / "metrics", format="parquet").to_table()
    assert {name: pc.sum(metrics[name]).as_py() for name in counts} == counts
    # the longest runs are those that ended as lost
    assert pc.max(metrics["run_p99"]).as_py() == pytest.approx(15, rel=0.15)
    alive = ds.dataset(options.folder / "open" / state.open, format="parquet").count_rows()
    assert alive == sum(sum(books.live.values()) for books in state.books.values())
    assert read_transitions(spark, options.out).count() == table.num_rows


def test_replaced_stores_and_missing_numbers(spark: SparkSession, tmp_path: Path) -> None:
    """The same id in a store that was replaced is another task, in the same batch or a later one (G11; faults L1, L2).

    Missing numbers at the end are reported once. Settings with a version above 1 show that the queue is older than its
    journal. A lost checkpoint doubles no damaged row, and rows with reused numbers are kept.
    """
    options = StreamOptions(out=tmp_path / "out")
    for folder in (options.archive, options.folder / "open", options.checkpoint):
        folder.mkdir(parents=True)
    work = Batches(options)

    def give(query: str, number: int, rows: list[Row]) -> ServiceState:
        (options.checkpoint / "metadata").write_text(json.dumps({"id": query * 8}))
        work(spark.createDataFrame(pa.Table.from_pylist(rows, schema=TRANSITIONS)), number)
        return load(options.state)

    def run_of(run: str, second: float) -> SmallJournal:
        journal = SmallJournal(run=run)
        for task in "tu":
            journal.tell(second, "published", task)
        return journal

    first, second, third = run_of("a", 0), run_of("b", 10), run_of("c", 20)
    spoilt: Any = {"run": "", "seq": 0, "key": "", "reason": "line 3"}
    second.tell(11, "damaged", "", **spoilt)
    state = give("a", 0, first.rows + second.rows)
    assert (state.books["k"].expired, state.books["k"].balanced, state.damaged) == (2, True, 1)
    third.tell(21, "delivered", "t")
    third.tell(21, "acked", "t")
    state = give("a", 1, third.rows)
    books = state.books["k"]
    assert (books.published, books.expired, books.balanced) == (6, 4, True)
    assert (books.live, books.ended) == ({"waiting": 1}, {"done": 1})
    state = give("b", 0, [*first.rows, *second.rows, *third.rows])
    assert (state.transitions, state.damaged, state.books["k"]) == (8, 1, books)
    nothing = {"task_id": "", "key": "", "state": "", "ts": dt.datetime.fromtimestamp(0, dt.UTC)}
    third.rows.append(third.rows[-1] | nothing | {"event": "missing", "seq": 7})
    for number in (1, 2):
        state = give("b", number, third.rows[-1:])
    assert [(gap.first, gap.last, gap.number) for gap in state.gaps if gap.kind == "missing"] == [
        (5, 6, 2)
    ]
    later = SmallJournal(key="later", run="c")
    later.tell(30, "configured", "", seq=7, reason='{"version": 2, "journal": true}')
    later.tell(31, "published", "t", seq=8)
    state = give("b", 3, later.rows)
    assert (len(state.gaps), state.positions["c/0"].last) == (3, 8)
    assert (state.books["later"].balanced, state.books["later"].live) == (None, {"waiting": 1})
    later.tell(40, "published", "v", seq=8)
    state = give("b", 4, later.rows)
    assert (state.gaps[-1].kind, state.gaps[-1].number) == ("back", 1)
    assert state.books["later"].live == {"waiting": 2}
    assert archived(options.out).num_rows == state.transitions + 1 == 12
    assert read(spark, options.out, "damaged").count() == 1


def until_asked(spark: SparkSession, options: StreamOptions, rows: int) -> Summary:
    """Run the service in this process, and send it SIGTERM once it has read this number of rows."""
    said: list[str] = []

    def end() -> None:
        wait_until(lambda: load(options.state).transitions == rows, "all rows are read", seconds=60)
        os.kill(os.getpid(), signal.SIGTERM)

    former = signal.getsignal(signal.SIGTERM)
    ender = threading.Thread(target=end)
    ender.start()
    summary = run(spark, options, say=said.append)
    ender.join()
    assert signal.getsignal(signal.SIGTERM) is former
    assert said
    return summary


def goes_on(spark: SparkSession, folder: Path, told: Made, text: list[bytes]) -> None:
    """Run the service on the first half of a journal until SIGTERM.

    Then delete its last commit, and let it read the rest.
    """
    journal, out, half = folder / "journal.jsonl", folder / "out", len(text) // 2
    with journal.open("ab") as file:
        file.write(b"no line of ours\n")
    options = StreamOptions(out=out, source={"path": str(journal)}, trigger=0.1)
    first = until_asked(spark, options, half)
    assert (first.transitions, first.damaged, first.balanced) == (half, 1, True)
    assert_once(out, told.table.slice(0, half))
    commits = options.checkpoint / "commits"
    last = max(
        (path for path in commits.iterdir() if path.name.isdigit()), key=lambda path: int(path.name)
    )
    last.unlink()
    (commits / f".{last.name}.crc").unlink(missing_ok=True)
    with journal.open("ab") as file:
        file.write(b"".join(text[half:]))
    second = run(spark, dataclasses.replace(options, once=True))
    assert (second.transitions, second.damaged, second.balanced) == (len(text), 1, True)
    assert_once(out, told.table)
    assert verdicts(load(options.state)) == told.truth
    status = json.loads((out / "stream/status.json").read_text())
    assert (status["running"], status["lag"], status["transitions"]) == (False, 0, len(text))
    assert_stuck_for_a_while(out)


def assert_stuck_for_a_while(out: Path) -> None:
    """Assert that each queue had an alert for stuck tasks, which began in the middle of the journal and ended later."""
    alerts = [json.loads(line) for line in (out / "stream/alerts.jsonl").read_text().splitlines()]
    episodes = Counter((one["kind"], one["of"], one["phase"]) for one in alerts)
    queues = {("stuck", key, phase) for key in ("k0", "k1", "k2") for phase in ("start", "end")}
    assert episodes == Counter(queues)


def test_whatever_ends_it(spark: SparkSession, tmp_path: Path) -> None:
    """Neither SIGTERM nor a lost commit loses or doubles a row (G11; faults L1, L2).

    The current batch is finished after SIGTERM, and damaged rows are archived separately.
    """
    journal = made(3, 60, shards=1)
    text = lines_of(journal.table)
    (tmp_path / "journal.jsonl").write_bytes(b"".join(text[: len(text) // 2]))
    goes_on(spark, tmp_path, journal, text)


async def test_a_store_is_watched(
    spark: SparkSession, tmp_path: Path, redis_server: RedisServer, redis_prefix: str
) -> None:
    """The ledger of the store agrees with the journal.

    If the journal was trimmed, the gap and the difference are reported (G11; law 1).
    """
    settings = RedisSettings(url=SecretStr(redis_server.url), prefix=redis_prefix, partitions=2)
    backend = RedisBackend(settings=settings)
    place = Partitions(redis_prefix, 2).of("resize")
    queue = await backend.control.settings("resize")
    await backend.control.configure("resize", queue.model_copy(update={"journal": True}))
    source = {"url": redis_server.url, "prefix": redis_prefix}
    options = StreamOptions(out=tmp_path / "out", source=source, once=True)

    async def work(number: int) -> None:
        await backend.publisher.publish(*(Task(key="resize", payload=b"{}") for _ in range(number)))
        async with backend.subscribe(["resize"], "worker") as consumer:
            await consumer.ack(*(await consumer.receive(number - 1, 1)).deliveries)

    await work(5)
    assert run(spark, options).balanced is True
    state = load(options.state)
    (base,) = state.baselines.values()
    assert (base.ledger["published"], base.ledger["done"], state.differing) == (5, 4, {})
    await work(3)
    number = int(place.removesuffix("}").rpartition(":")[2])
    position = state.position(base.runs[number], number)
    assert position is not None
    redis_server.call("XTRIM", f"{place}:journal", "MINID", position.last + 2)
    summary = run(spark, options)
    await backend.aclose()
    assert (summary.balanced, len(summary.alerts)) == (False, 2)
    told = [json.loads(line) for line in (options.folder / "alerts.jsonl").read_text().splitlines()]
    assert [(one["phase"], one["kind"], one["of"].partition("/")[0]) for one in told] == [
        ("once", "missing", base.runs[number]), ("start", "imbalance", "resize"),
    ]  # fmt: skip
    assert told[0]["first"] == position.last + 1
    assert "published: increased by 3 in the ledger" in told[1]["text"]


@pytest.mark.long  # tests with Spark what test_redis_journal.py and test_service.py test without
def test_a_store_that_lost_its_latest(
    spark: SparkSession, tmp_path: Path, redis_server: RedisServer, redis_prefix: str
) -> None:
    """If a store is restored without its latest entries, reused and missing numbers are reported (G11; fault L2)."""
    store = Store(redis_server, redis_prefix, partitions=2)
    (name, _), journal = store.names, store.journal()
    options = StreamOptions(out=tmp_path / "out", source=store.options, once=True, ledger=False)
    store.write([(START + n, [f"t{n}"]) for n in range(20)])
    earlier = redis_server.call("DUMP", journal)
    store.write([(START + n, [f"t{n}"]) for n in range(20, 30)])
    assert run(spark, options).balanced is True
    redis_server.call("RESTORE", journal, 0, earlier, "REPLACE")
    redis_server.call("HSET", f"{name}:meta", "journal_seq", 20)
    run(spark, options)
    store.last[name] = 20
    store.write([(START + 1000, ["u1", "u2"])])
    redis_server.call("HSET", f"{name}:meta", "journal_seq", 25)
    summary = run(spark, options)
    assert (summary.balanced, summary.transitions) == (None, 32)
    state = load(options.state)
    assert [(gap.kind, gap.first, gap.last, gap.number) for gap in state.gaps] == [
        ("back", 21, 30, 2), ("missing", 21, 25, 3),
    ]  # fmt: skip
    assert len(summary.alerts) == 2
