"""The file itself: what it costs to look something up, and what is told when it fails."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from taskqueue_core.clock import ManualClock
from taskqueue_core.errors import BackendUnavailable, ConfigurationError, PublishUnconfirmed
from taskqueue_core.tasks import Task

from taskqueue_sqlite import SQLiteBackend


def connection_of(backend: SQLiteBackend) -> sqlite3.Connection:
    """Return the connection of a backend that has been used."""
    connection: sqlite3.Connection = backend._books.store._database  # type: ignore[attr-defined]
    return connection


async def live_a_life(backend: SQLiteBackend, clock: ManualClock) -> None:
    """Go through all that publishers, consumers and housekeeping do, dead letters too."""
    tasks = [Task(key="k", deadline=clock.now() + 9), Task(key="k", not_before=clock.now() + 1)]
    await backend.publisher.publish(*tasks, Task(key="k"), Task(key="k"))
    await clock.advance(1)
    subscription = backend.subscribe(["k", "idle"], "worker")
    first, second, third, fourth = (await subscription.receive(5, 0)).deliveries
    await subscription.ack(first, results=[b"1"])
    await subscription.redeliver(second, lost=True)
    await backend.publisher.schedule_retry(third.task, clock.now() + 1, settles=third)
    await subscription.dead_letter(fourth, "bad")
    await backend.dead_letters.list("k", after=fourth.task.id)
    await backend.dead_letters.redrive("k")
    await subscription.receive(1, 0)
    await subscription.close()
    await backend.control.purge("k")
    await backend.control.statuses("k", first.task.id)
    await backend.control.stats("k")
    await backend.control.workers()
    await clock.advance(9999)
    await backend.control.maintain()


async def test_no_look_up_scans(tmp_path: Path) -> None:
    """Whatever is asked while tasks come and go is answered by an index, in its order: other tasks cost nothing."""
    clock = ManualClock()
    backend = SQLiteBackend(tmp_path / "file", clock)
    await backend.health()  # opening it may read more
    asked: list[str] = []
    connection_of(backend).set_trace_callback(asked.append)
    await live_a_life(backend, clock)
    connection_of(backend).set_trace_callback(None)
    queries = {  # as they were traced; how SQLite writes infinity it cannot read
        query.replace(" Inf", " 9e999") for query in asked if query.startswith(("SELECT", "DELETE"))
    }
    assert len(queries) > 10
    for query in queries:
        plan = connection_of(backend).execute(f"EXPLAIN QUERY PLAN {query}").fetchall()
        steps = [step for *_, step in plan]
        assert all(step.startswith("SEARCH") for step in steps), (query, steps)
    await backend.aclose()


async def test_a_full_disk(tmp_path: Path) -> None:
    """A publish for which there is no room has left nothing, and says so; the next one finds the file as it was."""
    backend = SQLiteBackend(tmp_path / "file")
    await backend.publisher.publish(Task(key="k"))
    ((pages,),) = connection_of(backend).execute("PRAGMA page_count").fetchall()
    connection_of(backend).execute(f"PRAGMA max_page_count = {pages}")
    big = Task.of("k", "x" * 100_000)
    with pytest.raises(BackendUnavailable, match="full"):
        await backend.publisher.publish(Task(key="k"), big)
    assert (await backend.control.ledger("k")).published == 1
    connection_of(backend).execute("PRAGMA max_page_count = 100000")
    await backend.publisher.publish(big)
    assert (await backend.control.ledger("k")).published == 2
    await backend.aclose()


class Uncommitting:
    """A connection whose COMMIT fails."""

    def __init__(self, inner: sqlite3.Connection) -> None:
        self.inner = inner

    def execute(self, query: str, values: tuple[object, ...] = ()) -> sqlite3.Cursor:
        """Pass on what is no COMMIT."""
        if query == "COMMIT":
            raise sqlite3.OperationalError("disk I/O error")
        return self.inner.execute(query, values)

    def rollback(self) -> None:
        """Pass on."""
        self.inner.rollback()


async def test_a_failed_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A publish whose COMMIT failed is unsure, any other call failed; after it everything is there and is found."""
    backend = SQLiteBackend(tmp_path / "file")
    await backend.publisher.publish(Task(key="k"))
    subscription = backend.subscribe(["k"], "worker")
    store = backend._books.store
    with monkeypatch.context() as broken:
        broken.setattr(store, "_connection", Uncommitting(connection_of(backend)))
        with pytest.raises(PublishUnconfirmed):
            await backend.publisher.publish(Task(key="k"))
        with pytest.raises(BackendUnavailable):
            await subscription.receive(1, 0)
    assert len((await subscription.receive(9, 0)).deliveries) == 1
    assert (await backend.control.ledger("k")).in_flight == 1
    await backend.aclose()


async def test_what_is_no_such_file(tmp_path: Path) -> None:
    """A file of another kind or a later format, or one in no folder, is left alone, with a word on what is wrong."""
    text, later = tmp_path / "text", tmp_path / "later"
    text.write_text("no database " * 1000)
    with sqlite3.connect(later) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    for path, word in ((text, "not a database"), (tmp_path / "no" / "file", "open")):
        backend = SQLiteBackend(path)
        with pytest.raises(BackendUnavailable, match=word):
            await backend.control.queues()
        assert word in str((await backend.health()).details)
        await backend.aclose()
    with pytest.raises(ConfigurationError, match="format 99"):
        await SQLiteBackend(later).control.queues()
    assert text.read_text().startswith("no database")
