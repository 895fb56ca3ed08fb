"""What a crash leaves behind is whole, and comes back."""

import asyncio
import random
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from unittest.mock import Mock

import pytest
from taskqueue_core.clock import ManualClock
from taskqueue_core.errors import BackendUnavailable, PublishUnconfirmed
from taskqueue_core.tasks import Published, State, Task

from taskqueue_sqlite import SqliteBackend, SqliteSettings

ROUNDS = 3


def open_backend(folder: Path) -> SqliteBackend:
    """Open the store as a new process would, with no grace for workers of the former one."""
    return SqliteBackend(SqliteSettings(path=folder / "taskqueue.db", grace=0))


async def work(folder: Path) -> None:
    """Publish and drain until killed, and note what was confirmed."""
    backend, notes = open_backend(folder), (folder / "notes").open("a", buffering=1)

    async def publish() -> None:
        while True:
            tasks = [Task(key="k") for _ in range(random.randrange(1, 5))]
            for confirmation in await backend.publisher.publish(*tasks):
                notes.write(f"published {confirmation.task_id}\n")

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
    """Reopen the store, account for every task, and hand out what is not over."""
    backend, told = open_backend(folder), defaultdict[str, set[str]](set)
    for line in (folder / "notes").read_text().splitlines():
        verb, task_id = line.split()
        told[verb].add(task_id)
    ids = tuple(set().union(*told.values()))
    statuses = await backend.control.statuses("k", *ids)
    states = {status.task_id: status.state for status in statuses if status is not None}
    assert states.keys() == set(ids)
    assert {states[task_id] for task_id in told["done"]} <= {State.DONE}
    assert {states[task_id] for task_id in told["dead"]} <= {State.DEAD}
    results = await backend.control.results("k", *told["done"])
    assert set(results) <= {b'"result"'}
    async with backend.subscribe(["k"], "worker") as subscription:
        received = await subscription.receive(1_000_000, 0)
        handed_out = Counter(delivery.task.id for delivery in received.deliveries)
        assert not handed_out.keys() & (told["done"] | told["dead"])
        assert set(handed_out.values()) <= {1}
    ledger = await backend.control.ledger("k")
    assert ledger.balanced
    assert ledger.waiting == len(handed_out)
    assert ledger.in_flight == ledger.scheduled == 0
    assert (await backend.control.stats("k")).lost > 0
    assert ledger.published >= len(told["published"])
    await backend.aclose()


def test_killed(tmp_path: Path) -> None:
    """Confirmed tasks are there, settled ones are over, and all others come back, each once."""
    for _ in range(ROUNDS):
        process = subprocess.Popen([sys.executable, __file__, str(tmp_path)])
        try:
            process.wait(timeout=random.uniform(0.6, 2.0))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        asyncio.run(check(tmp_path))


async def test_worker_comes_back(tmp_path: Path) -> None:
    """What a worker claims after a crash of the server is still its own; the rest is lost when the grace is over."""
    settings, clock = SqliteSettings(path=tmp_path / "taskqueue.db", grace=10), ManualClock()
    crashed = SqliteBackend(settings, clock)
    await crashed.publisher.publish(*(Task(key="k", id=name) for name in ("kept", "lost")))
    before = (await crashed.subscribe(["k"], "worker").receive(2, 0)).deliveries
    await crashed._store.aclose()  # as a crash does: without handing anything back

    backend = SqliteBackend(settings, clock)
    async with backend.subscribe(["k"], "worker") as subscription:
        assert await subscription.adopt(before[0].receipt) == (before[0],)
        waiting = asyncio.create_task(subscription.receive(2, None))
        await clock.advance(9.9)
        assert not waiting.done()
        await clock.advance(0.1)
        (again,) = (await waiting).deliveries
        assert (again.task.id, again.attempt, again.losses) == ("lost", 1, 1)
        await subscription.ack(*before[:1], again)
    assert (await backend.control.ledger("k")).done == 2
    await backend.aclose()


async def test_one_process(tmp_path: Path) -> None:
    """The file is one process's alone: another one is told so, and harms nothing."""
    first, second = open_backend(tmp_path), open_backend(tmp_path)
    await first.publisher.publish(Task(key="k"))
    assert not (await second.health()).ok
    with pytest.raises(BackendUnavailable):
        await second.publisher.publish(Task(key="k"))
    await first.aclose()
    assert (await second.health()).ok
    await second.aclose()


async def test_flush_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that may not be on the disk is not confirmed; published again it is there once."""
    backend, task = open_backend(tmp_path), Task(key="k")
    with monkeypatch.context() as broken:
        broken.setattr("os.fsync", Mock(side_effect=OSError(5, "Input/output error")))
        with pytest.raises(PublishUnconfirmed, match="Input/output error"):
            await backend.publisher.publish(task)
    (confirmation,) = await backend.publisher.publish(task)
    assert confirmation.status is Published.DUPLICATE
    await backend.aclose()


if __name__ == "__main__":
    asyncio.run(work(Path(sys.argv[1])))
