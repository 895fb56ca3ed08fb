"""Tests of the model registry, in which models and endpoints change at run time."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, cast

import pytest

from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import (
    Order,
    PoolView,
    Seen,
    control_of,
    slots_of,
)
from taskqueue_core.errors import BackendUnavailable, InvalidInput
from taskqueue_core.tasks import State, Task
from taskqueue_dispatch.models import ModelConfig, ModelType
from taskqueue_dispatch.names import queue_of
from taskqueue_memory import MemoryBackend
from taskqueue_server.auth.sessions import Sessions
from tests.dispatch.desk import SPELLINGS, URL, Failing, registry_of, well
from tests.dispatch.patience import until


async def test_endpoints_at_run_time(backend: Backend) -> None:
    """An endpoint can be registered, listed, changed, drained and removed at run time (C12, H7)."""
    registry = await registry_of(backend)
    told = await registry.register("flux", "flux-server-1", URL, 2)
    assert (told.endpoint.slots, told.healthy) == (2, False)
    view = registry.view("flux")
    assert view is not None
    assert (view.slots, view.usable, view.key) == (2, False, queue_of("flux"))
    await well(backend, "flux", "flux-server-1")
    (view,) = await registry.models()
    assert view.usable
    assert await registry.drain("flux", "flux-server-1")
    view = registry.view("flux")
    assert view is not None
    assert (view.slots, view.usable) == (0, False)
    assert await registry.drain("flux", "flux-server-1", draining=False)
    await registry.register("flux", "flux-server-1", URL, 1, priority=9)
    (view,) = await registry.models()
    assert (view.slots, view.endpoints[0].endpoint.priority) == (1, 9)
    assert await registry.remove("flux", "flux-server-1")
    assert await registry.models() == ()
    assert not await registry.remove("flux", "flux-server-1")
    assert not await registry.drain("flux", "flux-server-1")


async def test_configuration_at_run_time(backend: Backend) -> None:
    """Any process can read, replace and reset a model's configuration at run time (C5, C13)."""
    first, second = await registry_of(backend), await registry_of(backend)
    assert (await first.config("flux")).model_dump(include=set(ROW_C5)) == ROW_C5
    wanted = ModelConfig(
        model_type=ModelType.ASYNC,
        poll_endpoint_template="/status/{id}",
        poll_interval=5.0,
        max_poll_time=1800,
        max_retries=3,
    )
    assert await first.configure("flux", wanted) == wanted
    assert await second.config("flux") == wanted
    await second.refresh()
    view = second.view("flux")
    assert view is not None
    assert (view.config, view.endpoints) == (wanted, ())
    found = await control_of(backend).settings(queue_of("flux"))
    assert (found.retry.max_attempts, found.max_processing_time) == (4, 1860)
    assert await second.configure("flux", None) == ModelConfig()
    assert await first.config("flux") == ModelConfig()
    await first.refresh()
    assert first.view("flux") is None


ROW_C5 = {
    "model_type": ModelType.SYNC,
    "poll_endpoint_template": None,
    "id_field": None,
    "poll_interval": 2.0,
    "max_poll_time": 600.0,
    "max_retries": 50,
}


async def test_configuration_keeps_what_was_set_alone(backend: Backend) -> None:
    """The store contains only the fields that were set; the other fields follow the defaults of the code (C13)."""
    registry = await registry_of(backend)
    await registry.configure("flux", ModelConfig(poll_interval=2.0))
    assert (await slots_of(backend).documents()) == {"flux": b'{"poll_interval":2.0}'}


