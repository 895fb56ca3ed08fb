"""Tests that the settings of queues follow the model registry, also with concurrent changes."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, cast

import pytest

from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import (
    Endpoint,
    Order,
    QueueSettings,
    control_of,
    slots_of,
)
from taskqueue_core.errors import InvalidInput, SettingsConflict
from taskqueue_core.retry import RetryPolicy
from taskqueue_dispatch.models import ModelConfig
from taskqueue_dispatch.names import queue_of
from taskqueue_dispatch.registry import ModelRegistry
from taskqueue_memory import MemoryBackend
from tests.dispatch.desk import URL, Failing, registry_of, settings
from tests.dispatch.patience import until


async def test_capacity_follows_slots(backend: Backend) -> None:
    """After each change, a queue's capacity is the configured number per slot times the number of slots (B4, C12)."""
    registry, control = await registry_of(backend), control_of(backend)

    async def capacity() -> int | None:
        return (await control.settings(queue_of("flux"))).capacity

    await registry.register("flux", "a", URL, 2)
    assert await capacity() == 200
    await registry.register("flux", "b", URL, 3)
    assert await capacity() == 500
    await registry.register("flux", "c", URL, 10)
    assert await capacity() == 1000
    await registry.drain("flux", "c")
    assert await capacity() == 500
    await registry.configure("flux", ModelConfig(queue_per_slot=7))
    assert await capacity() == 35
    await registry.remove("flux", "a")
    assert await capacity() == 21
    await registry.register("flux", "b", URL, 1)
    assert await capacity() == 7
    await registry.configure("flux", None)
    assert await capacity() == 100


@pytest.mark.parametrize(
    ("slots", "per_slot", "limit", "room"),
    [(0, 100, 1000, 0), (1, 100, 1000, 100), (11, 100, 1000, 1000), (4, 0, 1000, 0), (4, 9, 0, 0)],
)
def test_capacity_is_clamped(slots: int, per_slot: int, limit: int, room: int) -> None:
    """The capacity is at least 0 and at most the limit (B4)."""
    assert ModelConfig(queue_per_slot=per_slot, queue_limit=limit).capacity(slots) == room


async def test_capacity_is_of_a_tenant_in_fair_order(backend: Backend) -> None:
    """With fair order each tenant has the capacity, with first in first out all tenants share it (B2, B5, OPEN-B4)."""
    registry, control = await registry_of(backend), control_of(backend)
    await registry.register("flux", "a", URL, 2)
    await registry.configure("flux", ModelConfig(order=Order.FAIR, weights={"gold": 3}))
    found = await control.settings(queue_of("flux"))
    assert (found.order, found.capacity, found.tenant_capacity) == (Order.FAIR, 10_000, 200)
    assert found.weights == {"gold": 3}
    await registry.configure("flux", ModelConfig())
    found = await control.settings(queue_of("flux"))
    assert (found.order, found.capacity, found.tenant_capacity) == (Order.FIFO, 200, None)
    assert found.weights == {}


async def test_settings_that_stay_are_not_written(backend: Backend) -> None:
    """Unchanged settings are not written again by any process, and an operator's settings are kept (C12, law 9)."""
    first, second = await registry_of(backend), await registry_of(backend)
    control, key = control_of(backend), queue_of("flux")
    await first.register("flux", "a", URL, 2)
    before = await control.settings(key)
    changed = before.model_copy(update={"max_inflight": 3, "max_losses": 9})
    version = (await control.configure(key, changed)).version
    for registry in (first, second, first):
        await registry.refresh()
        await registry.register("flux", "a", URL, 2)
    found = await control.settings(key)
    assert (found.version, found.max_inflight, found.max_losses) == (version, 3, 9)


async def test_replicas_that_register_at_once(backend: Backend) -> None:
    """After concurrent changes by several processes, the capacity matches all of them.

    Each process sees the result (B4, C12, law 10).
    """
    registries = [await registry_of(backend) for _ in range(4)]
    await asyncio.gather(
        *(
            registry.register("flux", f"server-{place}-{number}", URL, number + 1)
            for number in range(3)
            for place, registry in enumerate(registries)
        ),
        *(
            registry.configure("flux", ModelConfig(queue_per_slot=10, poll_interval=3))
            for registry in registries
        ),
    )
    found = await control_of(backend).settings(queue_of("flux"))
    assert found.capacity == 10 * 4 * (1 + 2 + 3)
    for registry in registries:
        await registry.refresh()
        view = registry.view("flux")
        assert view is not None
        assert (view.slots, view.config.poll_interval) == (24, 3)


