"""The capability ``slots``: registering, changing and removing endpoints, and the order in which slots are granted."""

from __future__ import annotations

import math
from typing import Any

import pytest

from taskqueue_conformance.bench import Bench
from taskqueue_conformance.harness import Harness
from taskqueue_conformance.slots.helpers import (
    LONG,
    MODEL,
    OTHER_MODEL,
    check_fields,
    lost_lease,
)
from taskqueue_core.backend import Capability
from taskqueue_core.capabilities import Seen
from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import LIMITS


class SlotServersSuite(Harness, needs=(Capability.SLOTS,)):
    """Tests of `SlotPool.register`, of other changes to endpoints, and of the order in which slots are granted."""

    async def test_registered(self, bench: Bench) -> None:
        """Registered endpoints are listed by model, then in the order of registration (C12; OPEN-C5)."""
        names = [("b", "s-1"), (MODEL, "s1"), (MODEL, "s-2 {x}"), ("b", "s0"), (OTHER_MODEL, "s1")]
        for model, server in names:
            fields: dict[str, Any] = {
                "model": model,
                "url": "http://x",
                "priority": 7,
                "together": 9,
            }
            result = await bench.pool.add(server, 3, **fields)
            check_fields(result.endpoint, server=server, slots=3, reports=True, **fields)
            check_fields(result, healthy=False, held=0, free=3, last_model=None)
        view = await bench.pool.inspect()
        matches = [(info.endpoint.model, info.endpoint.server) for info in view.endpoints]
        assert matches == sorted(names, key=lambda name: name[0])
        assert await bench.pool.servers(MODEL) == ["s1", "s-2 {x}"]
        again = await bench.pool.inspect(MODEL)
        assert (again.epoch, again.secret) == (view.epoch, view.secret)
        assert len(view.secret) >= 32
        assert view.secret not in repr(view)

    async def test_names_of_any_spelling(self, bench: Bench) -> None:
        """Models and servers may have any printable names, and are never mixed up (OPEN-C5; fault H7)."""
        for name in ("a-b", "a-b-c", "{a}", "a:b", "a/b", "ä b", "*", "猫", "%s", "a\\b", "'"):
            await bench.pool.serve(name, model=name)
            await bench.pool.serve(f"{name}x", model=f"{name}x")
            (lease,) = await bench.pool.take(model=name)
            assert (lease.model, lease.server) == (name, name)
            bound = await bench.pool.assign(lease, "job-1")
            assert (bound.model, bound.server) == (name, name)
            assert await bench.slots.acquire(name, "h1", ttl=LONG, limit=5) == ()
            assert await bench.slots.release(lease) == (True,)
            await bench.slots.configure(name, b"{}")
            assert await bench.slots.documents() == {name: b"{}"}
            assert await bench.slots.drain(name, name)
            assert await bench.slots.remove(name, name)
            assert await bench.pool.servers() == [f"{name}x"]
            assert await bench.slots.remove(f"{name}x", f"{name}x")
            await bench.slots.configure(name, None)

    async def test_new_ones_are_looked_at_first(self, bench: Bench) -> None:
        """An endpoint gets no jobs before its first report; with ``reports=False``, it gets jobs at once (C12)."""
        await bench.pool.add("s1")
        await bench.pool.none_free()
        await bench.pool.expect(usable=False)
        assert await bench.pool.report(0) == []
        await bench.pool.expect(usable=True)
        await bench.pool.add("s2", reports=False)
        await bench.pool.expect("s2", healthy=True)
        assert {lease.server for lease in await bench.pool.take(2)} == {"s1", "s2"}

    async def test_changed(self, bench: Bench) -> None:
        """Registering an endpoint again changes the endpoint, but keeps its leases, health and position (C12)."""
        await bench.pool.serve("s1")
        await bench.pool.serve("s2")
        await bench.slots.release(*await bench.pool.take(2))
        (lease,) = await bench.pool.take()
        result = await bench.pool.add("s1", slots=2, url="http://elsewhere.example/")
        check_fields(result, healthy=True, held=1, free=1)
        assert (await bench.pool.renew(lease)).url == "http://elsewhere.example/"
        assert await bench.pool.servers() == ["s1", "s2"]

    async def test_reports_that_end(self, bench: Bench) -> None:
        """A change to ``reports=False`` ends expired leases at once, and keeps all other leases (C12, C18)."""
        over, _ = await bench.pool.serving("job-1", "job-2", slots=2, ttl=bench.short)
        await bench.advance(bench.short)
        await bench.pool.renew(over)
        check_fields(await bench.pool.add(slots=2, reports=False), held=1, overdue=0)
        assert await bench.pool.jobs() == ["job-1"]

    async def test_slots_that_are_taken_away(self, bench: Bench) -> None:
        """Reducing the slots ends no lease; new leases are granted once enough leases have ended (fault H7)."""
        leases = await bench.pool.serving("job-1", "job-2", "job-3", slots=3)
        check_fields(await bench.pool.add(slots=1), held=3, free=0)
        for lease in leases[:2]:
            await bench.pool.renew(lease)
            assert await bench.slots.release(lease) == (True,)
            await bench.pool.none_free()
        await bench.slots.release(leases[2])
        assert len(await bench.slots.acquire(MODEL, "h2", ttl=LONG, limit=3)) == 1

    async def test_drained(self, bench: Bench) -> None:
        """A draining endpoint gets no new jobs, but its jobs continue; draining can be undone (C12; fault H7)."""
        (lease,) = await bench.pool.serving("job-1", slots=2)
        assert await bench.slots.drain(MODEL, "s1")
        await bench.pool.expect(draining=True, usable=False, healthy=True)
        await bench.pool.none_free()
        await bench.pool.renew(lease)
        assert await bench.slots.drain(MODEL, "s1", draining=False)
        await bench.pool.expect(usable=True)
        await bench.pool.take()
        assert not await bench.slots.drain(MODEL, "s9")
        assert not await bench.slots.drain(OTHER_MODEL, "s1")

    async def test_removed(self, bench: Bench) -> None:
        """A removed endpoint is deleted at once if it has no lease, otherwise when its last lease ends (fault H7)."""
        lease, two = await bench.pool.serving("job-1", "job-2", slots=2)
        await bench.slots.release(two)
        assert await bench.slots.remove(MODEL, "s1")
        await bench.pool.expect(removed=True, usable=False, held=1)
        await bench.pool.none_free()
        await bench.pool.renew(lease)
        assert await bench.slots.remove(MODEL, "s1")
        assert await bench.slots.release(lease) == (True,)
        assert await bench.pool.servers() == []
        assert not await bench.slots.remove(MODEL, "s1")
        assert not (await bench.pool.add()).healthy, "a new endpoint must be unhealthy"
        assert await bench.slots.remove(MODEL, "s1")
        assert await bench.pool.servers() == []

    async def test_removed_and_run_out(self, bench: Bench) -> None:
        """A removed endpoint is deleted when its last lease expires (fault H7)."""
        await bench.pool.serving("job-1", ttl=bench.short, reports=False)
        await bench.slots.remove(MODEL, "s1")
        await bench.pool.expect(held=1)
        await bench.advance(bench.short)
        assert await bench.pool.servers() == []

    async def test_back_in_use(self, bench: Bench) -> None:
        """Registering a draining or removed endpoint again puts it back into use (C12)."""
        (lease,) = await bench.pool.serving("job-1", slots=2)
        await bench.slots.drain(MODEL, "s1")
        await bench.slots.remove(MODEL, "s1")
        result = await bench.pool.add(slots=2)
        check_fields(result, draining=False, removed=False, usable=True, held=1)
        await bench.slots.release(lease, *await bench.pool.take())
        await bench.pool.expect(free=2)

    async def test_resting(self, bench: Bench) -> None:
        """A paused endpoint gets no jobs for the given time; the pause can be changed or ended (C2; fault H8)."""
        await bench.pool.serve()
        assert await bench.slots.rest(MODEL, "s1", LONG)
        result = await bench.pool.endpoint()
        assert result.usable
        assert result.resting_until is not None
        assert abs(result.resting_until - bench.now - LONG) < LONG / 10
        await bench.pool.none_free()
        assert await bench.slots.rest(MODEL, "s1", bench.short)
        await bench.advance(bench.short)
        await bench.slots.release(*await bench.pool.take())
        await bench.pool.expect(resting_until=None)
        await bench.slots.rest(MODEL, "s1", LONG)
        assert await bench.slots.rest(MODEL, "s1", 0)
        await bench.pool.take()
        assert not await bench.slots.rest(MODEL, "s9", 1)

    async def test_a_rest_outlasts_a_registration(self, bench: Bench) -> None:
        """Registering a paused endpoint again does not end its pause."""
        await bench.pool.serve()
        await bench.slots.rest(MODEL, "s1", LONG)
        await bench.pool.add()
        await bench.pool.none_free()

    async def test_higher_priorities_first(self, bench: Bench) -> None:
        """Slots of endpoints with a higher priority are granted first (B9)."""
        for server, priority in (("low", 1), ("high", 9), ("middle", 5)):
            await bench.pool.serve(server, 2, priority=priority)
        given = [lease.server for lease in await bench.pool.take(6)]
        assert given == ["high", "high", "middle", "middle", "low", "low"]

    async def test_the_least_used_first(self, bench: Bench) -> None:
        """At equal priority, the endpoint with the fewest leases comes first; ties go to the oldest endpoint (B9)."""
        for server in ("c", "a", "b"):
            await bench.pool.serve(server, 2)
        leases = await bench.pool.take(3)
        assert [lease.server for lease in leases] == ["c", "a", "b"]
        await bench.slots.release(leases[1])
        (next_one,) = await bench.pool.take()
        assert next_one.server == "a"

    async def test_where_the_model_is_loaded(self, bench: Bench) -> None:
        """At equal priority, a server whose last job used the same model comes first (A18, A19).

        A lease shows whether the server must switch to another model.
        """
        for server in ("s1", "s2"):
            await bench.pool.serve(server, 4)
            await bench.pool.serve(server, 4, model=OTHER_MODEL)
        first_two = [*await bench.pool.running("job-1"), *await bench.pool.running("job-2")]
        for lease in first_two:
            assert (lease.server, lease.switched) == ("s1", False), (
                "a server that ran the model last must come first"
            )
        await bench.slots.drain(OTHER_MODEL, "s1")
        (other,) = await bench.pool.running("job-1", model=OTHER_MODEL)
        assert (other.server, other.switched) == ("s2", False)
        await bench.slots.drain(OTHER_MODEL, "s1", draining=False)
        await bench.slots.drain(OTHER_MODEL, "s2")
        (switch,) = await bench.pool.running("job-2", model=OTHER_MODEL)
        assert (switch.server, switch.switched) == ("s1", True)
        assert (await bench.pool.renew(switch)).switched
        await bench.pool.expect(last_model=OTHER_MODEL)
        (back,) = await bench.pool.take()
        assert (back.server, back.switched) == ("s2", True), "the least used server must come first"

    async def test_a_slot_without_a_job_loads_nothing(self, bench: Bench) -> None:
        """A lease that is released before it has a job does not change the last model of its server (A18, A19)."""
        await bench.pool.serve(slots=2)
        await bench.pool.serve(slots=2, model=OTHER_MODEL)
        await bench.pool.running("job-1")
        (idle,) = await bench.pool.take(model=OTHER_MODEL)
        assert idle.switched, "a server that ran another model last must switch"
        await bench.slots.release(idle)
        (lease,) = await bench.pool.running("job-2")
        assert not lease.switched
        await bench.pool.expect(last_model=MODEL)

    async def test_models_that_share_a_server(self, bench: Bench) -> None:
        """``together`` limits the total number of slots that the models of a server use at once (C2; B6)."""
        await bench.pool.serve(slots=3, together=4)
        await bench.pool.serve(slots=3, model=OTHER_MODEL, together=4)
        await bench.pool.serve("s2", slots=1)
        await bench.slots.drain(MODEL, "s2")
        leases = await bench.pool.take(3)
        assert len(await bench.slots.acquire(OTHER_MODEL, "h1", ttl=LONG, limit=3)) == 1
        await bench.slots.release(leases[0])
        assert len(await bench.slots.acquire(OTHER_MODEL, "h1", ttl=LONG, limit=3)) == 1
        await bench.pool.none_free("h1")

    async def test_together_as_registered_last(self, bench: Bench) -> None:
        """The value of ``together`` that was registered last applies; ``None`` removes the limit (C12)."""
        await bench.pool.serve(slots=3, together=1)
        await bench.pool.serve(slots=3, model=OTHER_MODEL, together=2)
        await bench.pool.take(2)
        await bench.pool.none_free("h1", limit=3)
        await bench.pool.add(slots=3)
        await bench.pool.take(1)
        await bench.pool.take(3, model=OTHER_MODEL)

    async def test_forgotten_with_the_last_one(self, bench: Bench) -> None:
        """When a server's last endpoint is deleted, the server's limit and last model are forgotten (A19)."""
        await bench.pool.serve(slots=2, together=1)
        await bench.slots.release(*await bench.pool.running("job-1"))
        await bench.slots.remove(MODEL, "s1")
        await bench.pool.serve(slots=2, model=OTHER_MODEL)
        leases = await bench.pool.take(2, model=OTHER_MODEL)
        assert not any(lease.switched for lease in leases)

    async def test_documents_of_models(self, bench: Bench) -> None:
        """A model's document is stored until it is deleted, whether or not the model has an endpoint (C13)."""
        pool = bench.slots
        assert await pool.documents() == {}
        await pool.configure(MODEL, b'{"a": 1}')
        await pool.configure(OTHER_MODEL, b'{"text": "\xc3\xa4"}')
        await pool.configure(MODEL, b'{"a": 2}')
        retained = {MODEL: b'{"a": 2}', OTHER_MODEL: b'{"text": "\xc3\xa4"}'}
        assert await pool.documents() == retained
        await pool.configure(MODEL, None)
        await pool.configure("unheard of", None)
        assert await pool.documents() == {OTHER_MODEL: retained[OTHER_MODEL]}
        largest = b'"' + b"x" * (LIMITS.document - 2) + b'"'
        await pool.configure(MODEL, largest)
        assert (await pool.documents())[MODEL] == largest

    async def test_arguments_are_checked(self, bench: Bench) -> None:
        """Every method refuses invalid arguments with an error that names the field, and changes nothing."""
        (lease,) = await bench.pool.serving("job-1")
        lost = lost_lease(lease, server="")
        before, pool, wrong = await bench.pool.inspect(), bench.slots, "a\nb"
        many = [lease] * (LIMITS.batch + 1)
        calls: list[tuple[str, Any]] = [
            ("model", lambda: pool.drain("", "s1")),
            ("server", lambda: pool.drain(MODEL, wrong)),
            ("server", lambda: pool.remove(MODEL, "x" * (LIMITS.name + 1))),
            ("model", lambda: pool.rest(wrong, "s1", 1)),
            ("duration", lambda: pool.rest(MODEL, "s1", -1)),
            ("duration", lambda: pool.rest(MODEL, "s1", math.nan)),
            ("document", lambda: pool.configure(MODEL, b"{broken")),
            ("document", lambda: pool.configure(MODEL, b'"' + b"x" * LIMITS.document + b'"')),
            ("model", lambda: pool.configure("", b"{}")),
            ("model", lambda: pool.inspect("")),
            ("model", lambda: pool.acquire("", "h1", ttl=1)),
            ("holder", lambda: pool.acquire(MODEL, "a b", ttl=1)),
            ("limit", lambda: pool.acquire(MODEL, "h1", ttl=1, limit=-1)),
            ("limit", lambda: pool.acquire(MODEL, "h1", ttl=1, limit=LIMITS.batch + 1)),
            ("ttl", lambda: pool.acquire(MODEL, "h1", ttl=0)),
            ("ttl", lambda: pool.acquire(MODEL, "h1", ttl=math.inf)),
            ("idle", lambda: pool.acquire(MODEL, "h1", ttl=1, idle=-1)),
            ("job", lambda: pool.assign((lease, "a/b"), ttl=1)),
            ("ttl", lambda: pool.assign((lease, "job-1"), ttl=0)),
            ("ttl", lambda: pool.detach(lease, ttl=-1)),
            ("ttl", lambda: pool.renew(lease, ttl=0)),
            ("server", lambda: pool.renew(lost, ttl=1)),
            ("leases", lambda: pool.renew(*many, ttl=1)),
            ("leases", lambda: pool.release(*many)),
            ("leases", lambda: pool.detach(*many, ttl=1)),
            ("leases", lambda: pool.assign(*[(lease, "job-1")] * len(many), ttl=1)),
            ("leases", lambda: pool.acquire(MODEL, "h1", ttl=1, releasing=many)),
            ("note", lambda: pool.leave(MODEL, "job-1", lease.token, b"{broken")),
            ("note", lambda: pool.leave(MODEL, "job-1", lease.token, b" " * (LIMITS.result + 1))),
            ("job", lambda: pool.leave(MODEL, "", lease.token, b"1")),
            ("job", lambda: pool.late(MODEL, "a b")),
            ("model", lambda: pool.late(wrong, "job-1")),
            ("server", lambda: pool.reconcile(MODEL, "", Seen(active=0), settled=0)),
            ("active", lambda: pool.reconcile(MODEL, "s1", Seen(active=-1), settled=0)),
            ("settled", lambda: pool.reconcile(MODEL, "s1", Seen(active=0), settled=-1)),
        ]
        for field, call in calls:
            await bench.invalid(field, call())
        for models in ([], [""], [wrong], [f"m{n}" for n in range(LIMITS.keys + 1)]):
            with pytest.raises(InvalidInput):
                pool.slot_signal(*models)
        assert await bench.pool.inspect() == before
