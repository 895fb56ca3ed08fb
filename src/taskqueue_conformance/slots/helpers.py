"""Steps and checks for the tests of slots: endpoints, leases and the reports of servers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from taskqueue_core.capabilities import (
    Endpoint,
    EndpointInfo,
    Left,
    Permit,
    PoolView,
    Seen,
    SlotLease,
    SlotPool,
)

MODEL = "org/flux-dev:{1}"
"""the model that most tests use; the name of a model may be any printable text"""
OTHER_MODEL = "llama-3 été 猫"
LONG = 3600.0
"""duration in seconds that does not pass during a test"""


class PoolSteps:
    """Calls to a slot pool, with default arguments and a check of each answer."""

    def __init__(
        self, slots: SlotPool, advance: Callable[[float], Awaitable[None]], short: float
    ) -> None:
        """Create the steps for a pool. ``advance`` lets time pass; two reports are ``short`` seconds apart."""
        self._slots = slots
        self._advance = advance
        self._short = short

    async def add(self, server: str = "s1", slots: int = 1, **fields: Any) -> EndpointInfo:
        """Register an endpoint and return its state. The model is `MODEL` unless ``fields`` name another model."""
        defaults = {"model": MODEL, "url": f"http://{server}.example/run"}
        made = Endpoint(**{**defaults, **fields}, server=server, slots=slots)
        return await self._slots.register(made)

    async def serve(self, server: str = "s1", slots: int = 1, **fields: Any) -> None:
        """Register an endpoint, and report that its server is idle, so that the endpoint is healthy."""
        model = (await self.add(server, slots, **fields)).endpoint.model
        await self._slots.reconcile(model, server, Seen(active=0), settled=LONG)

    async def inspect(self, model: str | None = None) -> PoolView:
        """Return a view of the pool, after checking that its counts match its leases."""
        view = await self._slots.inspect(model)
        check_pool(view)
        return view

    async def servers(self, model: str | None = None) -> list[str]:
        """Return the servers of the registered endpoints, in the order in which the pool lists them."""
        return [info.endpoint.server for info in (await self.inspect(model)).endpoints]

    async def jobs(self) -> list[str | None]:
        """Return the jobs of all leases, in the order of the leases' fences."""
        return [lease.job for lease in (await self.inspect()).leases]

    async def endpoint(self, server: str = "s1", model: str = MODEL) -> EndpointInfo:
        """Return the state of one endpoint; fail if it is not registered."""
        view = await self.inspect(model)
        (result,) = [info for info in view.endpoints if info.endpoint.server == server]
        return result

    async def expect(self, server: str = "s1", **fields: object) -> None:
        """Fail unless an endpoint of `MODEL` has the given values."""
        check_fields(await self.endpoint(server), **fields)

    async def take(
        self, count: int = 1, holder: str = "h1", model: str = MODEL, ttl: float = LONG
    ) -> list[SlotLease]:
        """Acquire ``count`` slots; fail if fewer slots are free."""
        leases = await self._slots.acquire(model, holder, ttl=ttl, limit=count)
        assert len(leases) == count, f"wrong number of slots: expected {count}, got {len(leases)}"
        return list(leases)

    async def none_free(self, holder: str = "h2", *, limit: int = 1) -> None:
        """Fail if any slot of `MODEL` can be acquired."""
        assert await self._slots.acquire(MODEL, holder, ttl=LONG, limit=limit) == ()

    async def running(
        self, *jobs: str, holder: str = "h1", model: str = MODEL, ttl: float = LONG
    ) -> list[SlotLease]:
        """Acquire a slot for each job, and bind the lease of the slot to the job."""
        leases = await self.take(len(jobs), holder, model)
        bound = await self._slots.assign(*zip(leases, jobs, strict=True), ttl=ttl)
        assert None not in bound, "a current lease was not bound to its job"
        return [lease for lease in bound if lease is not None]

    async def serving(
        self, *jobs: str, slots: int = 1, ttl: float = LONG, reports: bool = True
    ) -> list[SlotLease]:
        """Register a healthy endpoint, and return one lease for each job, bound to that job."""
        await self.serve(slots=slots, reports=reports)
        return await self.running(*jobs, ttl=ttl)

    async def assign(self, lease: SlotLease, job: str, ttl: float = LONG) -> SlotLease:
        """Bind a lease to a job; fail if the lease is stale."""
        (bound,) = await self._slots.assign((lease, job), ttl=ttl)
        assert bound is not None, "a current lease was not bound to its job"
        return bound

    async def detach(self, lease: SlotLease, ttl: float = LONG) -> SlotLease:
        """Detach a lease; fail if it is stale."""
        (detached,) = await self._slots.detach(lease, ttl=ttl)
        assert detached is not None, "a current lease was not detached"
        return detached

    async def renew(self, lease: SlotLease, ttl: float = LONG) -> SlotLease:
        """Renew a lease; fail if it is stale."""
        (renewed,) = await self._slots.renew(lease, ttl=ttl)
        assert renewed is not None, "a current lease was not renewed"
        return renewed

    async def take_over(self) -> tuple[SlotLease, SlotLease]:
        """Let ``h2`` acquire a slot and take over ``job-1``; return the leases of the new slot and of the job."""
        (fresh,) = await self.take(holder="h2")
        return fresh, await self.assign(fresh, "job-1")

    async def report(
        self,
        active: int | None,
        *jobs: str,
        server: str = "s1",
        settled: float | None = None,
    ) -> list[str | None]:
        """Report that a server runs ``active`` jobs, or with ``None`` that it did not answer.

        For each lease that ended, return its job, or ``None`` if the lease had no job.
        """
        seen = None
        if active is not None:
            seen = Seen(active=active, jobs=frozenset(jobs) if jobs else None)
        settled = self._short if settled is None else settled
        ended = await self._slots.reconcile(MODEL, server, seen, settled=settled)
        assert all(not lease.token and lease.note is None for lease in ended), (
            "`reconcile` must return leases without tokens and notes"
        )
        return [lease.job for lease in ended]

    async def report_twice(self, active: int) -> list[str | None]:
        """Report the same number of jobs twice, ``short`` seconds apart; return the jobs whose leases ended."""
        assert await self.report(active) == [], "the first report must end no lease"
        await self._advance(self._short)
        return await self.report(active)

    async def check_stale(self, *leases: SlotLease) -> None:
        """Call the pool's methods with stale leases; fail if a method accepts one of them or changes another lease."""
        pool, before = self._slots, await self.inspect()
        for lease in leases:
            assert await pool.release(lease) == (False,), "a stale token has released a slot"
            assert await pool.renew(lease, ttl=LONG) == (None,), "a stale token was renewed"
            assert await pool.detach(lease, ttl=LONG) == (None,), (
                "a stale token has detached a lease"
            )
            assert await pool.assign((lease, "stale-job"), ttl=LONG) == (None,), (
                "a stale token was bound to a job"
            )
            await pool.acquire(lease.model, "unknown", ttl=LONG, limit=0, releasing=[lease])
            if lease.job is not None:
                left = await pool.leave(lease.model, lease.job, lease.token, b'"stale"')
                assert left is Left.LATE, "a stale token has left a note"
        after = await self.inspect()
        assert after.leases == before.leases, "a stale token has changed a lease"


