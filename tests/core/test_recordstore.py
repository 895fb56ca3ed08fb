"""The record store, on the smallest store there is: the kit, and what a kit cannot do to a store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

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
    """A backend, and the store below it."""
    store = DictStore(disk or Disk())
    return RecordBackend("dict", store, clock or ManualClock(), durable=True), store


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> int:
    """Bound steps to so few that little data shows it."""
    for module in (transitions, subscription, control):
        monkeypatch.setattr(module, "STEP", 3)
    return 3


@pytest.mark.fast_clock
class TestRecordStore(BackendSuite):
    """G6: whatever keeps the promises of `RecordStore` makes a backend that keeps those of the contract."""

    capabilities = Capabilities(
        names=frozenset({Capability.DEAD_LETTERS, Capability.CONTROL, Capability.FLOW}),
        durable=True,
    )
    max_examples = 25

    async def open_backend(self, clock: ManualClock) -> Backend:
        """Make a backend on an empty dict."""
        self.clock, self.disk = clock, Disk()
        return RecordBackend("dict", DictStore(self.disk), clock, durable=True)

    async def reopen(self, backend: Backend) -> Backend:
        """Make another on the same dict."""
        await backend.aclose()
        return RecordBackend("dict", DictStore(self.disk), self.clock, durable=True)


async def test_recovery() -> None:
    """Laws 2, 3: what a dead process had in flight comes back at the opening, once, as lost; answers stay."""
    disk = Disk()
    first, _ = opened(disk)
    await first.control.configure("k", QueueSettings(max_losses=1))
    await first.publisher.publish(Task(key="k", id="poison"), Task(key="k", id="t"))
    consumer = first.subscribe(["k"], "w")
    (settled,) = (await consumer.receive(1, 0)).deliveries
    assert await consumer.redeliver(settled, lost=True) == (Settled.OK,)
    assert len((await consumer.receive(2, 0)).deliveries) == 2  # and it dies
    for _ in range(2):
        heir, _ = opened(disk)
        stats = await heir.control.stats("k")
        assert (stats.lost, stats.ledger.dead, stats.ledger.waiting) == (3, 1, 1)
        assert stats.ledger.balanced
        answer = await heir.subscribe(["k"], "w").redeliver(settled, lost=True)
        assert answer == (Settled.OK,)
        await heir.aclose()


async def test_recovery_frees_places() -> None:
    """F2, law 5: what a dead process had in flight takes no place after the opening, and its tokens stay spent."""
    disk = Disk()
    first, _ = opened(disk)
    limits = QueueSettings(max_inflight=2, rate_limit=RateLimit(max_tokens=3))
    await first.control.configure("k", limits)
    await first.publisher.publish(*(Task(key="k") for _ in range(5)))
    assert len((await first.subscribe(["k"], "w").receive(9, 0)).deliveries) == 2  # and it dies
    heir, _ = opened(disk)
    consumer = heir.subscribe(["k"], "w")
    received = await consumer.receive(9, 0)
    assert [one.losses for one in received.deliveries] == [1]
    assert (await consumer.receive(9, 0)).due_at is not None


async def test_an_opening_that_fails_is_tried_again() -> None:
    """While the store cannot be opened, or what was in flight not be taken back, every call says so."""
    disk = Disk()
    first, _ = opened(disk)
    await first.publisher.publish(Task(key="k"))
    await first.subscribe(["k"], "w").receive(1, 0)  # and it dies
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
    """Law 1: after a receive that failed at any point the next one finds all that is there, due or waiting."""
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
    """Law 5: the tokens, places and room of a step that was undone are there for the next one."""
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
    """Limits cost those who have none nothing: no bucket is read or written, and a removed one is gone."""
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
    """Law 7: where the end of a publish failed the publisher learns so, and who waits looks whether it was done."""
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
    """Law 2: a close whose step failed has closed nothing, and the next one hands everything back."""
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
    """After ``aclose`` calls say that the store is unavailable, and receives that they are closed."""
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
    """G6: a receive looks only under keys where there may be something."""
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
    """G6: however much has fallen due, a call goes in small steps and lets others have their turn between them."""
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
    """Law 4: what fell due comes before what is published or redriven later, though it takes several steps."""
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
    """C17: who redrives all moves what was dead then, though it dies again meanwhile."""
    backend, _ = opened()
    consumer = backend.subscribe(["k"], "w")
    await backend.publisher.publish(*(Task(key="k") for _ in range(4 * small_steps)))

    async def bury_all() -> None:
        async for delivery in consumer:
            await consumer.dead_letter(delivery, "bad")
            await asyncio.sleep(0)

    burying = asyncio.create_task(bury_all())
    async with asyncio.timeout(30):
        while (await backend.control.ledger("k")).dead < 4 * small_steps:  # noqa: ASYNC110 - as the kit waits
            await asyncio.sleep(0)
    assert await asyncio.wait_for(backend.dead_letters.redrive("k"), 30) == 4 * small_steps
    await backend.aclose()
    await burying


async def test_odd_text() -> None:
    """Errors, reasons, tokens and progress with lone surrogates are kept, as far as an encoding goes."""
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
    """A hand-back does not make the oldest waiting task younger."""
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
