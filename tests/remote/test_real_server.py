"""The remote backend with a real server, which confirms what its other tests assume about the server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio

from taskqueue_cli.commands.dead_letters import act_on_all
from taskqueue_core import (
    Debounce,
    NotUnique,
    Tasks,
    Unique,
    UniqueKey,
    UnknownTask,
    confirmations,
    gather,
)
from taskqueue_core.backend import Capabilities, Capability
from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.config import Settings
from taskqueue_core.errors import InvalidInput, QueueFull, QueueInUse, SettingsConflict
from taskqueue_core.limits import LIMITS
from taskqueue_core.queue import Queue
from taskqueue_core.queue_settings import pause_queue
from taskqueue_core.rate_limit import IntervalUnit, RateLimit
from taskqueue_core.retry import RetryPolicy
from taskqueue_core.tasks import Confirmation, Published, Refusal, State, Task
from taskqueue_memory import MemoryBackend
from taskqueue_remote import RemoteBackend
from taskqueue_remote.client import HttpClient
from taskqueue_server import ServerProcess
from taskqueue_worker import LocalWorker
from tests.application.running import working
from tests.worker.local import until


@pytest_asyncio.fixture
async def store() -> MemoryBackend:
    """The store behind the server."""
    return MemoryBackend()


@pytest_asyncio.fixture
async def remote(store: MemoryBackend) -> AsyncIterator[RemoteBackend]:
    """A remote backend that is connected to a real server."""
    async with serving(store) as backend:
        yield backend


@asynccontextmanager
async def serving(store: MemoryBackend) -> AsyncIterator[RemoteBackend]:
    """Serve a store, and yield a remote backend that is connected to the server."""
    server = ServerProcess(store, Settings(port=0))
    running = asyncio.create_task(server.run())
    await asyncio.wait(
        [running, asyncio.ensure_future(server.ready.wait())], return_when=asyncio.FIRST_COMPLETED
    )
    backend = RemoteBackend(server.url)
    try:
        yield backend
    finally:
        await backend.aclose()
        server.stop()
        await running


async def test_publishing_is_idempotent(remote: RemoteBackend) -> None:
    """Law 7: publishing an id again is a duplicate, and publishing it with another payload is a conflict."""
    queue = Queue(remote)
    payload = b'{"n": 1.0,\n "s": "\xc3\xa9"}'
    task = Task(key="k", id="a", payload=payload, headers={"h": "v"}, priority=7, tenant="t")
    statuses = [(await queue.publish_many([task]))[0].status for _ in range(2)]
    assert statuses == [Published.ACCEPTED, Published.DUPLICATE]
    (conflict,) = await queue.publish_many([Task(key="k", id="a", payload=b"2")])
    assert conflict.status is Published.CONFLICT
    assert (await queue.ledger("k")).published == 1


async def test_what_arrives_is_what_was_published(
    remote: RemoteBackend, store: MemoryBackend
) -> None:
    """Every field of a task and the bytes of its payload reach the store."""
    task = Task(
        key="k<1>",
        id="a@b=c+d~e",
        payload=b'{"n": 1.0}',
        headers={"h": "v"},
        priority=7,
        tenant="t",
        ordering_key="o",
        deadline=store.now() + 1000,
        not_before=store.now(),
        max_attempts=3,
    )
    await remote.publisher.publish(task)
    async with store.subscribe(["k<1>"], "c") as subscription:
        (delivery,) = (await subscription.receive(1, 5)).deliveries
    assert delivery.task == task


async def test_the_whole_life_of_a_task_is_visible(
    remote: RemoteBackend, store: MemoryBackend
) -> None:
    """G4: control over HTTP returns and does the same as the control of the store itself."""
    control, letters = remote.control, remote.dead_letters
    tasks = [Task(key="k", id=f"t{n}") for n in range(6)]
    await remote.publisher.publish(*tasks)
    async with store.subscribe(["k"], "worker-1") as subscription:
        held = (await subscription.receive(4, 5)).deliveries
        (worker,) = await control.workers()
        assert (worker.worker_id, worker.in_flight) == ("worker-1", 4)
        await subscription.ack(held[0], results=(b'{"x": 1.50}',))
        await subscription.ack(held[1])
        await subscription.dead_letter(held[2], "why", "because")
        await subscription.dead_letter(held[3], "why", "because")
        assert await control.cancel("k", "t4")
        assert not await control.cancel("k", "t4")
    states = [status and status.state for status in await control.statuses("k", "t0", "t2", "no")]
    assert states == [State.DONE, State.DEAD, None]
    assert await control.results("k", "t1", "t0") == (None, b'{"x": 1.50}')
    assert await control.queues() == ("k",)
    assert await control.stats("k") == await store.control.stats("k")
    assert await letters.list("k") == await store.dead_letters.list("k")
    assert [letter.task.id for letter in await letters.list("k", limit=1, after="t2")] == ["t3"]
    assert await letters.redrive("k", "t2", "unknown") == 1
    assert await letters.discard("k") == 1
    assert await control.purge("k") == 2
    ledger = await control.ledger("k")
    assert ledger == await store.control.ledger("k")
    assert ledger.balanced
    await control.configure("other", QueueSettings(paused=True))
    await remote.publisher.publish(Task(key="other", id="t"))
    with pytest.raises(QueueInUse, match="waiting tasks: 1"):
        await control.delete("other")
    await control.purge("other")
    done = await control.delete("other")
    assert (done.deleted, done.forgotten) == (True, 1)
    assert await control.queues() == ("k",)
    assert await control.maintain() is not None


async def test_pages_join_without_a_gap(remote: RemoteBackend, store: MemoryBackend) -> None:
    """Dead letters and ids beyond the limit of one request are read in several requests."""
    ids = [f"t{n:04}" for n in range(1203)]
    await remote.publisher.publish(*(Task(key="k", id=task_id) for task_id in ids))
    async with store.subscribe(["k"], "c") as subscription:
        for delivery in (await subscription.receive(2000, 5)).deliveries:
            await subscription.dead_letter(delivery, "why")
    assert [letter.task.id for letter in await remote.dead_letters.list("k", limit=2000)] == ids
    assert len(await remote.dead_letters.list("k", limit=1100)) == 1100
    assert all(await remote.control.statuses("k", *ids))
    assert await remote.dead_letters.redrive("k", *ids) == 1203


async def test_settings_are_compared_and_swapped(remote: RemoteBackend) -> None:
    """Writing settings with an outdated version raises `SettingsConflict`."""
    control = remote.control
    assert await control.settings("k") == QueueSettings()
    wanted = QueueSettings(retry=RetryPolicy(base=0.2, cap=1))
    changed = await control.configure("k", wanted)
    assert changed == wanted.model_copy(update={"version": 1})
    assert await control.settings("k") == changed
    with pytest.raises(SettingsConflict):
        await control.configure("k", wanted)


async def test_limits_hold_through_the_server(remote: RemoteBackend, store: MemoryBackend) -> None:
    """B13: settings reach the store unchanged, and a refusal returns its reason, depth and retry time."""
    limit = RateLimit(max_tokens=9, interval=2, interval_unit=IntervalUnit.HOURS)
    wanted = QueueSettings(capacity=1, max_inflight=3, rate_limit=limit, paused=True)
    told = await remote.control.configure("k", wanted)
    assert told == await store.control.settings("k") == wanted.model_copy(update={"version": 1})
    tasks = [Task(key="k", id=task_id) for task_id in "ab"]
    assert await remote.publisher.publish(*tasks) == (
        Confirmation(key="k", task_id="a", status=Published.ACCEPTED, position=0),
        *await store.publisher.publish(tasks[1]),
    )
    with pytest.raises(QueueFull) as full:
        await Queue(remote).publish("k")
    assert (full.value.code, full.value.depth) == (Refusal.QUEUE_FULL, 1)
    assert full.value.retry_after
    await pause_queue(remote.control, "k", intake=True, paused=True)
    with pytest.raises(QueueFull) as paused:
        await Queue(remote).publish("k")
    assert paused.value.code == Refusal.INTAKE_PAUSED
    assert paused.value.retry_after
    with pytest.raises(InvalidInput, match=r"^capacity: got int out of range; allowed: "):
        await remote.control.configure("k", QueueSettings.model_construct(version=2, capacity=0))


async def test_waiting_for_room_in_the_server(
    remote: RemoteBackend, store: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B13: a remote publisher can wait for a queue to accept tasks, like a local one."""
    hints = confirmations.retry_hints
    monkeypatch.setattr(
        "taskqueue_core.queue.retry_hints", lambda told: dict.fromkeys(hints(told), 0)
    )
    await pause_queue(store.control, "k", intake=True, paused=True)
    waiting = asyncio.create_task(Queue(remote).publish("k", wait=20))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await pause_queue(store.control, "k", intake=True, paused=False)
    assert (await waiting).status is Published.ACCEPTED


