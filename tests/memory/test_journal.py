"""The journal of the memory backend: one line per state change, from which the ledgers can be recomputed."""

from __future__ import annotations

import errno
import os
import random
import stat
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.clock import ManualClock
from taskqueue_core.errors import ConfigurationError, InvalidInput
from taskqueue_core.limits import LIMITS
from taskqueue_core.tasks import Ledger, State, Task
from taskqueue_memory import MemoryBackend, MemorySettings, create_backend
from taskqueue_memory.journal import JOURNAL_VERSION, JournalLine
from tests.memory.histories import History, some_moves
from tests.memory.test_wakeups import hop

KEYS = ("a", "b")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The path of the journal file."""
    return tmp_path / "journal.jsonl"


@pytest.fixture
def clock() -> ManualClock:
    """A manual clock that gives the backend its time."""
    return ManualClock()


def journaled(path: Path, clock: ManualClock) -> MemoryBackend:
    """Return a backend that writes a journal to this path."""
    return MemoryBackend(clock=clock, settings=MemorySettings(journal=path))


def written(path: Path) -> bytes:
    """Return the content of a file."""
    return path.read_bytes()


def read(path: Path) -> list[JournalLine]:
    """Return the lines of a journal, each validated against `JournalLine`."""
    return [msgspec.json.decode(line, type=JournalLine) for line in written(path).splitlines()]


def whole(path: Path) -> list[JournalLine]:
    """Return the complete lines of a journal, without those that were cut off."""
    lines = []
    for text in written(path).splitlines():
        with suppress(msgspec.DecodeError):
            lines.append(msgspec.json.decode(text, type=JournalLine))
    return lines


def replay(lines: list[JournalLine]) -> dict[str, Ledger]:
    """Compute the ledger of each queue from the journal alone."""
    states: dict[tuple[str, str], State] = {}
    counts: dict[str, Counter[str]] = {}
    for line in lines:
        if line.event == "configured":
            continue
        count = counts.setdefault(line.key, Counter())
        before = states.get((line.key, line.task_id))
        goes_on = before is not None and (before.live or before is State.DEAD)
        if goes_on and before is not None:
            count[before] -= 1
        else:
            assert line.event in ("published", "retried"), line
            count["published"] += 1
        states[line.key, line.task_id] = State(line.state)
        count[line.state] += 1
    return {
        key: Ledger(**{str(name): n for name, n in count.items()}) for key, count in counts.items()
    }


async def test_one_life(path: Path, clock: ManualClock) -> None:
    """G9: each state change of a task is one line with its time, the new state, the worker and the error."""
    backend = journaled(path, clock)
    start = clock.now()
    await backend.publisher.publish(Task(key="k", id="t", tenant="acme", priority=7))
    subscription = backend.subscribe(["k"], "worker-1")
    (delivery,) = (await subscription.receive(1, 0)).deliveries
    await backend.publisher.schedule_retry(delivery.task, start + 5, error="boom", settles=delivery)
    await clock.advance(5)
    (delivery,) = (await subscription.receive(1, 0)).deliveries
    await subscription.redeliver(delivery, lost=True)
    (delivery,) = (await subscription.receive(1, 0)).deliveries
    await subscription.dead_letter(delivery, "bad")
    await backend.dead_letters.redrive("k")
    (delivery,) = (await subscription.receive(1, 0)).deliveries
    await subscription.ack(delivery)
    await backend.aclose()
    told = [
        (n.event, n.state, n.attempt, n.losses, n.worker, n.error or n.reason) for n in read(path)
    ]
    assert told == [
        ("published", "waiting", 1, 0, None, None),
        ("delivered", "in_flight", 1, 0, "worker-1", None),
        ("retried", "scheduled", 2, 0, "worker-1", "boom"),
        ("available", "waiting", 2, 0, None, None),
        ("delivered", "in_flight", 2, 0, "worker-1", None),
        ("lost", "waiting", 2, 1, "worker-1", None),
        ("delivered", "in_flight", 2, 1, "worker-1", None),
        ("dead_lettered", "dead", 2, 1, "worker-1", "bad"),
        ("redriven", "waiting", 2, 0, None, None),
        ("delivered", "in_flight", 2, 0, "worker-1", None),
        ("acked", "done", 2, 0, "worker-1", None),
    ]
    assert [line.ts - start for line in read(path)] == [0, 0, 0, *[5] * 8]
    assert {(n.key, n.task_id, n.tenant, n.priority) for n in read(path)} == {("k", "t", "acme", 7)}


async def test_the_form_of_a_line(path: Path, clock: ManualClock) -> None:
    """A line is a JSON object with the fields of journal version 2, in this order."""
    backend = journaled(path, clock)
    await backend.publisher.publish(Task(key="k"))
    await backend.aclose()
    (text,) = written(path).splitlines()
    line: dict[str, Any] = msgspec.json.decode(text)
    assert " ".join(line) == (
        "v run seq ts event key task_id attempt losses state priority tenant worker error reason "
        "ordering_key due_at"
    )
    assert line["v"] == JOURNAL_VERSION == 2


@pytest.mark.parametrize("seed", range(4))
async def test_the_journal_agrees_with_the_ledgers(
    seed: int, path: Path, clock: ManualClock
) -> None:
    """Law 1, G9: after a random history, the ledgers computed from the journal equal the real ones.

    No line is missing.
    """
    backend = journaled(path, clock)
    history = History(backend, clock)
    for move, values in some_moves(random.Random(seed), 1500):
        await history.move(move, values)
        await hop()
    ledgers = {key: await backend.control.ledger(key) for key in KEYS}
    await backend.aclose()
    lines = read(path)
    assert [line.seq for line in lines] == list(range(1, len(lines) + 1))
    assert [line.ts for line in lines] == sorted(line.ts for line in lines)
    assert len({line.run for line in lines}) == 1
    closing = [line for line in lines if line.event == "redelivered"]
    assert closing
    told = replay(lines)
    for key, ledger in ledgers.items():
        moved = told[key].waiting - ledger.waiting  # closing released the deliveries in flight
        assert told[key] == msgspec.structs.replace(
            ledger, waiting=ledger.waiting + moved, in_flight=ledger.in_flight - moved
        )
        assert told[key].in_flight == 0
    events = Counter(line.event for line in lines)
    assert len(events) == 13, events


async def test_what_later_rules_ask_for(path: Path, clock: ManualClock) -> None:
    """G9: the journal records the due time and ordering key of a task, and each change of the settings."""
    backend = journaled(path, clock)
    due = clock.now() + 9
    await backend.control.configure("k", QueueSettings(max_inflight=3))
    await backend.publisher.publish(Task(key="k", id="t", ordering_key="o", not_before=due))
    await backend.aclose()
    configured, published = read(path)
    assert (configured.event, configured.task_id, configured.state) == ("configured", "", "")
    assert QueueSettings.model_validate_json(configured.reason or "").max_inflight == 3
    assert (published.ordering_key, published.due_at, published.state) == ("o", due, "scheduled")


async def test_runs_are_distinguished(path: Path, clock: ManualClock) -> None:
    """After a restart, lines are appended with another run id, and their numbers start at 1 again."""
    for _ in range(2):
        backend = journaled(path, clock)
        await backend.publisher.publish(Task(key="k"), Task(key="k"))
        await backend.aclose()
    lines = read(path)
    assert [line.seq for line in lines] == [1, 2, 1, 2]
    assert len({line.run for line in lines}) == 2


async def test_only_the_owner_can_read_it(path: Path, clock: ManualClock) -> None:
    """Only the owner can read the journal file, because task ids and errors may be confidential."""
    await journaled(path, clock).aclose()
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600  # noqa: PTH116 - a blocking call is fine in this test


async def test_payloads_are_not_in_it(path: Path, clock: ManualClock) -> None:
    """Payloads and headers are not in the journal, because it may be kept longer than the tasks."""
    backend = journaled(path, clock)
    await backend.publisher.publish(Task.of("k", "hunter2", headers={"h": "hunter2"}))
    await backend.aclose()
    assert b"hunter2" not in written(path)


async def test_long_errors_are_cut(path: Path, clock: ManualClock) -> None:
    """A long error text is cut to the limit for texts."""
    backend = journaled(path, clock)
    task = Task(key="k")
    await backend.publisher.publish(task)
    await backend.publisher.schedule_retry(task, clock.now(), error="x" * 1_000_000)
    await backend.aclose()
    assert max(len(line.error or "") for line in read(path)) == LIMITS.text


class Disk:
    """A disk that accepts a number of bytes and then raises an error for a full disk."""

    def __init__(self, room: int) -> None:
        self.room = room
        self._write = os.write

    def write(self, file: int, data: bytes) -> int:
        """Write as much of ``data`` as there is space for, and return the number of bytes."""
        if self.room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self._write(file, data[: self.room])
        self.room -= written
        return written


@pytest.mark.parametrize("room", [0, 1, 100, 300])
async def test_a_full_disk_does_not_stop_the_queue(
    room: int,
    path: Path,
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """If the disk is full, the queue continues, and one warning is logged.

    Complete lines follow as soon as there is space.
    """
    backend = journaled(path, clock)
    disk = Disk(room)
    monkeypatch.setattr(os, "write", disk.write)
    subscription = backend.subscribe(["k"], "w")
    for _ in range(5):
        await backend.publisher.publish(Task(key="k"))
        await subscription.ack(*(await subscription.receive(1, 0)).deliveries)
    assert (await backend.control.ledger("k")).done == 5
    assert [record.name for record in caplog.records] == ["taskqueue.memory"]
    assert (await backend.health()).details["journal"] is False
    disk.room = 10**6
    await backend.publisher.publish(Task(key="k", id="after"))
    await backend.aclose()
    lines = whole(path)
    assert (lines[-1].task_id, lines[-1].seq) == ("after", 16)
    assert len(lines) < 16


async def test_a_torn_line_is_a_gap(
    path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line that was written in part counts as missing, even if the next line was written completely (fault M5)."""
    backend = journaled(path, clock)
    disk = Disk(100)
    monkeypatch.setattr(os, "write", disk.write)
    await backend.publisher.publish(Task(key="k"))
    disk.room = 10**6
    assert (await backend.health()).details["journal"] is False
    await backend.publisher.publish(Task(key="k", id="after"))
    await backend.aclose()
    assert [(line.task_id, line.seq) for line in whole(path)] == [("after", 2)]


