"""Tests of reading journals in Redis, by numbers and by times, including entries that other programs wrote."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pytest

from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.tasks import Task
from taskqueue_redis.journal.reader import JournalEntry, JournalSteps, RedisJournalReader
from taskqueue_spark.columns import DAMAGED, MISSING, TRANSITIONS, batch_of
from taskqueue_spark.journals.contract import Choice, HistoryMissing, Range, Watch
from taskqueue_spark.journals.redis import RedisJournal
from tests.redis.backends import opened, take
from tests.redis.clusters import Cluster
from tests.redis.links import settings_for
from tests.redis.servers import RedisServer
from tests.spark.journaling import START, Store, fields


@contextmanager
def journal_of(store: Store, at_once: int = 2000) -> Iterator[RedisJournal]:
    """Open the journal of a store for reading."""
    with RedisJournal(settings_for(store.server.url, prefix=store.prefix), at_once) as journal:
        yield journal


def told(
    store: Store,
    start: int | None = None,
    end: int | None = None,
    choice: Choice | None = None,
    watch: Watch = Watch.NOTHING,
) -> list[dict[str, Any]]:
    """Read a range of numbers from every partition, or the complete journal."""
    rows: list[dict[str, Any]] = []
    choice = choice or Choice()
    with journal_of(store) as journal:
        for shard, span in journal.spans().items():
            part = Range(shard, span.run, start or span.first, end or span.end)
            for batch in journal.read(part, choice, watch):
                rows += batch.to_pylist()
            if end is None:
                for batch in [*journal.strays(part, choice), *journal.missing(part, choice)]:
                    rows += batch.to_pylist()
    return rows


def seqs(rows: list[dict[str, Any]]) -> list[int]:
    """Return the numbers of the valid transitions."""
    return [row["seq"] for row in rows if row["event"] not in (DAMAGED, MISSING)]


def reasons(rows: list[dict[str, Any]]) -> list[str]:
    """Return the reasons of the damaged rows, without the partition."""
    return [row["reason"].split(": ", 1)[1] for row in rows if row["event"] == DAMAGED]


@pytest.fixture
def store(redis_server: RedisServer, redis_prefix: str) -> Store:
    """Return an empty store with one partition."""
    return Store(redis_server, redis_prefix)


async def test_what_the_scripts_write_is_read(redis_server: RedisServer, redis_prefix: str) -> None:
    """Every transition that the Lua scripts record is read with all its fields (G8)."""
    async with opened(redis_server.url, redis_prefix) as backend:
        await backend.control.configure("work", QueueSettings(journal=True))
        await backend.publisher.publish(
            Task(key="work", id="t1", tenant="acme", priority=2, ordering_key="o")
        )
        async with backend.subscribe(["work"], "w1") as subscription:
            (delivery,) = await take(subscription, 1)
            await backend.publisher.schedule_retry(
                delivery.task, backend.now() + 60, error="b\u00f6\0m", settles=delivery
            )
    rows = await asyncio.to_thread(everything, redis_server.url, redis_prefix)
    assert [row["event"] for row in rows] == ["configured", "published", "delivered", "retried"]
    assert seqs(rows) == [1, 2, 3, 4]
    assert (rows[1]["tenant"], rows[1]["ordering_key"], rows[1]["priority"]) == ("acme", "o", 2)
    assert (rows[2]["worker"], rows[2]["attempt"], rows[2]["state"]) == ("w1", 1, "in_flight")
    assert (rows[3]["error"], rows[3]["attempt"], rows[3]["state"]) == ("b\u00f6 m", 2, "scheduled")


def everything(url: str, prefix: str) -> list[dict[str, Any]]:
    """Read the complete journal of a store with one partition."""
    with RedisJournal(settings_for(url, prefix=prefix), 2000) as journal:
        ((shard, span),) = journal.spans().items()
        part = Range(shard, span.run, span.first, span.end)
        batches = list(journal.read(part, Choice(), Watch.GAPS))
    return [row for batch in batches for row in batch.to_pylist()]


def test_steps_of_many_sizes(store: Store) -> None:
    """Any range of numbers is read exactly, whatever the sizes of entries, replies and batches are (G8)."""
    sizes = [1, 1, 5, 1, 300, 2, 1, 1, 40, 1]
    ids = [[f"t{step}.{n}" for n in range(size)] for step, size in enumerate(sizes)]
    for step, names in enumerate(ids):
        many = "\0".join(str(n % 7) for n in range(len(names)))
        store.write([(START + step, names)], attempt=many, error="" if step % 2 else "boom")
    flat = [name for names in ids for name in names]
    for at_once in (1, 3, 2000):
        with journal_of(store, at_once) as journal:
            ((shard, span),) = journal.spans().items()
            assert (span.first, span.end) == (1, len(flat) + 1)
            for start, end in ((1, span.end), (1, 2), (4, 9), (100, 250), (307, span.end), (5, 5)):
                part = Range(shard, store.epoch, start, end)
                for rows in (1, 50, 10_000):
                    batches = list(journal.read(part, Choice(rows=rows), Watch.GAPS))
                    table = pa.Table.from_batches(batches, TRANSITIONS)
                    assert table["seq"].to_pylist() == list(range(start, end))
                    assert table["task_id"].to_pylist() == flat[start - 1 : end - 1]
    lines = told(store)
    assert [line["attempt"] for line in lines[9:16]] == [1, 2, 3, 4, 5, 6, 0]
    assert lines[0]["error"] == "boom"
    assert lines[1]["error"] is None


def test_what_a_foreign_hand_wrote_is_damage(store: Store) -> None:
    """An entry with wrong fields, ids, counts or types becomes a row of damage (G8, G9; fault L2)."""
    ours = fields(START, ["x"])
    store.write([(START, ["a"]), (START, ["b", "c"])])
    spoilt: list[tuple[str, list[str]]] = [
        ("3-1", ours), ("3-2", ["f", "v"]), ("4-0", ["f", "v"]), ("5-0", fields(START, ["x"], v=9)),
        ("6-0", fields(START, ["x"], ts="then")), ("7-0", fields(START, ["x"], attempt="1\0002")),
        ("8-0", fields(START, ["x", "y"], tenant="1\0002\0003")), ("9-0", ours), ("10-0", ours[2:]),
        ("11-0", fields(START, ["x"], priority="high")), ("12-0", fields(START, ["x"], event="damaged")),
        ("13-0", fields(10**18, ["x"])), ("14-0", fields(START, ["x"], priority=400)),
    ]  # fmt: skip
    for place, words in spoilt:
        store.call("", "XADD", store.journal(), place, *words)
    store.last[store.names[0]] = 14
    store.write([(START + 1, ["d"])])
    store.call("", "XADD", store.journal(), "*", "hello", "world")
    rows = told(store, watch=Watch.GAPS)
    assert seqs(rows) == [1, 2, 3, 15]
    damage = reasons(rows)
    assert len(damage) == len(spoilt) + 1
    assert damage[0] == "entry 3-1 cannot be read: it is not a journal entry"
    assert any(
        text.startswith("entry 9-0 cannot be read: its numbers belong to another entry")
        for text in damage
    )
    # Each damaged entry is reported once, however the range is split.
    split = [row for start in range(1, 16) for row in told(store, start, start + 1)]
    assert seqs(split) == [1, 2, 3, 15]
    assert len(reasons(split)) == len(spoilt)


def test_a_text_that_is_no_utf8_costs_no_transition(store: Store) -> None:
    """Invalid UTF-8 in a text is replaced, and the transition is kept (G9; fault L2)."""
    words = [word.encode() for word in fields(START, ["a"], error="?")]
    words[-1] = b"b\xffm"
    store.call("", "XADD", store.journal(), "1-0", *words)
    store.last[store.names[0]] = 1
    store.write([(START, ["b"])], error="fine")
    assert [row["error"] for row in told(store)] == ["b\ufffdm", "fine"]


def test_what_is_missing_is_reported(store: Store) -> None:
    """Gaps raise an error if requested, and missing numbers at the end are reported in a row (G8, G9)."""
    store.write([(START + n, [f"t{n}"]) for n in range(20)])
    for place in ("8-0", "9-0", "20-0"):
        store.call("", "XDEL", store.journal(), place)
    with pytest.raises(HistoryMissing, match="8 to 9, 20 to 20"):
        told(store, watch=Watch.GAPS)
    rows = told(store, watch=Watch.CUT)
    assert seqs(rows) == [*range(1, 8), *range(10, 20)]
    (behind,) = [row for row in rows if row["event"] == MISSING]
    assert (behind["run"], behind["seq"]) == (store.epoch, 21)
    assert "20 to 20 are missing" in behind["reason"]
    store.call("", "XTRIM", store.journal(), "MINID", "12-0")
    with pytest.raises(HistoryMissing, match="1 to 11"):
        told(store, 1, 15, watch=Watch.CUT)
    assert seqs(told(store, 1, 15)) == [12, 13, 14]
    with journal_of(store) as journal:
        ((_, span),) = journal.spans().items()
        assert (span.first, span.end) == (12, 21)


def test_only_what_was_to_be_read_is_missed(store: Store) -> None:
    """Missing numbers at the end are reported for the requested range and run only (G8, G9)."""
    store.write([(START + n, [f"t{n}"]) for n in range(20)])
    store.call("", "XTRIM", store.journal(), "MINID", "99-0")
    with journal_of(store) as journal:
        ((shard, span),) = journal.spans().items()
        part = Range(shard, span.run, 15, 21)
        (row,) = [row for batch in journal.missing(part, Choice()) for row in batch.to_pylist()]
        assert (row["event"], row["run"], row["seq"]) == (MISSING, span.run, 21)
        assert row["reason"].endswith("the transitions 15 to 20 are missing")
        assert list(journal.missing(part._replace(start=21), Choice())) == []
        assert list(journal.missing(part, Choice(events=frozenset({"acked"})))) == []
        store.call("", "DEL", store.journal(), f"{store.names[0]}:meta")
        Store(store.server, store.prefix).write([(START, ["b"])])
        store.call("", "XADD", store.journal(), "*", "f", "v")
        assert [*journal.missing(part, Choice()), *journal.strays(part, Choice())] == []


def test_a_store_that_lost_its_latest_is_noticed(store: Store) -> None:
    """If the store lost its latest entries and reused their numbers, the reader notices it (G8; faults F10, L2)."""
    store.write([(START + n, [f"t{n}"]) for n in range(20)])
    with journal_of(store) as journal:
        shard, part = store.names[0], Range(store.names[0], store.epoch, 16, 21)
        assert (journal.mark(shard, 1), journal.mark(shard, 16)) == ("", str(START + 14))
        marked = part._replace(mark=journal.mark(shard, 16))
        assert sum(map(len, journal.read(marked, Choice(), Watch.RESET))) == 5
        store.call("", "DEL", store.journal())
        store.last[shard] = 0
        store.write([(START + n, [f"t{n}"]) for n in range(10)])
        store.write([(START + 100 + n, [f"n{n}"]) for n in range(10)])
        with pytest.raises(HistoryMissing, match="already read"):
            list(journal.read(marked, Choice(), Watch.RESET))
        rows = [row for b in journal.read(marked, Choice(), Watch.NOTHING) for row in b.to_pylist()]
        assert [row["event"] for row in rows] == [DAMAGED, *["published"] * 5]
        assert "reuses their numbers" in rows[0]["reason"]
        assert sum(map(len, journal.read(part, Choice(), Watch.GAPS))) == 5


def test_replies_and_batches_have_a_size(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replies and batches have a limited size, even if small entries are followed by large ones (G8)."""
    sizes: list[int] = []
    asked = RedisJournalReader._next_batch

    async def some(*given: Any) -> Any:
        told = await asked(*given)
        sizes.append(sum(sum(map(len, words)) for _, words in told[0]))
        return told

    monkeypatch.setattr(RedisJournalReader, "_next_batch", some)
    names = [f"{n:032x}" for n in range(1000)]
    store.write([(START, [f"t{n}"]) for n in range(1000)])
    store.write([(START, names)] * 100)
    store.last[store.names[0]] = 10**15  # far after the previous numbers
    store.write([(START, [f"t{n}"]) for n in range(1000)])
    with journal_of(store) as journal:
        part = Range(store.names[0], store.epoch, 1, 10**15 + 1001)
        rows = [len(batch) for batch in journal.read(part, Choice(), Watch.NOTHING)]
    assert sum(rows) == 102_000
    assert max(rows) <= 15_000
    assert max(sizes) < 1_100_000
    assert len(sizes) < 40