async def test_a_retry_long_after_the_end_is_a_new_entry(
    remote: RemoteBackend, store: MemoryBackend
) -> None:
    """G2: a retry can be scheduled without a delivery, and its token prevents a second one."""
    task = Task(key="k", id="a")
    at = store.now() + 100
    schedule = remote.publisher.schedule_retry
    statuses = [(await schedule(task, at, error="late", token="x")).status for _ in range(2)]
    assert statuses == [Published.ACCEPTED, Published.DUPLICATE]
    assert (await remote.control.ledger("k")).scheduled == 1


async def test_invalid_input_is_reported_as_by_a_local_backend(remote: RemoteBackend) -> None:
    """Invalid input that the server detects raises the same error as in a local backend, with the field name."""
    with pytest.raises(InvalidInput) as caught:
        await remote.dead_letters.list("k", after="no spaces allowed")
    assert caught.value.field == "after"


async def test_the_servers_clock_is_heard(remote: RemoteBackend, store: MemoryBackend) -> None:
    """The time of the remote backend is the time of the store."""
    assert (await remote.health()).ok
    assert remote.now() == pytest.approx(store.now(), abs=0.1)


async def test_pages_are_put_together(remote: RemoteBackend, store: MemoryBackend) -> None:
    """Fault K6: queues, workers and dead letters are returned completely, although the server sends them in pages."""
    await store.publisher.publish(*(Task(key=f"q{n:04}") for n in range(1000)))
    await store.publisher.publish(*(Task(key=f"r{n:04}") for n in range(500)))
    for n in range(1100):
        store.subscribe(["w"], f"w{n}")
    assert await remote.control.queues() == await store.control.queues()
    assert len(await remote.control.workers()) == 1100
    payload = b'"' + b"x" * 100_000 + b'"'
    await store.publisher.publish(*(Task(key="k", id=f"t{n}", payload=payload) for n in range(120)))
    subscription = store.subscribe(["k"], "buries")
    for delivery in (await subscription.receive(120, 0)).deliveries:
        await subscription.dead_letter(delivery, "no", "timeout")
    assert await remote.dead_letters.list("k", limit=500) == await store.dead_letters.list(
        "k", limit=500
    )