def lost_lease(lease: SlotLease, **fields: object) -> SlotLease:
    """Return a copy of a lease with another token: one that was issued by a pool that no longer exists."""
    return msgspec.structs.replace(lease, **{"token": "0ldp001.77.abcdef", **fields})


def check_fields(value: Endpoint | EndpointInfo, **fields: object) -> None:
    """Fail unless an endpoint has the given values."""
    actual = {name: getattr(value, name) for name in fields}
    assert actual == fields


def check_pool(view: PoolView) -> None:
    """Fail if the counts in a view of a pool do not match its leases, or if the view shows a token or a note."""
    assert all(lease.token == "" for lease in view.leases), "`inspect` must not show tokens"
    assert all(lease.note is None for lease in view.leases), "`inspect` shows a note: expected None"
    fences = [lease.fence for lease in view.leases]
    assert fences == sorted(set(fences)), f"fences must be unique and sorted: got {fences}"
    jobs = Counter((lease.model, lease.job) for lease in view.leases if lease.job is not None)
    assert not jobs or max(jobs.values()) == 1, f"a job has several slots: {jobs}"
    held = Counter((lease.model, lease.server, lease.state) for lease in view.leases)
    for info in view.endpoints:
        fields = {
            Permit.UNASSIGNED: info.unassigned,
            Permit.ASSIGNED: info.assigned,
            Permit.DETACHED: info.detached,
        }
        name = (info.endpoint.model, info.endpoint.server)
        true = {state: held.pop((*name, state), 0) for state in Permit}
        assert fields == true, f"wrong counts of an endpoint: expected {true}, got {fields}"
        assert info.held + info.free == max(info.endpoint.slots, info.held)
        assert info.overdue <= info.assigned + info.detached
    assert not held, f"leases of endpoints that are not registered: {list(held)}"
