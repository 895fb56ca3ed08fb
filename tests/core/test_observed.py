"""`InstrumentedBackend`: plugins see every state change once, and the backend behaves as without the wrapper."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
import pytest_asyncio

from taskqueue_core.backend import Capabilities, Capability
from taskqueue_core.capabilities import (
    Maintained,
    QueueSettings,
    control_of,
    dead_letters_of,
    handover_of,
    revocation_of,
)
from taskqueue_core.capabilities.require import dead_lettering_of
from taskqueue_core.clock import ManualClock
from taskqueue_core.errors import BackendUnavailable, InvalidInput, LeaseLost
from taskqueue_core.hooks import Hooks, hookimpl
from taskqueue_core.instrumented import InstrumentedBackend
from taskqueue_core.queue import Queue
from taskqueue_core.retry import Bury
from taskqueue_core.tasks import Delivery, Expired, Published, Settled, Task
from taskqueue_memory import MemoryBackend
from tests.core.fakes import ScriptedBackend


class Recorder:
    """A plugin that records the arguments of every hook call."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    @hookimpl
    def published(self, tasks: Any, confirmations: Any) -> None:
        """Record the tasks and the status of each confirmation."""
        self.seen.append(("published", tasks, tuple(c.status for c in confirmations)))

    @hookimpl
    def delivered(self, deliveries: Any, consumer: str) -> None:
        """Record the deliveries and their consumer."""
        self.seen.append(("delivered", deliveries, consumer))

    @hookimpl
    def settled(self, deliveries: Any, verb: str, outcomes: Any) -> None:
        """Record the deliveries, the verb and the outcomes."""
        self.seen.append(("settled", deliveries, verb, outcomes))

    @hookimpl
    def retry_scheduled(
        self, task: Task, at: float, error: str, confirmation: Any, settles: Delivery | None
    ) -> None:
        """Record the retry and the store's answer."""
        self.seen.append(("retry_scheduled", task, at, error, confirmation.status, settles))

    @hookimpl
    def dead_lettered(self, delivery: Any, verdict: Bury) -> None:
        """Record the delivery and the verdict."""
        self.seen.append(("dead_lettered", delivery, verdict))

    @hookimpl
    def expired(self, tasks: Any) -> None:
        """Record the expired tasks."""
        self.seen.append(("expired", tasks))

    @hookimpl
    def maintained(self, done: Maintained | None) -> None:
        """Record the result of a maintenance pass."""
        self.seen.append(("maintained", done))

    def take(self) -> list[tuple[Any, ...]]:
        """Return and clear the recorded calls."""
        seen, self.seen = self.seen, []
        return seen


@pytest.fixture
def recorder() -> Recorder:
    """A plugin that records all hook calls."""
    return Recorder()


@pytest_asyncio.fixture
async def backend(clock: ManualClock, recorder: Recorder) -> AsyncIterator[InstrumentedBackend]:
    """An instrumented memory backend with the recording plugin registered."""
    hooks = Hooks()
    hooks.register(recorder)
    observed = InstrumentedBackend(MemoryBackend(clock=clock), hooks)
    yield observed
    await observed.aclose()


def tasks(*ids: str, **fields: Any) -> tuple[Task, ...]:
    """Return tasks of the queue ``k`` with these ids."""
    return tuple(Task(key="k", id=task_id, **fields) for task_id in ids)


async def test_a_batch_is_seen_once_at_each_step(
    backend: InstrumentedBackend, recorder: Recorder
) -> None:
    """REV-E1: publishing, delivering and acking three tasks are three hook calls, each with all three tasks."""
    three = tasks("a", "b", "c")
    await backend.publisher.publish(*three)
    subscription = backend.subscribe(["k"], "worker-1")
    received = await subscription.receive(3, 0)
    await subscription.ack(*received.deliveries)
    assert recorder.take() == [
        ("published", three, (Published.ACCEPTED,) * 3),
        ("delivered", received.deliveries, "worker-1"),
        ("settled", received.deliveries, "ack", (Settled.OK,) * 3),
    ]


async def test_refused_and_repeated_publishes_are_seen(
    backend: InstrumentedBackend, recorder: Recorder
) -> None:
    """Plugins see the status of each published task, also duplicates and conflicts."""
    await backend.publisher.publish(*tasks("a"))
    await backend.publisher.publish(*tasks("a"), *tasks("a", payload=b"1"))
    assert recorder.take()[1][2] == (Published.DUPLICATE, Published.CONFLICT)