async def test_dead_letters_one_by_one_and_by_what_they_say(
    remote: RemoteBackend, store: MemoryBackend
) -> None:
    """C17: a dead letter can be read by its id, and the server applies filters.

    For a task that is not a dead letter, None is returned.
    """
    await store.publisher.publish(*(Task(key="k", id=f"t{n}") for n in range(30)))
    subscription = store.subscribe(["k"], "w")
    for n, delivery in enumerate((await subscription.receive(30, 0)).deliveries):
        await subscription.dead_letter(delivery, "no", "timeout" if n % 2 else "other")
    (first, *_) = await store.dead_letters.list("k", limit=1)
    assert await remote.dead_letters.get("k", "t0") == first
    assert await remote.dead_letters.get("k", "nobody") is None
    now = remote.now()
    for letters in (remote.dead_letters, store.dead_letters):
        await store.control.queues()
        assert await act_on_all(letters, "discard", "k", now + 9, error="x") == 0
        assert await act_on_all(letters, "redrive", "k", now + 9, error="time", reason="x") == 0
    kept = await act_on_all(remote.dead_letters, "redrive", "k", now + 9, older_than=0.0)
    assert kept == 30
    with pytest.raises(InvalidInput, match="older_than"):
        await act_on_all(remote.dead_letters, "redrive", "k", now, older_than=-1.0)
    with pytest.raises(InvalidInput, match="error"):
        await act_on_all(remote.dead_letters, "redrive", "k", now, error="")