async def test_only_where_there_is_a_journal_it_may_be_asked_for(
    path: Path, clock: ManualClock
) -> None:
    """The ``journal`` setting of a queue is accepted if the backend has a journal, and refused otherwise (fault M5)."""
    asked = QueueSettings(journal=True)
    backend = journaled(path, clock)
    assert (await backend.control.configure("k", asked)).journal
    await backend.aclose()
    with pytest.raises(InvalidInput, match=r"^journal: "):
        await MemoryBackend(clock=clock).control.configure("k", asked)


async def test_a_closed_journal_touches_no_other_file(path: Path, clock: ManualClock) -> None:
    """A change after closing is not written to another file that has got the journal's file descriptor."""
    backend = journaled(path, clock)
    await backend.aclose()
    other = path.with_name("other")
    file = os.open(other, os.O_WRONLY | os.O_CREAT)  # gets the file descriptor that the journal had
    try:
        await backend.publisher.publish(Task(key="k"))
    finally:
        os.close(file)
    assert written(other) == written(path) == b""


@pytest.mark.parametrize("where", [".", "missing/journal.jsonl"])
def test_a_path_that_cannot_be_written(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A journal path that cannot be opened raises a configuration error that names the setting."""
    monkeypatch.setenv("TASKQUEUE_MEMORY_JOURNAL", str(tmp_path / where))
    with pytest.raises(ConfigurationError, match="TASKQUEUE_MEMORY_JOURNAL: cannot open the file"):
        create_backend()


async def test_health_knows_the_journal(path: Path, clock: ManualClock) -> None:
    """The health status reports whether there is a journal and whether it is complete."""
    backend = journaled(path, clock)
    assert (await backend.health()).details["journal"] is True
    await backend.aclose()
    assert (await MemoryBackend().health()).details["journal"] is None
