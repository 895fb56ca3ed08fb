"""Tests that the journal of a run with faults agrees with what the clients of the run observed."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

from taskqueue_core.capabilities import control_of
from taskqueue_core.rate_limit import RateLimit
from taskqueue_core.tasks import State
from taskqueue_redis.journal.reader import JournalSteps, RedisJournalReader, entries_of
from taskqueue_spark.columns import TRANSITIONS, batch_of
from taskqueue_spark.pipeline.audit import VERDICTS, against, audit, conservation
from taskqueue_spark.pipeline.history import RULES, counts, violations
from tests.chaos.cases import CHAOS, passed, small
from tests.chaos.history import What
from tests.chaos.world import Outcome, Shape, World
from tests.redis.links import settings_for
from tests.spark.synthetic import doubled, moved, removed, renumbered, swapped

_VERDICT = {"done": "completed", "dead": "dead_lettered"}


async def journal_of(world: World) -> pa.Table:
    """Read the complete journal of the run from Redis."""
    batches: list[pa.RecordBatch] = []
    settings = settings_for(f"redis://127.0.0.1:{world.redis.port}", prefix="chaos")
    async with RedisJournalReader(settings) as reader:
        for number, partition in enumerate(reader.partitions):
            span = await reader.span(partition)
            assert span.first == 1
            batches += [
                batch_of(number, span.epoch, JournalSteps.of(entries_of(reply)), 1, span.last)
                async for reply in reader.read(partition, 1, span.last)
            ]
    return pa.Table.from_batches(batches, schema=TRANSITIONS)


class Run:
    """A run of queues with limits, ordering keys, deadlines, failures and faults, together with its journal."""

    def __init__(self, outcome: Outcome, journal: pa.Table, delivered: dict[str, int]) -> None:
        self.outcome = outcome
        self.journal = journal
        self.delivered = delivered
        """deliveries by key, as the store has counted them"""
        self._lives: DataFrame | None = None

    def held_up(self) -> int:
        """Return how many publishes were in progress while Redis was down."""
        events = self.outcome.events
        down = [e.at for e in events if e.what is What.FAULT and e.name == "kill redis"]
        back = [e.at for e in events if e.what is What.HEALED and e.name == "kill redis"]
        told = {(e.by, e.call): e.at for e in events if e.what is What.PUBLISHED}
        called = {(e.by, e.call): e.at for e in events if e.what is What.PUBLISH}
        spans = list(zip(down, back, strict=True))
        return sum(
            at < end and told.get(call, end) > start
            for call, at in called.items()
            for start, end in spans
        )

    def lives(self, spark: SparkSession) -> DataFrame:
        """Return the audit of the journal; it is computed once."""
        if self._lives is None:
            audited = audit(spark.createDataFrame(self.journal))
            self._lives = spark.createDataFrame(audited.collect(), audited.schema)
        return self._lives

    @classmethod
    async def of(cls, folder: Path, shape: Shape, *, seed: int = 0, bursts: int = 1) -> Run:
        """Execute a run, and read its journal."""
        async with World(folder, shape, seed=seed) as world:
            await world.begin()
            await world.holding("consumer", 0, 3)
            for _ in range(bursts):
                await asyncio.gather(
                    world.inflict("lose", "link-producer", 0),
                    world.inflict("cut", "link-producer", 1),
                    world.inflict("kill", "consumer", 0),
                )
                await world.inflict("kill", "redis", 0, 0.6)
            outcome = await world.finish()
            control = control_of(world.backend)
            delivered = {key: (await control.stats(key)).delivered for key in shape.keys}
            return cls(outcome, await journal_of(world), delivered)


_LIMITS = {
    "alpha": {"max_inflight": 20},
    "beta": {"rate_limit": RateLimit(max_tokens=100)},
}


def played(folder: Path, *, seed: int = 0, bursts: int = 1, **more: object) -> Run:
    """Execute a run in a new event loop."""
    # The run is so long that tasks are still being published when the last fault occurs.
    fields = {"seconds": 4.0, "journal": True, "limits": _LIMITS, "entities": 5, "liveness": 60.0}
    shape = small(**{**fields, **more})
    return asyncio.run(Run.of(folder, shape, seed=seed, bursts=bursts))


def ledgers(spark: SparkSession, run: Run) -> DataFrame:
    """Return the store's ledgers at the end of the run."""
    return spark.createDataFrame(
        [{"key": key, **books} for key, books in run.outcome.dump.ledgers.items()]
    )