async def test_many_large_results(remote: RemoteBackend, store: MemoryBackend) -> None:
    """Row A5: results that are too large for one response are read in several, and none is left out."""
    ids = [f"t{n}" for n in range(LIMITS.body // LIMITS.result + 6)]
    await store.publisher.publish(*(Task(key="k", id=i) for i in ids))
    async with store.subscribe(["k"], "c") as subscription:
        taken = (await subscription.receive(len(ids), 0)).deliveries
        large = b'"' + b"x" * (LIMITS.result - 2) + b'"'
        await subscription.ack(*taken, results=[large] * len(ids))
    assert set(await remote.control.results("k", *ids)) == {large}


async def test_a_result_needs_one_long_poll(
    remote: RemoteBackend, store: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """U6: through a server, a wait is one request until the task ends; more waits than long polls share their polls."""
    targets: list[str] = []
    fetch = HttpClient.fetch

    async def counted(client: HttpClient, method: str, target: str, **more: Any) -> Any:
        targets.append(target)
        return await fetch(client, method, target, **more)

    monkeypatch.setattr(HttpClient, "fetch", counted)
    declared = Tasks()
    same = declared.task(_same)
    async with declared.connect(Queue(remote)):
        handle = await same.publish(1)
        targets.clear()
        result = asyncio.create_task(handle.result())
        await until(lambda: targets)
        async with working(LocalWorker(declared, backend=store)):
            assert await result == 1
        assert len(targets) == 2
        handles = [await same.publish(number) for number in range(40)]
        targets.clear()
        results = asyncio.create_task(gather(*handles))
        await until(lambda: sum(target.endswith("/statuses") for target in targets) > 2)
        assert sum(not target.endswith("/statuses") for target in targets) == 8
        async with working(LocalWorker(declared, backend=store)):
            assert await results == list(range(40))


async def test_an_unknown_task_is_no_wait(remote: RemoteBackend) -> None:
    """U6: the wait for a task that nobody has published ends at once, through a server too."""
    declared = Tasks()
    same = declared.task(_same)
    async with declared.connect(Queue(remote)):
        with pytest.raises(UnknownTask):
            await same.handle("missing").result()


def _same(value: int) -> int:
    return value


async def test_unique_keys(store: MemoryBackend, remote: RemoteBackend) -> None:
    """U12: through a server, unique keys decide as in the store itself, for one task, a batch and a debounce."""
    queue = Queue(remote)
    first = await queue.publish("k", 1, unique=UniqueKey(key="w", period=60.0))
    kept = await queue.publish("k", 2, unique=UniqueKey(key="w"))
    assert (kept.status, kept.existing_id) == (Published.DUPLICATE, first.task_id)
    with pytest.raises(NotUnique, match=first.task_id) as error:
        await queue.publish("k", 2, unique=UniqueKey(key="w", on_conflict="refuse"))
    assert error.value.existing_id == first.task_id
    replacing = UniqueKey(key="w", on_conflict="replace", period=60.0)
    tasks = [Task.of("k", n, id=f"r{n}", unique=replacing) for n in range(3)]
    for _ in range(2):
        answers = await queue.publish_many(tasks)
        assert [a.status for a in answers] == [Published.REPLACED] * 3
        assert {a.existing_id for a in answers} == {first.task_id}
    assert (await store.control.ledger("k")).published == 1
    later = await queue.publish("k", 3, unique=Unique(), debounce=Debounce(30, max_wait=90))
    (status,) = await store.control.statuses("k", later.task_id)
    assert status is not None
    assert status.due_at is not None
    assert 25 < status.due_at - store.now() <= 30
    async with store.subscribe(["k"], "w") as subscription:
        (delivery,) = (await subscription.receive(9, 1)).deliveries
    assert delivery.task.unique == replacing
    assert (delivery.task.id, delivery.task.value()) == (first.task_id, 2)


async def test_unique_keys_that_the_store_lacks() -> None:
    """U12: a server whose store lacks the capability refuses the task by name; the others of a batch are stored."""

    class Lesser(MemoryBackend):
        capabilities = Capabilities(names=MemoryBackend.capabilities.names - {Capability.UNIQUE})

    async with serving(Lesser()) as backend:
        one, two = await backend.publisher.publish(
            Task(key="k", id="1", unique=UniqueKey(key="w")), Task(key="k", id="2")
        )
        assert one.status is Published.REFUSED
        assert "unique" in (one.reason or "")
        assert two.status is Published.ACCEPTED
