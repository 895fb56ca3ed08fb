"""Rescheduled and replaced tasks in the rules of the history."""

from __future__ import annotations

from pyspark.sql import SparkSession

from taskqueue_spark.pipeline.history import violations
from tests.spark.small_journals import SmallJournal


def test_rescheduled_tasks(spark: SparkSession) -> None:
    """U6: only waiting and scheduled tasks are rescheduled (R4), and none is available before its new time (R9)."""
    journal = SmallJournal()
    journal.tell(0, "published", "sound")
    journal.tell(1, "rescheduled", "sound", due=9)
    journal.tell(2, "rescheduled", "sound", due=3)
    journal.tell(3, "available", "sound")
    journal.tell(4, "published", "running")
    journal.tell(5, "delivered", "running", worker="w")
    journal.tell(6, "rescheduled", "running", due=9)
    journal.tell(7, "published", "early", due=8)
    journal.tell(7.5, "rescheduled", "early", due=50)
    journal.tell(8, "available", "early")
    found = violations(journal.frame(spark)).collect()
    assert {(row["task_id"], row["rule"]) for row in found} == {("running", "R4"), ("early", "R9")}


def test_replaced_tasks(spark: SparkSession) -> None:
    """U12: only waiting and scheduled tasks are replaced (R4), and none is available before its new time (R9)."""
    journal = SmallJournal()
    journal.tell(0, "published", "sound", due=9)
    journal.tell(1, "replaced", "sound", due=3)
    journal.tell(3, "available", "sound")
    journal.tell(3.5, "replaced", "sound")
    journal.tell(4, "delivered", "sound", worker="w")
    journal.tell(5, "replaced", "sound")
    journal.tell(7, "published", "early", due=8)
    journal.tell(7.5, "replaced", "early", due=50)
    journal.tell(8, "available", "early")
    found = violations(journal.frame(spark)).collect()
    assert {(row["task_id"], row["rule"]) for row in found} == {("sound", "R4"), ("early", "R9")}


def test_a_replacement_with_another_ordering_key(spark: SparkSession) -> None:
    """U12, law 4: a replaced task runs with the ordering key of its new contents, and not with the former one (R8)."""
    journal = SmallJournal()
    for task, former, key in (("sound", "a", "b"), ("at-once", "b", "a")):
        journal.tell(0, "published", task, ordering_key=former, due=2)
        journal.tell(1, "replaced", task, ordering_key=key, due=3)
    journal.tell(2, "published", "of-a", ordering_key="a")
    journal.tell(2.5, "delivered", "of-a", ordering_key="a", worker="w")
    for task, key in (("sound", "b"), ("at-once", "a")):
        journal.tell(3, "available", task, ordering_key=key)
        journal.tell(4, "delivered", task, ordering_key=key, worker="w")
    found = violations(journal.frame(spark)).collect()
    assert [(row["task_id"], row["rule"]) for row in found] == [("at-once", "R8")]