def test_damage_has_a_time(store: Store) -> None:
    """Damage gets the time of its neighbours, even at the start of a range (G8, G9; fault L2)."""
    store.call("", "XADD", store.journal(), "1-0", "f", "v")
    store.last[store.names[0]] = 1
    store.write([(START, ["a"])])
    for _ in range(250):
        store.call("", "XADD", store.journal(), "*", "hello", "world")
    damage = [row for row in told(store, 1) if row["event"] == DAMAGED]
    assert len(damage) == 251
    assert {round(row["ts"].timestamp() * 1e6) for row in damage} == {START}


def test_a_time_in_the_future_is_damage(store: Store) -> None:
    """Fault L2 (G8): an entry from the year 5000 is damaged, and so is its time; a due time may be that late."""
    future = 95_617_584_000_000_000
    store.write([(START, ["a"]), (future, ["b"])])
    store.write([(START + 1, ["c"])], due_at=future, state="scheduled")
    rows = told(store, 1)
    assert [row["seq"] for row in rows if row["event"] == "published"] == [1, 3]
    (damage,) = [row for row in rows if row["event"] == DAMAGED]
    assert START <= round(damage["ts"].timestamp() * 1e6) <= START + 1


def test_a_store_that_was_emptied_has_another_epoch(store: Store) -> None:
    """If the store was emptied, its journal has another epoch, and a read of the old epoch fails (G8)."""
    store.write([(START, ["a"])])
    with journal_of(store) as journal:
        ((shard, span),) = journal.spans().items()
        part = Range(shard, span.run, 1, 2)
        store.call("", "DEL", store.journal(), f"{store.names[0]}:meta")
        again = Store(store.server, store.prefix)
        again.write([(START, ["b"])])
        assert journal.spans()[shard].run == again.epoch
        with pytest.raises(HistoryMissing, match="start again"):
            list(journal.read(part, Choice(), Watch.CUT))
        assert list(journal.read(part, Choice(), Watch.NOTHING)) == []