async def test_nothing_delivered_is_nothing_seen(
    backend: InstrumentedBackend, recorder: Recorder
) -> None:
    """A receive that returns no deliveries makes no hook call."""
    assert not (await backend.subscribe(["k"], "w").receive(1, 0)).deliveries
    assert recorder.take() == []


async def test_releases_and_losses_are_distinguished(
    backend: InstrumentedBackend, recorder: Recorder
) -> None:
    """Law 3: a plugin can distinguish a released delivery from a lost one."""
    await backend.publisher.publish(*tasks("a"))
    subscription = backend.subscribe(["k"], "w")
    for lost in (False, True):
        (delivery,) = (await subscription.receive(1, 0)).deliveries
        await subscription.redeliver(delivery, lost=lost)
    assert [call[2] for call in recorder.take() if call[0] == "settled"] == ["redeliver", "lost"]


async def test_lost_too_often_is_seen_as_a_death(
    backend: InstrumentedBackend, recorder: Recorder
) -> None:
    """A loss beyond the limit is reported as lost and as dead-lettered.

    Other losses of the same batch are only reported as lost.
    """
    await control_of(backend).configure("k", QueueSettings(max_losses=0))
    await backend.publisher.publish(*tasks("a"), Task(key="other", id="b"))
    subscription = backend.subscribe(["k", "other"], "w")
    received = await subscription.receive(2, 0)
    recorder.take()
    assert await subscription.redeliver(*received.deliveries, lost=True) == (
        Settled.DEAD,
        Settled.OK,
    )
    assert recorder.take() == [
        ("settled", received.deliveries, "lost", (Settled.DEAD, Settled.OK)),
        ("dead_lettered", received.deliveries[0], Bury("max_losses_exceeded", None)),
    ]


async def test_a_retry_is_seen(backend: InstrumentedBackend, recorder: Recorder) -> None:
    """REV-E1: the hook for a retry gets its time, its error and the store's answer.

    If the retry settles a delivery, the hook gets that too.
    """
    (task,) = tasks("a")
    await backend.publisher.publish(task)
    subscription = backend.subscribe(["k"], "w")
    (delivery,) = (await subscription.receive(1, 0)).deliveries
    assert delivery.waiting_since is not None
    assert delivery.waiting_since <= delivery.delivered_at
    recorder.take()
    at = backend.now() + 5
    for _ in range(2):
        await backend.publisher.schedule_retry(task, at, error="boom", settles=delivery)
    await backend.publisher.schedule_retry(task, at, token="again")
    assert recorder.take() == [
        ("retry_scheduled", task, at, "boom", Published.ACCEPTED, delivery),
        ("retry_scheduled", task, at, "boom", Published.DUPLICATE, delivery),
        ("retry_scheduled", task, at, None, Published.ACCEPTED, None),
    ]


async def test_a_dead_letter_is_seen(backend: InstrumentedBackend, recorder: Recorder) -> None:
    """The hook for a dead letter gets the delivery with the reason and the error."""
    await backend.publisher.publish(*tasks("a"))
    subscription = backend.subscribe(["k"], "w")
    (delivery,) = (await subscription.receive(1, 0)).deliveries
    recorder.take()
    await dead_lettering_of(backend, subscription).dead_letter(delivery, "bad", "details")
    assert recorder.take() == [("dead_lettered", delivery, Bury("bad", "details"))]


@pytest.mark.parametrize("found_by", ["receive", "maintain"])
async def test_expiry_is_seen_once(
    found_by: str, backend: InstrumentedBackend, recorder: Recorder, clock: ManualClock
) -> None:
    """Law 8: an expired task is reported exactly once, whether a receive or a maintenance pass finds it."""
    await backend.publisher.publish(*tasks("a", deadline=clock.now() + 1))
    recorder.take()
    await clock.advance(1)
    subscription = backend.subscribe(["k"], "w")
    if found_by == "receive":
        await subscription.receive(1, 0)
    await control_of(backend).maintain()
    await subscription.receive(1, 0)
    seen = [call for call in recorder.take() if call[0] != "maintained"]
    assert seen == [("expired", (Expired("k", "a", 1),))]


