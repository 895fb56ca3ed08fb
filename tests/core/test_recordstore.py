"""`RecordBackend` on the smallest possible store: the conformance kit, and failures that the kit cannot cause."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import pytest

from taskqueue_conformance import BackendSuite
from taskqueue_core.backend import Backend, Capabilities, Capability
from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.clock import ManualClock
from taskqueue_core.errors import BackendUnavailable, PublishUnconfirmed, SubscriptionClosed
from taskqueue_core.rate_limit import RateLimit
from taskqueue_core.recordstore import RecordBackend, control, subscription, transitions
from taskqueue_core.tasks import Settled, State, Task
from tests.core.dict_store import DictStore, Disk


def opened(
    disk: Disk | None = None, clock: ManualClock | None = None
) -> tuple[RecordBackend, DictStore]:
    """Return a backend on this disk, or on an empty one, and the store below it."""
    store = DictStore(disk or Disk())
    return RecordBackend("dict", store, clock or ManualClock(), durable=True), store


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> int:
    """Limit each step to three records, so that a test needs only a few records to see several steps."""
    for module in (transitions, subscription, control):
        monkeypatch.setattr(module, "STEP", 3)
    return 3


@pytest.mark.fast_clock
class TestRecordStore(BackendSuite):
    """G6: a `RecordBackend` on any store that implements `RecordStore` passes the conformance kit."""

    capabilities = Capabilities(
        names=frozenset(
            {
                Capability.DEAD_LETTERS,
                Capability.CONTROL,
                Capability.FLOW,
                Capability.UNIQUE,
                Capability.AUDIT,
                Capability.SCHEDULES,
                Capability.AFTER,
                Capability.LISTING,
                Capability.STREAMS,
            }
        ),
        durable=True,
    )
    max_examples = int(os.environ.get("TASKQUEUE_KIT_EXAMPLES", "25"))
    test_tasks_of_other_keys_cost_nothing = None  # type: ignore[assignment] # this store scans all rows

    async def open_backend(self, clock: ManualClock) -> Backend:
        """Return a backend on an empty disk."""
        self.clock, self.disk = clock, Disk()
        self.store = DictStore(self.disk)
        return RecordBackend("dict", self.store, clock, durable=True)

    async def reopen(self, backend: Backend) -> Backend:
        """Close the backend and return another one on the same disk."""
        await backend.aclose()
        return RecordBackend("dict", DictStore(self.disk), self.clock, durable=True)

    async def stored(self, backend: Backend) -> int:  # noqa: ARG002 - each test has one disk
        """Count what the disk has."""
        return sum(len(kind) for kind in vars(self.disk).values())

    @contextmanager
    def unanswered(self, backend: Backend) -> Iterator[None]:  # noqa: ARG002 - each test has one store
        """Let each commit take effect and then fail."""
        self.store.failing.add("answer")
        try:
            yield
        finally:
            self.store.failing.clear()


async def test_recovery() -> None:
    """Laws 2, 3: opening a store releases the deliveries of a dead process once, as lost.

    Settlements that were answered before are answered the same way again.
    """
    disk = Disk()
    first, _ = opened(disk)
    await first.control.configure("k", QueueSettings(max_losses=1))
    await first.publisher.publish(Task(key="k", id="poison"), Task(key="k", id="t"))
    consumer = first.subscribe(["k"], "w")
    (settled,) = (await consumer.receive(1, 0)).deliveries
    assert await consumer.redeliver(settled, lost=True) == (Settled.OK,)
    # After this receive, the first process dies without closing its backend.
    assert len((await consumer.receive(2, 0)).deliveries) == 2
    for _ in range(2):
        heir, _ = opened(disk)
        stats = await heir.control.stats("k")
        assert (stats.lost, stats.ledger.dead, stats.ledger.waiting) == (3, 1, 1)
        assert stats.ledger.balanced
        answer = await heir.subscribe(["k"], "w").redeliver(settled, lost=True)
        assert answer == (Settled.OK,)
        await heir.aclose()


async def test_recovery_frees_places() -> None:
    """F2, law 5: after a restart, deliveries of the dead process use no concurrency, but their tokens stay spent."""
    disk = Disk()
    first, _ = opened(disk)
    limits = QueueSettings(max_inflight=2, rate_limit=RateLimit(max_tokens=3))
    await first.control.configure("k", limits)
    await first.publisher.publish(*(Task(key="k") for _ in range(5)))
    # After this receive, the first process dies without closing its backend.
    assert len((await first.subscribe(["k"], "w").receive(9, 0)).deliveries) == 2
    heir, _ = opened(disk)
    consumer = heir.subscribe(["k"], "w")
    received = await consumer.receive(9, 0)
    assert [one.losses for one in received.deliveries] == [1]
    assert (await consumer.receive(9, 0)).due_at is not None


async def test_an_opening_that_fails_is_tried_again() -> None:
    """While opening the store or releasing old deliveries fails, every call fails and the store is closed again."""
    disk = Disk()
    first, _ = opened(disk)
    await first.publisher.publish(Task(key="k"))
    await first.subscribe(["k"], "w").receive(1, 0)  # the first process dies here without closing
    heir, store = opened(disk)
    for what in ("open", "save", "commit"):
        store.failing = {what}
        assert not (await heir.health()).ok
        with pytest.raises(BackendUnavailable):
            await heir.publisher.publish(Task(key="k"))
        assert not store.opened, "half opened, and left so"
    store.failing = set()
    assert (await heir.health()).ok
    assert (await heir.control.ledger("k")).waiting == 1


@pytest.mark.parametrize("what", ["save", "commit", "answer"])
async def test_a_step_that_fails_loses_nothing(what: str, clock: ManualClock) -> None:
    """Law 1: a receive that fails at any point loses no task: a later receive delivers all waiting and due tasks."""
    backend, store = opened(clock=clock)
    consumer = backend.subscribe(["k"], "w")
    await backend.publisher.publish(Task(key="k"))
    await backend.publisher.publish(Task(key="k", not_before=clock.now() + 1))
    await clock.advance(1)
    for _ in range(2):
        store.failing = {what}
        with pytest.raises(BackendUnavailable):
            await consumer.receive(9, 0)
    store.failing = set()
    found = (await consumer.receive(9, 0)).deliveries
    assert [(one.attempt, one.losses) for one in found] == [(1, 0)] * 2
    assert (await backend.control.ledger("k")).in_flight == 2
    assert not (await consumer.receive(9, 0)).deliveries


async def test_a_step_that_fails_spends_nothing() -> None:
    """Law 5: a transaction that is rolled back uses no tokens, no concurrency and no capacity."""
    backend, store = opened()
    limits = QueueSettings(rate_limit=RateLimit(max_tokens=2), max_inflight=2, capacity=2)
    await backend.control.configure("k", limits)
    tasks = [Task(key="k", id=f"t{n}") for n in range(3)]
    consumer = backend.subscribe(["k"], "w")
    store.failing = {"commit"}
    with pytest.raises(PublishUnconfirmed):
        await backend.publisher.publish(*tasks[:2])
    store.failing = set()
    answers = await backend.publisher.publish(*tasks)
    assert [answer.stored for answer in answers] == [True, True, False]
    for _ in range(3):
        store.failing = {"commit"}
        with pytest.raises(BackendUnavailable):
            await consumer.receive(9, 0)
    store.failing = set()
    assert len((await consumer.receive(9, 0)).deliveries) == 2


async def test_an_unlimited_queue_keeps_no_bucket() -> None:
    """For a queue without a rate limit no token bucket is read or written. Removing the limit deletes the bucket."""
    backend, store = opened()
    await backend.control.configure("k", QueueSettings(rate_limit=RateLimit(max_tokens=2)))
    assert list(store.disk.buckets) == ["k"]
    settings = await backend.control.configure("k", QueueSettings(version=1))
    assert not store.disk.buckets
    store.failing = {"bucket"}
    await backend.control.configure("k", settings)
    await backend.publisher.publish(Task(key="k"))
    assert len((await backend.subscribe(["k"], "w").receive(9, 0)).deliveries) == 1


async def test_an_unsure_publish_wakes() -> None:
    """Law 7: if the commit of a publish fails, the publish is unconfirmed and a waiting receive looks for the task."""
    backend, store = opened()
    waiting = asyncio.create_task(backend.subscribe(["k"], "w").receive(1, None))
    await asyncio.sleep(0)
    before = store.transactions
    store.failing = {"commit"}
    with pytest.raises(PublishUnconfirmed):
        await backend.publisher.publish(Task(key="k", id="t"))
    store.failing = set()
    for _ in range(3):
        await asyncio.sleep(0)
    assert store.transactions == before + 2
    await backend.publisher.publish(Task(key="k", id="t"))
    assert [one.task.id for one in (await waiting).deliveries] == ["t"]


async def test_closing_again() -> None:
    """Law 2: if closing the backend fails, no delivery is released; closing again releases all of them."""
    backend, store = opened()
    await backend.publisher.publish(Task(key="k"))
    consumer = backend.subscribe(["k"], "w")
    await consumer.receive(1, 0)
    for what in ("save", "commit", "close"):
        store.failing = {what}
        with pytest.raises(BackendUnavailable):
            await backend.aclose()
        assert consumer.closed is (what == "close")
    store.failing = set()
    await backend.aclose()
    await backend.aclose()
    assert not store.opened
    assert [row.state for row in store.disk.rows.values()] == [State.WAITING]


async def test_after_the_end() -> None:
    """After ``aclose`` every call raises `BackendUnavailable`, and a receive raises `SubscriptionClosed`."""
    backend, store = opened()
    consumer = backend.subscribe(["k"], "w")
    await backend.aclose()
    assert store.transactions == 0
    assert not (await backend.health()).ok
    assert backend.now() > 0
    with pytest.raises(SubscriptionClosed):
        await consumer.receive(1, 0)
    for call in (backend.publisher.publish(Task(key="k")), backend.control.queues()):
        with pytest.raises(BackendUnavailable):
            await call
    with pytest.raises(BackendUnavailable):
        backend.subscribe(["k"], "w")


async def test_idle_keys_are_not_asked_for() -> None:
    """G6: a receive queries the store only for queues that may have a task available."""
    backend, store = opened()
    consumer = backend.subscribe([f"k{n}" for n in range(100)], "w")
    await backend.publisher.publish(Task(key="k7"), Task(key="k8", not_before=backend.now() + 9))
    await consumer.receive(5, 0)
    store.asked.clear()
    await consumer.receive(5, 0)
    assert store.asked == []


async def _purged(backend: RecordBackend) -> int:
    return await backend.control.purge("k")


async def _received(backend: RecordBackend) -> int:
    return len((await backend.subscribe(["k"], "w").receive(50, None)).deliveries)


async def _kept_house(backend: RecordBackend) -> int:
    return (await backend.control.maintain()).promoted


async def _published(backend: RecordBackend) -> int:
    return len(await backend.publisher.publish(Task(key="k")))


@pytest.mark.parametrize(
    ("call", "found"),
    [(_purged, 20), (_received, 3), (_kept_house, 20), (_published, 1)],
)
async def test_steps_are_bounded(
    call: Callable[[RecordBackend], Awaitable[int]],
    found: int,
    small_steps: int,
    clock: ManualClock,
) -> None:
    """G6: a call that finds many due tasks handles them in small transactions, between which other tasks can run."""
    backend, store = opened(clock=clock)
    at = clock.now() + 1
    await backend.publisher.publish(
        *(Task(key="k", id=f"t{n}", not_before=at + n / 100) for n in range(20))
    )
    await clock.advance(2)
    before, turns = store.transactions, 0
    called = asyncio.ensure_future(call(backend))
    while not called.done():
        at_once = store.transactions
        await asyncio.sleep(0)
        turns += 1
        assert store.transactions - at_once <= 2
    assert called.result() == found
    assert store.transactions - before >= 20 // small_steps
    assert turns >= 20 // small_steps
    assert (await backend.control.ledger("k")).balanced


async def test_due_before_published(small_steps: int, clock: ManualClock) -> None:
    """Law 4: due tasks are delivered before tasks published or redriven later, even if that takes several steps."""
    backend, _ = opened(clock=clock)
    consumer = backend.subscribe(["k"], "w")
    await backend.publisher.publish(Task(key="k", id="dead"))
    (dead,) = (await consumer.receive(1, 0)).deliveries
    await consumer.dead_letter(dead, "bad")
    at, many = clock.now() + 1, 3 * small_steps + 1
    await backend.publisher.publish(
        *(Task(key="k", id=f"t{n:02}", not_before=at + n / 100) for n in range(many))
    )
    await clock.advance(2)
    await backend.dead_letters.redrive("k", "dead")
    await backend.publisher.publish(Task(key="k", id="late"))
    taken: list[str] = []
    while page := (await consumer.receive(99, 0)).deliveries:
        taken += [one.task.id for one in page]
    assert taken == [*(f"t{n:02}" for n in range(many)), "dead", "late"]


async def test_redriving_all_ends(small_steps: int) -> None:
    """C17: redriving a queue moves only the tasks that are dead at the start, even if they die again meanwhile."""
    backend, _ = opened()
    consumer = backend.subscribe(["k"], "w")
    await backend.publisher.publish(*(Task(key="k") for _ in range(4 * small_steps)))

    async def bury_all() -> None:
        async for delivery in consumer:
            await consumer.dead_letter(delivery, "bad")
            await asyncio.sleep(0)

    burying = asyncio.create_task(bury_all())
    async with asyncio.timeout(30):
        while (await backend.control.ledger("k")).dead < 4 * small_steps:  # noqa: ASYNC110 - polls like the kit
            await asyncio.sleep(0)
    assert await asyncio.wait_for(backend.dead_letters.redrive("k"), 30) == 4 * small_steps
    await backend.aclose()
    await burying


async def test_odd_text() -> None:
    """Lone surrogates in errors, reasons, tokens and progress are stored as question marks."""
    backend, _ = opened()
    consumer = backend.subscribe(["k"], "w")
    await backend.publisher.publish(Task(key="k", id="t"))
    (delivery,) = (await consumer.receive(1, 0)).deliveries
    assert await backend.control.progress(delivery, "half \ud800")
    await backend.publisher.schedule_retry(
        delivery.task, backend.now(), error="\ud800", token="\udfff", settles=delivery
    )
    (delivery,) = (await consumer.receive(1, 0)).deliveries
    await consumer.dead_letter(delivery, "why \ud800", "\ud800")
    (letter,) = await backend.dead_letters.list("k")
    assert (letter.reason, [one.error for one in letter.history]) == ("why ?", ["?", "?"])


async def test_waiting_since_it_became_available(clock: ManualClock) -> None:
    """A release does not change the time since which the oldest task has been waiting."""
    backend, _ = opened(clock=clock)
    published = clock.now()
    await backend.publisher.publish(Task(key="k", id="t"))
    await clock.advance(5)
    async with backend.subscribe(["k"], "w") as consumer:
        await consumer.receive(1, 0)
        await clock.advance(5)
    assert (await backend.control.stats("k")).oldest_waiting == published
    (status,) = await backend.control.statuses("k", "t")
    assert status is not None
    assert (status.state, status.updated_at) == (State.WAITING, published + 10)