def test_times_are_found_past_gaps_and_foreign_entries(store: Store) -> None:
    """The search for a time works even if entries are missing or foreign (G8)."""
    store.write([(START + 10 * n, [f"t{n}"]) for n in range(100)])
    for number in range(40, 90):
        store.call("", "XDEL", store.journal(), f"{number}-0")
    store.call("", "XADD", store.journal(), "100-7", "f", "v")
    with journal_of(store) as journal:
        ((shard, span),) = journal.spans().items()
        for number in [*range(1, 40), *range(90, 101)]:
            place = journal.at(shard, START + 10 * (number - 1), span.first, span.end)
            assert place == number or (number == 90 and 40 <= place <= 90)
            assert journal.time(shard, number) == START + 10 * (number - 1)
        assert journal.time(shard, 50) == START + 890
        assert journal.time(shard, 101) is None
        assert journal.at(shard, START * 2, span.first, span.end) == 101


def test_no_store_yet(redis_server: RedisServer, redis_prefix: str) -> None:
    """A store that was never used has one shard without rows (fault L2)."""
    with RedisJournal(settings_for(redis_server.url, prefix=redis_prefix), 10) as journal:
        ((shard, span),) = journal.spans().items()
        assert span == ("", 1, 1)
        part = Range(shard, "", 1, 1)
        assert [*journal.read(part, Choice(), Watch.GAPS), *journal.strays(part, Choice())] == []


