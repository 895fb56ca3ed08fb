"""A setting is stored if its capability is declared, and otherwise refused with an error that names the setting."""

from __future__ import annotations

from typing import Any

import pytest

from taskqueue_conformance.bench import KEY, Bench
from taskqueue_conformance.harness import Harness
from taskqueue_conformance.selection import needs
from taskqueue_conformance.suites.fan_out import bound
from taskqueue_conformance.suites.order import FAIR
from taskqueue_core.backend import Capability
from taskqueue_core.capabilities import Order, QueueSettings, has
from taskqueue_core.errors import CapabilityMissing
from taskqueue_core.rate_limit import IntervalUnit, RateLimit
from taskqueue_core.tasks import Published
from taskqueue_core.uniqueness import UniqueKey

_LIMITS: dict[str, Any] = {
    "capacity": 7,
    "max_inflight": 3,
    "rate_limit": RateLimit(max_tokens=5, interval=2, interval_unit=IntervalUnit.MINUTES),
    "paused": True,
    "intake_paused": True,
    "timeout": 1.5,
}


class DeclaredSuite(Harness):
    """Tests of settings and ordering keys, with or without the capability that they need."""

    @needs(Capability.CONTROL)
    async def test_limits_are_kept_or_refused(self, bench: Bench) -> None:
        """With ``flow``, limits are stored; without it, each limit is refused with an error that names the limit."""
        await _kept_or_refused(bench, Capability.FLOW, _LIMITS)

    @needs(Capability.CONTROL)
    async def test_order_is_kept_or_refused(self, bench: Bench) -> None:
        """With ``fair_order``, its settings are stored; otherwise, each is refused with an error naming it."""
        await _kept_or_refused(bench, Capability.FAIR_ORDER, {"order": Order.FAIR, **FAIR})

    @needs(Capability.CONTROL)
    async def test_floor_share_is_kept_or_refused(self, bench: Bench) -> None:
        """With ``floor_share``, the setting of this name is stored; without it, the setting is refused."""
        await _kept_or_refused(bench, Capability.FLOOR_SHARE, {"floor_share": 0.25})

    @needs(Capability.CONTROL)
    async def test_binding_is_kept_or_refused(self, bench: Bench) -> None:
        """With ``fan_out``, the setting ``bound_to`` is stored; without it, the setting is refused."""
        if has(bench.backend, Capability.FAN_OUT):
            name, two = await bound(bench, 2)
            settings = await bench.control.settings(KEY)
            assert settings.bound_to == (name, two)
            return
        await bench.invalid("bound_to", bench.configure(bound_to=("copies",)))
        assert await bench.control.settings(KEY) == QueueSettings()

    @needs(Capability.CONTROL)
    async def test_lists_are_kept_or_refused(self, bench: Bench) -> None:
        """With ``listing``, its settings are stored; without it, each is refused with an error that names it."""
        chosen = {"index": ("user",), "keep_ended": 60.0, "keep_ended_most": 5}
        await _kept_or_refused(bench, Capability.LISTING, chosen)

    async def test_order_per_entity_or_refused(self, bench: Bench) -> None:
        """With ``ordering_keys``, an ordering key is stored; without it, the key is refused, but a tenant is stored."""
        if has(bench.backend, Capability.ORDERING_KEYS):
            await bench.publish("t1", ordering_key="e")
            assert (await bench.one(bench.subscribe())).task.ordering_key == "e"
            return
        await bench.invalid("ordering_key", bench.offer(bench.task("t1", ordering_key="e")))
        await bench.publish("t2", tenant="a")
        (delivery,) = await bench.take(bench.subscribe(), 9)
        assert (delivery.task.id, delivery.task.tenant) == ("t2", "a")

    async def test_unique_key_or_refused(self, bench: Bench) -> None:
        """With ``unique``, a unique key is stored; without it, the whole call is refused before anything is stored."""
        task = bench.task("t1", unique=UniqueKey(key="k"))
        if has(bench.backend, Capability.UNIQUE):
            (answer,) = await bench.offer(task)
            assert answer.status is Published.ACCEPTED
            return
        with pytest.raises(CapabilityMissing, match="unique"):
            await bench.offer("t0", task)
        assert await bench.take(bench.subscribe(), 9) == []


async def _kept_or_refused(bench: Bench, capability: Capability, chosen: dict[str, Any]) -> None:
    if has(bench.backend, capability):
        confirmed = await bench.configure(**chosen)
        assert confirmed == QueueSettings(version=1, **chosen)
        assert await bench.control.settings(KEY) == confirmed
        return
    for name, value in chosen.items():
        await bench.invalid(name, bench.configure(**{name: value}))
    assert await bench.control.settings(KEY) == QueueSettings()
