"""Slots of backends that wrap other backends, and of backends without slots."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from taskqueue_conformance.suite import SlotsSuite
from taskqueue_core.backend import Backend, Capabilities, Capability
from taskqueue_core.capabilities import Endpoint, Seen, slots_of
from taskqueue_core.clock import ManualClock
from taskqueue_core.errors import CapabilityMissing
from taskqueue_core.hooks import Hooks
from taskqueue_core.instrumented import InstrumentedBackend
from taskqueue_core.migration import (
    MigratingBackend,
    finish,
    rollback,
    start,
)
from taskqueue_core.recordstore import RecordBackend
from taskqueue_core.sharding.backend import ShardedBackend
from taskqueue_memory import MemoryBackend
from taskqueue_remote import RemoteBackend
from tests.core.dict_store import DictStore, Disk

MODEL = "org/model-1"


class TestObserved(SlotsSuite):
    """The conformance kit for slots on an `InstrumentedBackend`."""

    capabilities = Capabilities(names=frozenset(Capability))
    max_examples = 5

    async def open_backend(self, clock: ManualClock) -> InstrumentedBackend:
        """Open an instrumented memory backend."""
        return InstrumentedBackend(MemoryBackend(clock=clock), Hooks())


async def test_the_new_sides_in_every_phase() -> None:
    """In every phase of a migration, slots are those of the new backend; the old pool is untouched (A20; fault H9)."""
    old, new = MemoryBackend(), MemoryBackend()
    backend = MigratingBackend(old, new)
    assert slots_of(backend) is new.slots
    endpoint = Endpoint(model=MODEL, server="s1", url="http://x", slots=2)
    for pool in (old.slots, slots_of(backend)):
        await pool.register(endpoint)
        await pool.reconcile(MODEL, "s1", Seen(active=0), settled=1)
    (lease,) = await old.slots.acquire(MODEL, "h1", ttl=60)
    (bound,) = await old.slots.assign((lease, "job-1"), ttl=60)
    assert bound is not None
    await start(backend)
    (kept,) = await slots_of(backend).renew(bound, ttl=60)
    assert kept is not None, "the job still runs, so its slot must stay leased"
    assert kept.token != bound.token
    for move in (rollback, start, finish):
        await move(backend)
        assert slots_of(backend) is new.slots
    assert [len((await side.slots.inspect()).leases) for side in (old, new)] == [1, 1]
    await backend.aclose()


class _Slotless(MemoryBackend):
    capabilities = Capabilities(names=frozenset(Capability) - {Capability.SLOTS})


@pytest.mark.parametrize(
    "open_backend",
    [
        lambda: RecordBackend("dict", DictStore(Disk()), ManualClock(), durable=True),
        lambda: RemoteBackend("http://127.0.0.1:1"),
        lambda: MigratingBackend(MemoryBackend(), _Slotless()),
        lambda: MigratingBackend(_Slotless(), MemoryBackend()),
        lambda: ShardedBackend(_Slotless()),
        lambda: InstrumentedBackend(_Slotless(), Hooks()),
    ],
    ids=["recordstore", "remote", "new side", "old side", "sharded", "observed"],
)
async def test_where_there_are_none(open_backend: Callable[[], Backend]) -> None:
    """Asking a backend without slots for them raises an error that lists the capabilities it does have (G2)."""
    backend = open_backend()
    with pytest.raises(
        CapabilityMissing,
        match=r"does not have the capability 'slots'; its capabilities: .*control",
    ):
        slots_of(backend)
    await backend.aclose()


async def test_a_side_without_slots() -> None:
    """If one backend of a migration has no slots, the migrating backend has none either (A20)."""
    backend = MigratingBackend(MemoryBackend(), _Slotless())
    with pytest.raises(CapabilityMissing, match="_Slotless does not have the capability 'slots'"):
        backend.slots  # noqa: B018 - reading the attribute raises the error
    await backend.aclose()


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda: InstrumentedBackend(_Slotless(), Hooks()),
        lambda: ShardedBackend(_Slotless()),
        lambda: InstrumentedBackend(ShardedBackend(_Slotless()), Hooks()),
    ],
    ids=["instrumented", "sharded", "both"],
)
async def test_error_names_the_authors_class(wrapped: Callable[[], Backend]) -> None:
    """An error about a missing capability names the author's class, not a wrapper of this package (G2, G6)."""
    backend = wrapped()
    with pytest.raises(CapabilityMissing, match=r"^_Slotless does not have the capability 'slots'"):
        slots_of(backend)
    await backend.aclose()
