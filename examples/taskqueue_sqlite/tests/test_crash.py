"""After a crash the file is consistent, and unfinished tasks are delivered again."""

import asyncio
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from taskqueue_core.errors import BackendUnavailable
from taskqueue_core.recordstore import Record
from taskqueue_core.tasks import State, Task

from taskqueue_sqlite import SQLiteBackend
from taskqueue_sqlite.store import SQLiteStore

ROUNDS = 3


def open_backend(folder: Path) -> SQLiteBackend:
    """Open the store as a new process would."""
    return SQLiteBackend(folder / "taskqueue.db")


async def work(folder: Path) -> None:
    """Publish and consume tasks until this process is killed, and write confirmed calls to a file."""
    backend, notes = open_backend(folder), (folder / "notes").open("a", buffering=1)

    async def publish() -> None:
        while True:
            tasks = [Task(key="k") for _ in range(random.randrange(1, 5))]
            for confirmation in await backend.publisher.publish(*tasks):
                notes.write(f"published {confirmation.task_id}\n")
            # give the consumers a turn, because a call on this backend never waits
            await asyncio.sleep(0)

    async def drain() -> None:
        subscription = backend.subscribe(["k"], "worker")
        async for delivery in subscription:
            await asyncio.sleep(random.uniform(0, 0.01))
            match random.randrange(10):
                case 0:
                    await subscription.redeliver(delivery)
                case 1:
                    await backend.publisher.schedule_retry(
                        delivery.task, backend.now(), settles=delivery
                    )
                case 2:
                    await subscription.dead_letter(delivery, "a test")
                    notes.write(f"dead {delivery.task.id}\n")
                case _:
                    await subscription.ack(delivery, results=[b'"result"'])
                    notes.write(f"done {delivery.task.id}\n")

    await asyncio.gather(*(publish() for _ in range(3)), *(drain() for _ in range(5)))


async def check(folder: Path) -> None:
    """Reopen the store, account for every task, and deliver those that have not ended."""
    backend, confirmed = open_backend(folder), defaultdict[str, set[str]](set)
    for line in (folder / "notes").read_text().splitlines():
        verb, task_id = line.split()
        confirmed[verb].add(task_id)
    ids = tuple(set().union(*confirmed.values()))
    statuses = await backend.control.statuses("k", *ids)
    states = {status.task_id: status.state for status in statuses if status is not None}
    assert states.keys() == set(ids)
    assert {states[task_id] for task_id in confirmed["done"]} <= {State.DONE}
    assert {states[task_id] for task_id in confirmed["dead"]} <= {State.DEAD}
    results = await backend.control.results("k", *confirmed["done"])
    assert set(results) <= {b'"result"'}
    async with backend.subscribe(["k"], "worker") as subscription:
        delivered = Counter[str]()
        while deliveries := (await subscription.receive(1000, 0)).deliveries:
            delivered.update(delivery.task.id for delivery in deliveries)
        assert not delivered.keys() & (confirmed["done"] | confirmed["dead"])
        assert set(delivered.values()) <= {1}
    ledger = await backend.control.ledger("k")
    assert ledger.balanced
    assert ledger.waiting == len(delivered)
    assert ledger.in_flight == ledger.scheduled == 0
    assert (await backend.control.stats("k")).lost > 0
    assert ledger.published >= len(confirmed["published"])
    await backend.aclose()


def test_killed(tmp_path: Path) -> None:
    """Confirmed tasks are stored, settled tasks have ended, and each other task is delivered again once."""
    notes = tmp_path / "notes"
    notes.touch()
    for _ in range(ROUNDS):
        enough = notes.read_text().count("done") + random.randrange(1, 100)
        process = subprocess.Popen([sys.executable, __file__, str(tmp_path)])
        while notes.read_text().count("done") < enough and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        asyncio.run(check(tmp_path))


async def test_one_process(tmp_path: Path) -> None:
    """Only one backend may open the file: a second one is refused, and does not change the file."""
    first, second = open_backend(tmp_path), open_backend(tmp_path)
    await first.publisher.publish(Task(key="k"))
    assert not (await second.health()).ok
    with pytest.raises(BackendUnavailable, match="another process"):
        await second.publisher.publish(Task(key="k"))
    await first.aclose()
    assert (await second.health()).ok
    await second.aclose()


async def crash(folder: Path) -> None:
    """Leave two tasks in flight, as a process that is killed."""
    backend = open_backend(folder)
    await backend.publisher.publish(Task(key="k"), Task(key="k"))
    await backend.subscribe(["k"], "worker").receive(2, 0)
    backend._transitions.store.close()  # the subscription is not closed, so nothing is released


async def test_opened_late(tmp_path: Path) -> None:
    """Deliveries of a crashed process are released, although the file could not be opened at first."""
    await crash(tmp_path)
    other = sqlite3.connect(tmp_path / "taskqueue.db", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    backend = open_backend(tmp_path)
    with pytest.raises(BackendUnavailable):
        await backend.control.maintain()
    other.close()
    await backend.control.maintain()
    assert (await backend.control.ledger("k")).waiting == 2
    await backend.aclose()


async def test_recovery_is_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Releasing the deliveries of a crashed process is one transaction, which is repeated if it fails."""
    await crash(tmp_path)
    backend, taken = open_backend(tmp_path), list[Record]()

    def break_off(store: SQLiteStore, record: Record) -> None:
        taken.append(record)
        if len(taken) > 1:
            raise BackendUnavailable("disk I/O error")
        save(store, record)

    save = SQLiteStore.save
    with monkeypatch.context() as patched:
        patched.setattr(SQLiteStore, "save", break_off)
        with pytest.raises(BackendUnavailable):
            await backend.control.maintain()
    other = sqlite3.connect(tmp_path / "taskqueue.db")
    rows = other.execute("SELECT count(*), count(owner) FROM records").fetchall()
    assert rows == [(2, 2)], "half of the recovery was kept"
    other.close()
    stats = await backend.control.stats("k")
    assert (stats.lost, stats.ledger.waiting, stats.ledger.imbalance) == (2, 2, 0)
    await backend.aclose()


if __name__ == "__main__":
    asyncio.run(work(Path(sys.argv[1])))
