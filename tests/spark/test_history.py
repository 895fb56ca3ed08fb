"""Tests that each history rule reports violations, and reports nothing if it is kept or cannot be decided."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import Row, SparkSession

from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.rate_limit import RateLimit
from taskqueue_spark.columns import TRANSITIONS
from taskqueue_spark.pipeline.history import RULES, counts, violations
from tests.spark.blocked_journals import BLOCKED
from tests.spark.small_journals import SmallJournal
from tests.spark.synthetic import doubled, made, moved, removed, renumbered, swapped

Tale = Callable[[SmallJournal], None]
TALES: dict[str, tuple[set[str], Tale]] = {tale.__name__: (rules, tale) for rules, tale in BLOCKED}


def breaks(*rules: str) -> Callable[[Tale], Tale]:
    """Register a function that writes a journal, with the rules that the journal violates once each."""

    def add(tale: Tale) -> Tale:
        TALES[tale.__name__] = set(rules), tale
        return tale

    return add


def _set(journal: SmallJournal, second: float, version: int, **settings: Any) -> None:
    text = QueueSettings(version=version, journal=True, **settings).model_dump_json()
    journal.tell(second, "configured", reason=text, attempt=0, priority=0)


def _done(journal: SmallJournal, task: str, second: float = 0.0, **fields: Any) -> None:
    journal.tell(second, "published", task, **fields)
    journal.tell(second + 0.1, "delivered", task)
    journal.tell(second + 0.2, "acked", task)


@breaks()
def all_is_well(journal: SmallJournal) -> None:
    """A task is redelivered, lost, retried, dead-lettered, redriven, and published again after the dedupe window."""
    _set(journal, 0, 1)
    journal.tell(0, "published", "a", due=50)
    journal.tell(1, "rescheduled", "a", due=5)
    journal.tell(5, "available", "a")
    journal.tell(5, "delivered", "a", worker="w1")
    journal.tell(6, "redelivered", "a", worker="w1")
    journal.tell(6, "delivered", "a", worker="w2")
    journal.tell(7, "lost", "a", losses=1)
    journal.tell(7, "delivered", "a", losses=1)
    journal.tell(8, "retried", "a", attempt=2, due=9)
    journal.tell(9, "available", "a", attempt=2)
    journal.tell(9, "delivered", "a", attempt=2)
    journal.tell(9, "dead_lettered", "a", attempt=2)
    journal.tell(10, "redriven", "a", attempt=2)
    journal.tell(11, "delivered", "a", attempt=2)
    journal.tell(12, "acked", "a", attempt=2)
    journal.tell(13, "retried", "a", attempt=3, due=13)
    journal.tell(14, "available", "a", attempt=3)
    journal.tell(15, "expired", "a", attempt=3)
    _done(journal, "a", 400)


@breaks("R0")
def published_while_alive(journal: SmallJournal) -> None:
    """A task is published again while it is alive, as if it were new."""
    journal.tell(0, "published", "a")
    _done(journal, "a", 1)


@breaks("R0")
def published_in_the_window(journal: SmallJournal) -> None:
    """A task is published again within its dedupe window."""
    _set(journal, 0, 1, dedupe_window=100)
    _done(journal, "a")
    _done(journal, "a", 100)


@breaks("R1", "R2")
def nobody_published_it(journal: SmallJournal) -> None:
    """A task is acked that was never published."""
    journal.tell(0, "acked", "ghost")


@breaks("R2")
def acked_while_waiting(journal: SmallJournal) -> None:
    """A task is acked while it is waiting, without a delivery."""
    journal.tell(0, "published", "a")
    journal.tell(1, "acked", "a")


@breaks("R3")
def delivered_after_its_end(journal: SmallJournal) -> None:
    """A task is delivered after it was acked."""
    _done(journal, "a")
    journal.tell(1, "delivered", "a")


@breaks("R4")
def ended_twice(journal: SmallJournal) -> None:
    """A task is dead-lettered after it was acked."""
    _done(journal, "a")
    journal.tell(1, "dead_lettered", "a")


@breaks("R4")
def the_living_is_redriven(journal: SmallJournal) -> None:
    """A waiting task is redriven, which is allowed for dead letters only."""
    journal.tell(0, "published", "a")
    journal.tell(1, "redriven", "a")


@breaks("R5")
def handed_out_twice(journal: SmallJournal) -> None:
    """A task is delivered to two workers at the same time."""
    journal.tell(0, "published", "a")
    journal.tell(1, "delivered", "a", worker="w1")
    journal.tell(2, "delivered", "a", worker="w2")


@breaks("R5")
def settled_by_another(journal: SmallJournal) -> None:
    """A task is acked by a worker to which it was not delivered."""
    journal.tell(0, "published", "a")
    journal.tell(1, "delivered", "a", worker="w1")
    journal.tell(2, "acked", "a", worker="w2")


@breaks("R6")
def an_attempt_is_burnt(journal: SmallJournal) -> None:
    """A delivery raises the attempt number, which only a retry may do."""
    journal.tell(0, "published", "a")
    journal.tell(1, "delivered", "a", attempt=2)


@breaks("R6")
def a_loss_is_forgotten(journal: SmallJournal) -> None:
    """A lost delivery does not raise the number of losses."""
    journal.tell(0, "published", "a")
    journal.tell(1, "delivered", "a")
    journal.tell(2, "lost", "a", losses=0)


@breaks("R6")
def the_poisonous_goes_on(journal: SmallJournal) -> None:
    """A task is delivered again after it has exceeded ``max_losses``."""
    _set(journal, 0, 1, max_losses=0)
    journal.tell(0, "published", "a")
    journal.tell(1, "delivered", "a")
    journal.tell(2, "lost", "a", losses=1)
    journal.tell(3, "delivered", "a", losses=1)


@breaks("R7")
def overtaken(journal: SmallJournal) -> None:
    """A task is delivered before an earlier one of the same priority; overtaking by a higher priority is allowed."""
    for task, priority in (("a", 5), ("b", 5), ("c", 8)):
        journal.tell(0, "published", task, priority=priority)
    for task, priority in (("c", 8), ("b", 5), ("a", 5)):
        journal.tell(1, "delivered", task, priority=priority)


@breaks()
def turns_of_tenants(journal: SmallJournal) -> None:
    """With fair order, a later task may be delivered before an earlier task of another tenant."""
    _set(journal, 0, 1, order="fair")
    for task, tenant in (("a", "x"), ("b", "x"), ("c", "y")):
        journal.tell(0, "published", task, tenant=tenant)
    for task in "acb":
        journal.tell(1, "delivered", task)


@breaks("R8")
def two_of_an_entity(journal: SmallJournal) -> None:
    """A task is delivered while another one with its ordering key runs; a cancelled one does not count."""
    for task in "abc":
        journal.tell(0, "published", task, ordering_key="e")
    journal.tell(1, "delivered", "a")
    journal.tell(2, "cancelled", "c")
    journal.tell(3, "delivered", "b")


@breaks()
def one_after_another(journal: SmallJournal) -> None:
    """Tasks with the same ordering key run one after the other, with a redelivery in between."""
    for task in "ab":
        journal.tell(0, "published", task, ordering_key="e")
    journal.tell(1, "delivered", "a")
    journal.tell(1, "redelivered", "a")
    journal.tell(2, "delivered", "a")
    journal.tell(3, "dead_lettered", "a")
    journal.tell(4, "delivered", "b")


@breaks("R9")
def made_available_early(journal: SmallJournal) -> None:
    """A scheduled task is made available 10 ms too early."""
    journal.tell(0, "published", "a", due=5)
    journal.tell(4.99, "available", "a")


@breaks("R10")
def beyond_the_limit(journal: SmallJournal) -> None:
    """Three tasks are in flight with a limit of two; those in flight when the limit was set do not count."""
    _set(journal, 0, 1)
    for task in "abcdefg":
        journal.tell(0, "published", task)
    for task in "abcd":
        journal.tell(1, "delivered", task)
    _set(journal, 2, 2, max_inflight=2)
    for task in "ab":
        journal.tell(3, "acked", task)
    journal.tell(4, "delivered", "e")
    journal.tell(4, "delivered", "f")


@breaks("R10")
def beyond_a_tenants_limit(journal: SmallJournal) -> None:
    """A tenant has two tasks in flight although its limit is one."""
    _set(journal, 0, 1, order="fair", tenant_max_inflight=1)
    for task, tenant in (("a", "x"), ("b", "y"), ("c", "y")):
        journal.tell(0, "published", task, tenant=tenant)
        journal.tell(1, "delivered", task)


@breaks("R11")
def beyond_the_rate(journal: SmallJournal) -> None:
    """Three deliveries fit the rate limit, and a fourth one comes too early."""
    _set(journal, 0, 1, rate_limit=RateLimit(max_tokens=2, interval=2))
    for task in "abcd":
        journal.tell(0, "published", task)
    for task, second in (("a", 1), ("b", 1), ("c", 2), ("d", 2.9)):
        journal.tell(second, "delivered", task)


@breaks()
def within_the_rate(journal: SmallJournal) -> None:
    """Deliveries fit the rate limit, because enough time passes in between."""
    _set(journal, 0, 1, rate_limit=RateLimit(max_tokens=2, interval=2))
    for task, second in (("a", 1), ("b", 1), ("c", 2), ("d", 3), ("e", 5), ("f", 5)):
        journal.tell(second, "published", task)
        journal.tell(second, "delivered", task)


@breaks("R12")
def handed_out_in_a_pause(journal: SmallJournal) -> None:
    """A task is delivered while the queue is paused, and another one after the pause."""
    _set(journal, 0, 1)
    for task in "ab":
        journal.tell(0, "published", task)
    _set(journal, 1, 2, paused=True)
    journal.tell(2, "delivered", "a")
    _set(journal, 3, 3)
    journal.tell(4, "delivered", "b")


@breaks("R13")
def delivered_after_it_expired(journal: SmallJournal) -> None:
    """A task is delivered after it has expired."""
    journal.tell(0, "published", "a")
    journal.tell(1, "expired", "a")
    journal.tell(2, "delivered", "a")


@breaks()
def something_is_missing(journal: SmallJournal) -> None:
    """Rows are missing, so no rule can be decided for the tasks around them."""
    _set(journal, 0, 1, max_inflight=1)
    _done(journal, "a")
    journal.tell(1, "published", "b", ordering_key="e")
    journal.tell(1, "published", "c", ordering_key="e")
    journal.tell(2, "delivered", "b")
    journal._seqs["something_is_missing", journal.shard] += 3
    journal.tell(3, "delivered", "a")
    journal.tell(3, "dead_lettered", "d")
    journal.tell(4, "redriven", "d")
    journal.tell(5, "acked", "a")
    journal.tell(6, "delivered", "c")


@breaks()
def settings_were_cut_off(journal: SmallJournal) -> None:
    """The first settings are missing, which might allow all this: fair order, a short window, many losses."""
    _set(journal, 0, 1, order="fair", dedupe_window=10, max_losses=10)
    del journal.rows[0]
    for task, tenant in (("a", "x"), ("b", "x"), ("c", "y")):
        journal.tell(0, "published", task, tenant=tenant)
    for task in "acb":
        journal.tell(1, "delivered", task)
    for losses in range(1, 8):
        journal.tell(2, "lost", "b", losses=losses)
        journal.tell(2, "delivered", "b", losses=losses)
    journal.tell(2, "acked", "b", losses=7)
    journal.tell(20, "published", "b")
    _set(journal, 30, 2)
    journal.tell(30, "lost", "c", losses=1)
    for losses in range(2, 8):
        journal.tell(30, "delivered", "c", losses=losses - 1)
        journal.tell(31, "lost", "c", losses=losses)
    journal.tell(32, "delivered", "c", losses=7)


@breaks("R7")
def whatever_was_cut_off(journal: SmallJournal) -> None:
    """Missing first settings cannot explain why a task without a tenant is overtaken."""
    _set(journal, 0, 1)
    del journal.rows[0]
    overtaken(journal)


@breaks()
def new_settings_may_be_missing(journal: SmallJournal) -> None:
    """Rows are missing that may have ended the pause and removed the limits."""
    limits = {"max_inflight": 1, "rate_limit": RateLimit(max_tokens=1, interval=60)}
    _set(journal, 0, 1, paused=True, order="fair", tenant_max_inflight=1, **limits)
    journal._seqs[journal.run, journal.shard] += 1
    for task in "abc":
        journal.tell(1, "published", task, tenant="x")
        journal.tell(1, "delivered", task)


@breaks("R12")
def no_settings_can_be_missing(journal: SmallJournal) -> None:
    """Rows are missing, but the version numbers of the settings show that no settings are among them."""
    _set(journal, 0, 1, paused=True)
    journal._seqs[journal.run, journal.shard] += 1
    journal.tell(1, "published", "a")
    journal.tell(1, "delivered", "a")
    _set(journal, 2, 2)


@pytest.fixture(scope="module")
def found(spark: SparkSession) -> dict[str, list[Row]]:
    """Return the violations in all registered journals and some synthetic ones, by run, from one query."""
    journal = made(5, 600).table
    journals = {
        "sound": journal,
        "gone": removed(journal)[0],
        "unnoted": renumbered(removed(journal)[0]),
        "doubled": doubled(journal)[0],
        "swapped": swapped(journal)[0],
    }
    parts = [moved(part, name, place + 10) for place, (name, part) in enumerate(journals.items())]
    parts += [pa.Table.from_pylist(rows, schema=TRANSITIONS) for rows in _told()]
    broken: defaultdict[str, list[Row]] = defaultdict(list)
    for row in violations(spark.createDataFrame(pa.concat_tables(parts))).collect():
        broken[row["run"]].append(row)
    return broken


def _told() -> Iterator[list[dict[str, Any]]]:
    for place, (name, (_, tale)) in enumerate(TALES.items()):
        journal = SmallJournal(key=name, run=name, shard=1000 + place)
        tale(journal)
        yield journal.rows


@pytest.mark.parametrize("name", TALES)
def test_a_tale(found: dict[str, list[Row]], name: str) -> None:
    """Exactly the rules that a journal violates are reported, once each (G9)."""
    rules, _ = TALES[name]
    broken = found[name]
    assert sorted(row["rule"] for row in broken) == sorted(rules), broken
    assert all(row["key"] == name and row["text"] and row["task_id"] for row in broken)


def test_every_rule_has_a_tale() -> None:
    """Each rule is violated by at least one of these journals (G9)."""
    assert set(RULES) == set().union(*(rules for rules, _ in TALES.values()))


@pytest.mark.parametrize(
    ("name", "rules"),
    [
        ("sound", {}),
        ("gone", {}),
        ("unnoted", {}),
        ("doubled", {"R4": 1}),
        ("swapped", {"R1": 1, "R2": 1}),
    ],
)
def test_a_changed_journal(found: dict[str, list[Row]], name: str, rules: dict[str, int]) -> None:
    """A correct journal violates no rule, while a doubled ack or one with a wrong id does (G9)."""
    assert Counter(row["rule"] for row in found[name]) == rules


def test_counts(spark: SparkSession) -> None:
    """Every rule is counted, with 0 for one that was kept; a task that the audit calls lost violates R1 (G9)."""
    rows = [("R3", "k", "a", "r", 0, 1, "x")] * 2
    schema = "rule string, key string, task_id string, run string, shard int, seq long, text string"
    found = counts(spark.createDataFrame(rows, schema)).collect()
    assert {row["rule"]: row["count"] for row in found} == dict.fromkeys(RULES, 0) | {"R3": 2}