async def test_another_change_in_between() -> None:
    """If another process changes the settings before the write, settings and slots are read again (B4, law 9)."""
    backend = MemoryBackend()
    control = Failing(backend.control)
    registry = ModelRegistry(backend, settings())
    registry._control = cast("Any", control)
    configure = backend.control.configure
    rivals = 0

    async def with_a_rival(key: str, wanted: QueueSettings) -> QueueSettings:
        nonlocal rivals
        if rivals < 3:
            rivals += 1
            found = await backend.control.settings(key)
            changed = found.model_copy(update={"max_losses": rivals})
            await backend.slots.register(
                Endpoint(model="flux", server=f"rival-{rivals}", url=URL, slots=1)
            )
            await configure(key, changed)
        return await configure(key, wanted)

    control.put("configure", with_a_rival)
    await registry.register("flux", "mine", URL, 1)
    assert rivals == 3
    assert (await backend.control.settings(queue_of("flux"))).capacity == 400


async def test_a_look_that_is_old_by_the_time_of_the_write() -> None:
    """A change that another process makes between the read and the write is not overwritten (B4, law 10)."""
    backend = MemoryBackend()
    registry, other = ModelRegistry(backend, settings()), await registry_of(backend)
    pool = Failing(backend.slots)
    registry._pool = cast("Any", pool)
    pool.held = {"documents"}
    mine = asyncio.create_task(registry.register("flux", "mine", URL, 1))
    await until(lambda: pool.calls["documents"] == 1)
    await other.register("flux", "theirs", URL, 2)
    pool.held.clear()
    await mine
    assert (await backend.control.settings(queue_of("flux"))).capacity == 300


async def test_changes_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """If each write conflicts with another change, the registration gives up and raises `SettingsConflict` (law 9)."""
    monkeypatch.setattr("taskqueue_dispatch.registry._BACKOFF", RetryPolicy(base=0))
    backend = MemoryBackend()
    control = Failing(backend.control)
    registry = ModelRegistry(backend, settings())
    registry._control = cast("Any", control)

    async def never(key: str, wanted: QueueSettings) -> QueueSettings:
        raise SettingsConflict(f"{key} {wanted.version}")

    control.put("configure", never)
    with pytest.raises(SettingsConflict):
        await registry.register("flux", "mine", URL, 1)
    await registry.refresh()  # refreshing continues in spite of the conflict
    assert registry.view("flux") is not None


async def test_what_another_replica_began(backend: Backend) -> None:
    """If a process dies before updating the queue's settings, another one's refresh does it (C12, law 10)."""
    registry = await registry_of(backend)
    await registry.register("flux", "a", URL, 1)
    await slots_of(backend).register(Endpoint(model="flux", server="a", url=URL, slots=4))
    assert (await control_of(backend).settings(queue_of("flux"))).capacity == 100
    await registry.refresh()
    assert (await control_of(backend).settings(queue_of("flux"))).capacity == 400


async def test_a_queue_that_cannot_follow(caplog: pytest.LogCaptureFixture) -> None:
    """If a queue's settings contradict its model's, a change of the configuration fails.

    A refresh only logs a warning (law 9).
    """
    backend = MemoryBackend()
    control, key = backend.control, queue_of("flux")
    registry = await registry_of(backend)
    await registry.register("flux", "a", URL, 1)
    bound = (await control.settings(key)).model_copy(update={"capacity": None, "shards": 2})
    bound = bound.model_copy(update={"floor_share": 0})
    real = control.settings

    async def spread(asked: str) -> QueueSettings:
        return bound if asked == key else await real(asked)

    failing = Failing(control)
    failing.put("settings", spread)
    registry._control = cast("Any", failing)
    with pytest.raises(InvalidInput, match="settings of the queue"):
        await registry.configure("flux", ModelConfig(max_retries=1))
    assert await registry.config("flux") == ModelConfig(), "nothing was stored"
    registry._queue_inputs.clear()
    with caplog.at_level(logging.WARNING):
        await registry.refresh()
        await registry.refresh()
    assert (
        len([line for line in caplog.records if "could not update the settings" in line.message])
        == 1
    )
