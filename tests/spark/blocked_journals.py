"""Small journals of tasks that wait for others."""

from __future__ import annotations

from tests.spark.small_journals import SmallJournal


def tasks_that_wait_for_others(journal: SmallJournal) -> None:
    """Blocked tasks are released, rescheduled and released for a time, cancelled, and dead for their inputs' size."""
    for task in "abcd":
        journal.tell(0, "published", task, state="blocked")
    journal.tell(1, "released", "a")
    journal.tell(1, "delivered", "a")
    journal.tell(1, "rescheduled", "b", state="blocked", due=5)
    journal.tell(2, "released", "b", state="scheduled", due=5)
    journal.tell(5, "available", "b")
    journal.tell(5, "delivered", "b")
    journal.tell(6, "cancelled", "c", reason="parent_ended")
    journal.tell(6, "dead_lettered", "d", reason="inputs_too_large")


def delivered_while_blocked(journal: SmallJournal) -> None:
    """A task is delivered while it waits for others."""
    journal.tell(0, "published", "a", state="blocked")
    journal.tell(1, "delivered", "a")


def released_twice(journal: SmallJournal) -> None:
    """A task is released after it was released and delivered."""
    journal.tell(0, "published", "a", state="blocked")
    journal.tell(1, "released", "a")
    journal.tell(2, "delivered", "a")
    journal.tell(3, "released", "a")


def settled_while_blocked(journal: SmallJournal) -> None:
    """A task becomes a dead letter of its handler while it waits for others."""
    journal.tell(0, "published", "a", state="blocked")
    journal.tell(1, "dead_lettered", "a", reason="bad")


BLOCKED = (
    (set[str](), tasks_that_wait_for_others),
    ({"R9"}, delivered_while_blocked),
    ({"R4"}, released_twice),
    ({"R2"}, settled_while_blocked),
)
"""the rules that each journal violates, and the journal"""