def agree(spark: SparkSession, run: Run) -> None:
    """Assert that the audit agrees with the checker of the run, and with the store's tasks and ledgers."""
    figures = passed(run.outcome)
    lives = run.lives(spark)
    books = conservation(lives)
    kept = {row["key"]: row for row in books.collect()}
    assert sum(row["published"] for row in kept.values()) == figures.tasks
    assert all(row["balanced"] and row["complete"] for row in kept.values())
    assert sum(row["lost"] + row["unknown"] for row in kept.values()) == figures.lost == 0
    for key, ledger in run.outcome.dump.ledgers.items():
        told = {_VERDICT.get(state, state): ledger[state] for state in map(str, State)}
        assert {name: kept[key][name] for name in told} == told
    assert all(row["agrees"] for row in against(books, ledgers(spark, run)).collect())
    known = {
        (key, task): _VERDICT.get(one.state, one.state)
        for key, tasks in run.outcome.dump.tasks.items()
        for task, one in tasks.items()
        if one is not None
    }
    delivered: Counter[str] = Counter()
    for row in (rows := lives.collect()):
        delivered[row["key"]] += row["deliveries"]
    assert delivered == run.delivered
    # the checker does not count deliveries to a consumer that was already dead
    assert delivered.total() >= figures.deliveries
    assert {(row["key"], row["task_id"]): row["verdict"] for row in rows} == known
    assert not any(row["anomalies"] for row in rows)


def broken(spark: SparkSession, journals: dict[str, pa.Table]) -> dict[str, Counter[str]]:
    """Count the violated rules of each journal."""
    parts = [moved(table, name, place) for place, (name, table) in enumerate(journals.items())]
    found = violations(spark.createDataFrame(pa.concat_tables(parts)))
    told: dict[str, Counter[str]] = {name: Counter() for name in journals}
    for row in found.collect():
        told[row["run"]][row["rule"]] += 1
    return told


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Execute one run of a few seconds, for all tests."""
    return played(tmp_path_factory.mktemp("chaos") / "run")


def test_the_journal_of_a_run_with_faults(spark: SparkSession, run: Run) -> None:
    """The audit agrees with the checker and the store's ledgers: every confirmed task has an end (G9)."""
    agree(spark, run)


@pytest.mark.long  # a real run, in addition to test_history.py
@pytest.mark.usefixtures("compiled")
def test_the_rules_over_a_run(spark: SparkSession, run: Run) -> None:
    """The history rules find no violation in the run's journal, but find each change made to it (G9; fault L2)."""
    assert passed(run.outcome).lost == 0
    told = broken(
        spark,
        {
            "true": run.journal,
            "again": pa.concat_tables([run.journal, run.journal.slice(100, 200)]),
            "unnoted": renumbered(removed(run.journal, "delivered")[0]),
            "doubled": doubled(run.journal)[0],
            "swapped": swapped(run.journal)[0],
        },
    )
    assert told["true"] == told["again"] == {}
    assert told["unnoted"]["R2"] == 1
    assert told["doubled"] == {"R4": 1}
    assert (told["swapped"]["R1"], told["swapped"]["R2"]) == (1, 1)


def test_a_burst_through_a_front_that_fails(spark: SparkSession, run: Run) -> None:
    """Publishers whose responses are lost retry with the same ids, and no task is lost or doubled (OPEN-C1)."""
    assert run.held_up() > 0
    rows = run.lives(spark).collect()
    verdicts = Counter(row["verdict"] for row in rows)
    assert len({row["task_id"] for row in rows}) == len(rows) == run.outcome.verdict.figures.tasks
    assert verdicts["lost"] == verdicts["unknown"] == 0
    assert sum(verdicts[name] for name in VERDICTS) == len(rows)


@CHAOS
@pytest.mark.parametrize("seed", range(1, 4))
def test_long_runs(spark: SparkSession, tmp_path: Path, seed: int) -> None:
    """With thousands of tasks and many faults, the audit still agrees with the checker (G9, OPEN-C1)."""
    shape = {"tasks": 6000, "seconds": 8.0, "consumers": 4}
    # The outages follow each other closely; together they are shorter than a lease, so no live consumer loses one.
    run = played(tmp_path / "run", seed=seed, bursts=8, lease=10.0, **shape)
    agree(spark, run)
    found = violations(spark.createDataFrame(run.journal))
    assert {row["rule"]: row["count"] for row in counts(found).collect()} == dict.fromkeys(RULES, 0)
