"""Edge cases of tenants: at their limits, at several limits at once, and about to be forgotten."""

from __future__ import annotations

from typing import Any

import pytest

from taskqueue_core.clock import ManualClock
from taskqueue_core.rate_limit import RateLimit
from taskqueue_core.tasks import Task
from taskqueue_memory import MemoryBackend
from tests.memory.histories import FAIR
from tests.memory.test_edges import one
from tests.memory.test_order import configure
from tests.memory.test_wakeups import counted_looks, hop, ids, stop, waiting


async def test_tenants_at_rest_are_not_asked_again(
    backend: MemoryBackend, clock: ManualClock
) -> None:
    """OPEN-F1: if all tenants of a queue are at their limit, a receive reports no more work.

    It still takes tasks from its other queues (fault M5).
    """
    await configure(backend, **FAIR, tenant_rate_limit=RateLimit(max_tokens=1, interval=4))
    await backend.publisher.publish(*(Task(key="k", id=f"t{n}", tenant="a") for n in range(2)))
    subscription = backend.subscribe(["k", "other"], "w")
    (first,) = (await subscription.receive(9, 0)).deliveries
    nothing = await subscription.receive(9, 0)
    assert (nothing.deliveries, nothing.again, nothing.due_at) == ((), False, clock.now() + 4)
    await backend.publisher.publish(Task(key="other", id="o1"), Task(key="other", id="o2"))
    received = await subscription.receive(9, 0)
    assert [delivery.task.id for delivery in received.deliveries] == ["o1", "o2"]
    assert not received.again
    await backend.control.cancel("k", "t1")
    await subscription.ack(first)
    assert (await subscription.receive(9, 0)).due_at is None
    await backend.publisher.publish(Task(key="k", id="later", tenant="a"))
    (receive,) = await waiting(subscription)
    await clock.advance(4)
    assert ids([receive]) == [["later"]]


async def test_tenants_at_rest_and_a_full_queue(backend: MemoryBackend, clock: ManualClock) -> None:
    """A task is delivered only if both its tenant and its queue are below their limits (fault M5)."""
    limit = RateLimit(max_tokens=1, interval=4)
    await configure(backend, **FAIR, tenant_max_inflight=1, rate_limit=limit)
    await backend.publisher.publish(*(Task(key="k", tenant="a") for _ in range(2)))
    subscription = backend.subscribe(["k"], "w")
    (first,) = (await subscription.receive(9, 0)).deliveries
    for seconds in (0, 4):
        await clock.advance(seconds)
        nothing = await subscription.receive(9, 0)
        assert (nothing.deliveries, nothing.again, nothing.due_at) == ((), False, None)
    await subscription.ack(first)
    assert len((await subscription.receive(9, 0)).deliveries) == 1


@pytest.mark.parametrize(
    ("limits", "opens"),
    [({"max_inflight": 1}, None), ({"rate_limit": RateLimit(max_tokens=1, interval=9)}, 9)],
    ids=["places", "tokens"],
)
async def test_neither_the_queue_nor_its_tenant(
    limits: dict[str, Any],
    opens: int | None,
    backend: MemoryBackend,
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """OPEN-F1: if both queue and tenant are at a limit, the later one sets the time of the next look (fault M5)."""
    tokens = RateLimit(max_tokens=1, interval=4)
    await configure(backend, **FAIR, **limits, tenant_rate_limit=tokens)
    await backend.publisher.publish(*(Task(key="k", tenant="a") for _ in range(2)))
    subscription = backend.subscribe(["k"], "w")
    await one(subscription)
    nothing = await subscription.receive(9, 0)
    assert (nothing.deliveries, nothing.again) == ((), False)
    assert nothing.due_at == (None if opens is None else clock.now() + opens)
    (receive,) = await waiting(subscription)
    looks = counted_looks(monkeypatch)
    await backend.publisher.publish(Task(key="k", tenant="a"))
    await hop()
    assert len(looks) == (0 if opens is None else 1)  # one receive looks, to set its timer
    await stop(receive)


async def test_a_tenant_is_forgotten_when_its_tokens_are_back(
    backend: MemoryBackend, clock: ManualClock
) -> None:
    """OPEN-B2: an idle tenant is forgotten when its rate limit has refilled, also if settings changed (fault M5)."""
    limits: dict[str, Any] = {**FAIR, "tenant_rate_limit": RateLimit(max_tokens=2, interval=8)}
    queue = await configure(backend, **limits)
    subscription = backend.subscribe(["k"], "w")
    await backend.publisher.publish(*(Task(key="k", tenant="a") for _ in range(2)))
    await subscription.ack(*(await subscription.receive(9, 0)).deliveries)
    assert queue.fair is not None
    assert queue.fair._fillings.next_at() == clock.now() + 8
    await clock.advance(1)
    await configure(backend, **limits, max_inflight=9)
    assert queue.fair._fillings.next_at() == clock.now() + 7
    for seconds, known in ((6.9, 1), (0.1, 0)):
        await clock.advance(seconds)
        await backend.control.maintain()
        assert len(queue.fair._accounts) == known


async def test_a_tenant_that_came_back_is_forgotten_later(
    backend: MemoryBackend, clock: ManualClock
) -> None:
    """OPEN-B2: a tenant with a delivery in flight is forgotten only after that delivery has ended (fault M5)."""
    limit = RateLimit(max_tokens=2, interval=8)
    queue = await configure(backend, **FAIR, tenant_rate_limit=limit)
    subscription = backend.subscribe(["k"], "w")
    await backend.publisher.publish(Task(key="k", tenant="a"))
    await subscription.ack(await one(subscription))
    await clock.advance(1)
    await backend.publisher.publish(Task(key="k", tenant="a"))
    delivery = await one(subscription)
    await clock.advance(3)
    await backend.control.maintain()
    await subscription.ack(delivery)
    assert queue.fair is not None
    assert len(queue.fair._accounts) == 1
    await clock.advance(4)
    await backend.control.maintain()
    assert len(queue.fair._accounts) == 0


async def test_who_has_no_tenant_weighs_one(backend: MemoryBackend) -> None:
    """B12: a tenant without a configured weight, and tasks without a tenant, have weight 1 (fault M5)."""
    await configure(backend, **FAIR, weights={"heavy": 2})
    for tenant in ("heavy", "light", None):
        await backend.publisher.publish(*(Task(key="k", tenant=tenant) for _ in range(20)))
    received = await backend.subscribe(["k"], "w").receive(20, 0)
    shares = [d.task.tenant for d in received.deliveries]
    assert [shares.count(tenant) for tenant in ("heavy", "light", None)] == [10, 5, 5]