async def test_a_stale_settlement_is_seen(backend: InstrumentedBackend, recorder: Recorder) -> None:
    """Law 2: a settlement with a stale receipt is reported as ``LEASE_LOST``, although the call raises."""
    await backend.publisher.publish(*tasks("a"))
    subscription = backend.subscribe(["k"], "w")
    (delivery,) = (await subscription.receive(1, 0)).deliveries
    await subscription.redeliver(delivery)
    recorder.take()
    for verb in ("ack", "lost"):
        late = subscription.ack if verb == "ack" else partial(subscription.redeliver, lost=True)
        with pytest.raises(LeaseLost):
            await late(delivery)
        assert recorder.take() == [("settled", (delivery,), verb, (Settled.LEASE_LOST,))]


async def test_iterating_is_observed_too(backend: InstrumentedBackend, recorder: Recorder) -> None:
    """Deliveries received by iterating over a subscription are reported too, and closing it ends the iteration."""
    await backend.publisher.publish(*tasks("a", "b"))
    seen = []
    async with backend.subscribe(["k"], "w") as subscription:
        async for delivery in subscription:
            seen.append(delivery.task.id)
            await subscription.ack(delivery)
            if len(seen) == 2:
                await subscription.close()
    assert seen == ["a", "b"]
    assert [call[0] for call in recorder.take()].count("delivered") == 2


async def test_capabilities_pass_through(backend: InstrumentedBackend) -> None:
    """G6: every capability of the backend is available through the wrapper."""
    assert backend.capabilities == Capabilities(names=frozenset(Capability))
    await backend.publisher.publish(*tasks("a"))
    first, second = backend.subscribe(["k"], "w"), backend.subscribe(["k"], "w")
    (delivery,) = (await first.receive(1, 0)).deliveries
    assert await handover_of(backend, second).adopt(delivery.receipt) == (delivery,)
    assert await control_of(backend).cancel("k", "a")
    assert await revocation_of(backend, second).revoked() == (delivery.receipt,)
    assert await dead_letters_of(backend).list("k") == ()
    assert (await control_of(backend).ledger("k")).cancelled == 1


async def test_what_the_backend_lacks_the_wrapper_lacks() -> None:
    """The wrapper adds no capability to a backend without any, and missing attributes stay missing."""
    bare = InstrumentedBackend(ScriptedBackend(), Hooks())
    assert bare.capabilities.names == frozenset()
    assert not hasattr(bare, "dead_letters")
    assert not hasattr(bare.subscribe(["k"], "w"), "adopt")
    await bare.aclose()
    inner: Any = bare.inner
    assert inner.closed == 1


async def test_an_ordering_key_needs_an_order() -> None:
    """R8: a backend that does not support order gets no task with an ordering key: the whole batch is refused.

    Retries are still passed on.
    """
    task = Task(key="k", id="b", ordering_key="entity")
    unordered, ordered = ScriptedBackend(), ScriptedBackend()
    ordered.capabilities = Capabilities(names=frozenset({Capability.ORDERING_KEYS}))
    for backend in (Queue(unordered), Queue(InstrumentedBackend(unordered, Hooks()))):
        with pytest.raises(InvalidInput) as caught:
            await backend.publish_many([*tasks("a"), task])
        assert caught.value.field == "ordering_key"
        assert "entity" not in str(caught.value)
    with pytest.raises(InvalidInput, match=r"^ordering_key: "):
        await InstrumentedBackend(unordered, Hooks()).publisher.publish(*tasks("a"), task)
    assert unordered.calls == []
    await InstrumentedBackend(unordered, Hooks()).publisher.schedule_retry(task, 5)
    assert len(unordered.calls) == 1
    await InstrumentedBackend(ordered, Hooks()).publisher.publish(task)
    await Queue(ordered).publish("k", id="c", ordering_key="entity")
    assert ordered.calls == [("publish", "b"), ("publish", "c")]


async def test_passes_of_maintenance(
    backend: InstrumentedBackend, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every maintenance pass is reported; one that fails is reported as None, and its error is raised to the caller."""
    control = control_of(backend)
    done = await control.maintain()

    async def fail() -> Maintained:
        raise BackendUnavailable("away")

    monkeypatch.setattr(control_of(backend.inner), "maintain", fail)
    with pytest.raises(BackendUnavailable):
        await control.maintain()
    assert [call for call in recorder.take() if call[0] == "maintained"] == [
        ("maintained", done),
        ("maintained", None),
    ]