def test_a_cluster_is_read_once(redis_cluster: Cluster, redis_prefix: str) -> None:
    """Each partition of a cluster is a shard, and is read once (G8)."""
    store = Store(redis_cluster, redis_prefix, partitions=5)
    for number in range(5):
        store.write([(START + n, [f"t{number}.{n}"]) for n in range(number * 10)], number)
    rows = told(store, watch=Watch.GAPS)
    ids = [row["task_id"] for row in rows]
    assert len(ids) == len(set(ids)) == 100
    assert {(row["shard"], row["task_id"][1]) for row in rows} == {(n, str(n)) for n in range(1, 5)}


def test_no_group_of_the_workers_is_touched(store: Store) -> None:
    """Reading sends only Redis commands that read, and none that use consumer groups (G8)."""
    store.write([(START + n, [f"t{n}"]) for n in range(50)])
    store.call("", "CONFIG", "RESETSTAT")
    told(store)
    with journal_of(store) as journal:
        ((shard, span),) = journal.spans().items()
        journal.at(shard, START + 10, 1, span.end)
    used = {name.removeprefix("cmdstat_").split("|")[0] for name in stats(store)}
    assert used <= {"hget", "hmget", "xrange", "xrevrange", "client", "config", "info", "ping"}


def stats(store: Store) -> list[str]:
    """Return the names of the commands that the server has received."""
    text = store.call("", "INFO", "commandstats").decode()
    return [row.split(":")[0] for row in text.splitlines() if row.startswith("cmdstat_")]


def test_a_large_range_is_parted(store: Store) -> None:
    """Without a given number of splits, a range is split into parts of about 100,000 rows (G8, G12)."""
    with journal_of(store) as journal:
        assert journal.split(store.names[0], 1, 100_001, 0) == [1, 100_001]
        assert journal.split(store.names[0], 1, 300_001, 0) == [1, 100_001, 200_001, 300_001]
        assert len(journal.split(store.names[0], 1, 10**8, 0)) == 9


def test_the_rights_that_ship_are_enough(redis_acl: RedisServer, redis_prefix: str) -> None:
    """A Redis user with the rights of the ACL file in this project can read a journal (G8)."""
    store = Store(redis_acl, redis_prefix)
    store.write([(START + n, [f"t{n}"]) for n in range(5)])
    assert seqs(told(store, watch=Watch.GAPS)) == [1, 2, 3, 4, 5]
    with journal_of(store) as journal:
        assert journal.at(store.names[0], START + 3, 1, 6) == 4


def test_columns_can_be_left_out() -> None:
    """A batch contains only the columns of the requested schema."""
    schema = pa.schema([TRANSITIONS.field("task_id"), TRANSITIONS.field("ts")])
    entry = JournalEntry(1, [word.encode() for word in fields(START, ["a", "b"])[1::2]], 2)
    batch = batch_of(0, "r", JournalSteps.of([entry]), 2, 2, schema=schema)
    assert batch.schema == schema
    assert batch["task_id"].to_pylist() == ["b"]
