"""The file itself: the cost of a lookup, and the error when it fails."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from taskqueue_core.capabilities import NewEvent, NewEvents, QueueSettings
from taskqueue_core.clock import ManualClock
from taskqueue_core.errors import BackendUnavailable, ConfigurationError, PublishUnconfirmed
from taskqueue_core.rate_limit import RateLimit
from taskqueue_core.tasks import State, Task

from taskqueue_sqlite import SQLiteBackend


def connection_of(backend: SQLiteBackend) -> sqlite3.Connection:
    """Return the connection of a backend that has been used."""
    connection: sqlite3.Connection = backend._transitions.store._database  # type: ignore[attr-defined]
    return connection


async def live_a_life(backend: SQLiteBackend, clock: ManualClock) -> None:
    """Run all calls of publishers, consumers, readers and maintenance, with dead letters and limits."""
    rate = RateLimit(max_tokens=9)
    limits = QueueSettings(
        capacity=9,
        max_inflight=9,
        rate_limit=rate,
        max_processing_time=99,
        index=("user",),
        keep_ended=999,
        keep_ended_most=1,
        stream_events=2,
    )
    limits = await backend.control.configure("k", limits)
    tasks = [Task(key="k", deadline=clock.now() + 9), Task(key="k", not_before=clock.now() + 1)]
    await backend.publisher.publish(*tasks, Task(key="k", tags=("user:1",)), Task(key="k"))
    for newest in (False, True):
        await backend.listing.tasks("k", state=State.WAITING, limit=1, newest=newest)
        await backend.listing.tasks("k", tag="user:1", newest=newest)
    await clock.advance(1)
    subscription = backend.subscribe(["k", "idle"], "worker")
    first, second, third, fourth = (await subscription.receive(5, 0)).deliveries
    await backend.streams.append(
        NewEvents(delivery=first, events=(NewEvent(value=b"1"),) * 3, first=1)
    )
    await backend.streams.events("k", first.task.id)
    await subscription.ack(first, results=[b"1"])
    await subscription.redeliver(second, lost=True)
    await backend.publisher.schedule_retry(third.task, clock.now() + 1, settles=third)
    await subscription.dead_letter(fourth, "bad")
    await backend.dead_letters.list("k", after=fourth.task.id)
    await backend.dead_letters.redrive("k")
    await subscription.receive(1, 0)
    await clock.advance(99)
    await subscription.receive(1, 0)
    await subscription.close()
    await backend.control.purge("k")
    await backend.control.statuses("k", first.task.id)
    await backend.control.stats("k")
    await backend.control.workers()
    await backend.control.configure("k", limits.model_copy(update={"rate_limit": None}))
    await clock.advance(9999)
    await backend.control.maintain()


async def test_no_look_up_scans(tmp_path: Path) -> None:
    """Every query uses an index, and needs no sorting, so its cost does not depend on the number of other tasks."""
    clock = ManualClock()
    backend = SQLiteBackend(tmp_path / "file", clock)
    await backend.health()  # queries that open the file need no index
    asked: list[str] = []
    connection_of(backend).set_trace_callback(asked.append)
    await live_a_life(backend, clock)
    connection_of(backend).set_trace_callback(None)
    queries = {  # SQLite cannot parse the text that it prints for infinity
        query.replace(" Inf", " 9e999") for query in asked if query.startswith(("SELECT", "DELETE"))
    }
    assert len(queries) > 10
    for query in queries:
        plan = connection_of(backend).execute(f"EXPLAIN QUERY PLAN {query}").fetchall()
        steps = [step for *_, step in plan]
        assert all(step.startswith("SEARCH") for step in steps), (query, steps)
    await backend.aclose()


async def test_a_full_disk(tmp_path: Path) -> None:
    """A publish that fails because the disk is full raises an error and changes nothing."""
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


@contextmanager
def denied(backend: SQLiteBackend, *ends: str) -> Iterator[None]:
    """Make every COMMIT or ROLLBACK fail during the context."""

    def decide(action: int, operation: str | None, *_: str | None) -> int:
        denies = action == sqlite3.SQLITE_TRANSACTION and operation in ends
        return sqlite3.SQLITE_DENY if denies else sqlite3.SQLITE_OK

    connection = connection_of(backend)
    connection.set_authorizer(decide)
    yield
    connection.set_authorizer(None)


@pytest.mark.parametrize("ends", [("COMMIT",), ("COMMIT", "ROLLBACK")])
async def test_a_failed_commit(tmp_path: Path, ends: tuple[str, ...]) -> None:
    """If a COMMIT fails, a publish is unconfirmed and any other call fails; later calls work and find all tasks.

    The same is true if the ROLLBACK fails too.
    """
    backend = SQLiteBackend(tmp_path / "file")
    await backend.publisher.publish(Task(key="k"))
    subscription = backend.subscribe(["k"], "worker")
    with denied(backend, *ends), pytest.raises(PublishUnconfirmed):
        await backend.publisher.publish(Task(key="k"))
    with denied(backend, *ends), pytest.raises(BackendUnavailable):
        await subscription.receive(1, 0)
    with denied(backend, *ends), pytest.raises(BackendUnavailable):
        await backend.control.configure("k", QueueSettings(max_losses=1))
    assert len((await subscription.receive(9, 0)).deliveries) == 1
    assert (await backend.control.ledger("k")).in_flight == 1
    assert await backend.control.settings("k") == QueueSettings()
    await backend.aclose()


@pytest.mark.parametrize("table", ["records", "settings"])
async def test_what_cannot_be_read(tmp_path: Path, table: str) -> None:
    """If a row cannot be decoded, a call that reads it raises `BackendUnavailable`."""
    backend = SQLiteBackend(tmp_path / "file")
    await backend.publisher.publish(Task(key="k", id="t"))
    await backend.control.configure("k", QueueSettings())
    await backend.aclose()
    with sqlite3.connect(tmp_path / "file") as connection:
        column = {"records": "record", "settings": "value"}[table]
        connection.execute(f"UPDATE {table} SET {column} = x'00'")  # noqa: S608
    connection.close()
    backend = SQLiteBackend(tmp_path / "file")
    call = (
        backend.control.statuses("k", "t") if table == "records" else backend.control.settings("k")
    )
    with pytest.raises(BackendUnavailable):
        await call
    await backend.aclose()


async def test_what_is_no_such_file(tmp_path: Path) -> None:
    """A file of another kind or of a later format is not changed, and no folder is created; the error says why."""
    text, later, foreign = tmp_path / "text", tmp_path / "later", tmp_path / "foreign"
    text.write_text("no database " * 1000)
    for path, change in (
        (later, "PRAGMA user_version = 99"),
        (foreign, "CREATE TABLE records (key)"),
    ):
        with sqlite3.connect(path) as connection:
            connection.execute(change)
        connection.close()
    before = [path.read_bytes() for path in (text, later, foreign)]
    for path, error, word in (
        (text, ConfigurationError, "not a database"),
        (later, ConfigurationError, "format 99"),
        (foreign, ConfigurationError, "format 0"),
        (tmp_path / "no" / "file", BackendUnavailable, "open"),
    ):
        backend = SQLiteBackend(path)
        with pytest.raises(error, match=word):
            await backend.control.queues()
        assert word in str((await backend.health()).details)
        await backend.aclose()
    assert [path.read_bytes() for path in (text, later, foreign)] == before