@pytest.mark.parametrize(
    "text", [b'{"poll_interval": "often"}', b'{"unheard": 1}', b"[]", b"1", b'{"queue_limit": -1}']
)
async def test_a_document_that_is_not_valid(
    backend: Backend, text: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """An invalid configuration document in the store is ignored, with one warning in the log (C13)."""
    await slots_of(backend).configure("flux", text)
    with caplog.at_level(logging.WARNING):
        registry = await registry_of(backend)
        await registry.refresh()
    assert await registry.config("flux") == ModelConfig()
    assert (
        len([line for line in caplog.records if "invalid model configuration" in line.message]) == 1
    )
    await registry.configure("flux", ModelConfig(max_retries=1))
    assert (await registry.config("flux")).max_retries == 1


@pytest.mark.parametrize("model", SPELLINGS)
async def test_names_of_any_spelling(backend: Backend, model: str) -> None:
    """The names of models and servers may contain any printable character (C12, OPEN-C5, H7)."""
    registry = await registry_of(backend)
    await registry.register(model, model, URL, 1)
    await registry.register(model[:-1] or "y", model, URL, 1)
    await registry.configure(model, ModelConfig(max_retries=7))
    again = await registry_of(backend)
    view = again.view(model)
    assert view is not None
    assert (view.model, view.slots, view.config.max_retries) == (model, 1, 7)
    assert view.endpoints[0].endpoint.server == model
    assert (await control_of(backend).settings(view.key)).retry.max_attempts == 8
    assert len({one.key for one in again.known()}) == 2
    await again.remove(model, model)
    await registry.refresh()
    assert [one.slots for one in registry.known() if one.model == model] == [0]


@pytest.mark.parametrize("model", ["", "x" * 201, "tab\tin it", "line\n", "\x7f", "\ud800"])
async def test_names_that_are_none(backend: Backend, model: str) -> None:
    """An invalid name is refused, and not shown (C12)."""
    registry = await registry_of(backend)
    for call in (
        registry.register(model, "a", URL, 1),
        registry.register("flux", model, URL, 1),
        registry.configure(model, ModelConfig()),
        registry.config(model),
    ):
        with pytest.raises(InvalidInput) as caught:
            await call
        assert not model or model not in str(caught.value)
    assert registry.known() == ()


async def test_the_last_endpoint_goes(backend: Backend) -> None:
    """A model without endpoints keeps its queue, its jobs and its configuration (H7, OPEN-B3, C26)."""
    registry, key = await registry_of(backend), queue_of("flux")
    await registry.register("flux", "a", URL, 2)
    await registry.configure("flux", ModelConfig(max_retries=4))
    await backend.publisher.publish(Task(key=key, id="job"))
    await registry.remove("flux", "a")
    (status,) = await control_of(backend).statuses(key, "job")
    assert status is not None
    assert status.state is State.WAITING
    assert (await control_of(backend).settings(key)).retry.max_attempts == 5
    assert (await registry.config("flux")).max_retries == 4
    await registry.register("flux", "a", URL, 2)
    assert (await control_of(backend).settings(key)).capacity == 200


async def test_a_pool_that_was_emptied() -> None:
    """If the slot pool was emptied, its endpoints are restored, but removed ones are not (fault H9)."""
    backend, other = MemoryBackend(), MemoryBackend()
    registry = await registry_of(backend)
    await registry.register("flux", "a", URL, 2)
    await registry.register("flux", "b", URL, 1)
    await registry.register("flux", "gone", URL, 1)
    await registry.drain("flux", "b")
    await registry.configure("flux", ModelConfig(max_retries=4))
    await well(backend, "flux", "gone")
    await backend.slots.acquire("flux", "somebody", ttl=60)
    await registry.remove("flux", "gone")
    await registry.refresh()
    epoch = registry.epoch
    pool = Failing(other.slots)
    registry._pool = cast("Any", pool)
    registry._control = other.control
    pool.down = pool.after = True
    with pytest.raises(BackendUnavailable):
        await registry.refresh()
    pool.down = False
    await registry.refresh()
    assert registry.epoch != epoch
    view = await other.slots.inspect()
    told = {info.endpoint.server: info.draining for info in view.endpoints}
    assert told == {"a": False, "b": True}
    assert (await registry.config("flux")).max_retries == 4
    assert (await other.control.settings(queue_of("flux"))).capacity == 200
    await registry.remove("flux", "a")
    await registry.refresh()
    assert [info.endpoint.server for info in (await other.slots.inspect()).endpoints] == ["b"]


@pytest.mark.parametrize("call", range(1, 7))
async def test_a_pool_that_is_emptied_between_two_calls(call: int) -> None:
    """Endpoints and configurations are restored even if the pool is emptied in the middle of a refresh (fault H9)."""
    backend, other = MemoryBackend(), MemoryBackend()
    registry = await registry_of(backend)
    await registry.register("flux", "a", URL, 2)
    await registry.configure("flux", ModelConfig(max_retries=4))
    await registry.refresh()
    calls = 0

    class Emptied:
        def __getattr__(self, name: str) -> Any:
            nonlocal calls
            calls += 1
            return getattr(other.slots if calls >= call else backend.slots, name)

    registry._pool = cast("Any", Emptied())
    await registry._update_queue("flux")
    for _ in range(3):
        await registry.refresh()
    (info,) = (await other.slots.inspect()).endpoints
    assert (info.endpoint.server, info.endpoint.slots) == ("a", 2)
    assert (await registry.config("flux")).max_retries == 4


async def test_out_of_reach() -> None:
    """A failed refresh raises `BackendUnavailable` and keeps the previous view (C26)."""
    backend = MemoryBackend()
    registry = await registry_of(backend)
    await registry.register("flux", "a", URL, 2)
    before, pool = registry.known(), Failing(backend.slots)
    registry._pool = cast("Any", pool)
    pool.down = True
    for call in (registry.refresh(), registry.register("flux", "b", URL, 2), registry.models()):
        with pytest.raises(BackendUnavailable):
            await call
    assert registry.known() == before
    pool.down = False
    await registry.register("flux", "b", URL, 2)
    assert registry.known()[0].slots == 4


async def test_looks_that_cross() -> None:
    """A refresh that began before a change does not restore the state before the change (B4, C12)."""
    backend = MemoryBackend()
    registry = await registry_of(backend)
    pool, look, looked, goes_on = (
        Failing(backend.slots),
        backend.slots.inspect,
        [0],
        asyncio.Event(),
    )

    async def slow_at_first(model: str | None = None) -> PoolView:
        told = await look(model)
        looked[0] += 1
        if looked[0] == 1:
            await goes_on.wait()
        return told

    pool.put("inspect", slow_at_first)
    registry._pool = cast("Any", pool)
    old = asyncio.create_task(registry.refresh())
    await until(lambda: looked == [1])
    change = asyncio.create_task(registry.register("flux", "a", URL, 1))
    await until(lambda: pool.calls["register"] == 1)
    for _ in range(20):  # let the registration continue until it blocks
        await asyncio.sleep(0)
    goes_on.set()
    await asyncio.gather(old, change)
    assert [view.slots for view in registry.known()] == [1]


async def test_a_look_that_is_cancelled() -> None:
    """A cancelled refresh or registration leaves no lock behind, and the next refresh completes the update (B4)."""
    backend = MemoryBackend()
    registry = await registry_of(backend)
    pool = Failing(backend.slots)
    registry._pool = cast("Any", pool)
    for call in ("register", "inspect", "documents"):
        count = pool.calls[call]
        pool.held = {call}
        task = asyncio.create_task(registry.register("flux", "a", URL, 3))
        await until(lambda call=call, count=count: pool.calls[call] > count)  # type: ignore[misc] # bound now
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        pool.held.clear()
    await registry.refresh()
    assert (await backend.control.settings(queue_of("flux"))).capacity == 300


async def test_listeners_are_called_for_each_change(backend: Backend) -> None:
    """Listeners are called for each change of the registry, but not when slots are acquired (C12)."""
    registry, other = await registry_of(backend), await registry_of(backend)
    heard: list[int] = []
    registry.listen(lambda: heard.append(len(registry.known())))
    await registry.refresh()
    assert heard == []
    await registry.register("flux", "a", URL, 1)
    assert heard == [1]
    await other.register("sdxl", "a", URL, 1)
    await registry.refresh()
    assert heard == [1, 2]
    await slots_of(backend).reconcile("flux", "a", Seen(active=0), settled=0)
    await registry.refresh()
    assert heard == [1, 2, 2]
    (lease,) = await slots_of(backend).acquire("flux", "me", ttl=60)
    await slots_of(backend).assign((lease, "job"), ttl=60)
    await slots_of(backend).rest("flux", "a", 60)
    await registry.refresh()
    assert heard == [1, 2, 2], "acquired slots do not count as a change"
    assert registry.known()[0].endpoints[0].assigned == 1


async def test_models_that_vanish_are_forgotten(backend: Backend) -> None:
    """Nothing is kept of models that no longer exist, in any process (C12)."""
    registry, other = await registry_of(backend), await registry_of(backend)
    for number in range(20):
        await registry.register(f"model {number}", "a", URL, 1)
        await registry.configure(f"model {number}", ModelConfig(max_retries=number))
    await other.refresh()
    for number in range(20):
        await registry.remove(f"model {number}", "a")
        await registry.configure(f"model {number}", None)
    await other.refresh()
    for one in (registry, other):
        kept = (one._views, one._documents, one._configs, one._queue_inputs)
        assert not any(kept), kept


@pytest.mark.parametrize("tenant", ["", "two words", "{x}", "x" * 201])
async def test_weights_of_tenants_that_cannot_be(backend: Backend, tenant: str) -> None:
    """Weights for invalid tenant names are refused (B2, OPEN-B4)."""
    registry = await registry_of(backend)
    with pytest.raises(InvalidInput, match="weights"):
        await registry.configure("flux", ModelConfig(order=Order.FAIR, weights={tenant: 2}))
    assert await registry.config("flux") == ModelConfig()


async def test_documents_of_sessions(backend: Backend) -> None:
    """Sessions of the dashboard, which are documents of the slot pool too, are no models, and no model replaces one."""
    registry = await registry_of(backend)
    await Sessions(backend).start("token")
    (name,) = await slots_of(backend).documents()
    assert await registry.models() == ()
    with pytest.raises(InvalidInput, match="model"):
        await registry.configure(name, ModelConfig())
