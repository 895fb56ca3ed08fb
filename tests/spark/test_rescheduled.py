"""Rescheduled tasks in the rules of the history."""

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
