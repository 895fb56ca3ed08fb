"""Helpers of the slot tests: register endpoints, acquire and bind leases, and report what servers run."""

from __future__ import annotations

from typing import Any

from taskqueue_conformance.bench import Bench, check_pool
from taskqueue_core.capabilities import (
    Endpoint,
    EndpointInfo,
    Left,
    PoolView,
    Seen,
    SlotLease,
)

MODEL = "org/flux-dev:{1}"
"""the model that most tests use; the name of a model may be any printable text"""
OTHER_MODEL = "llama-3 été 猫"
LONG = 3600.0
"""seconds that never pass during a test"""


def endpoint(server: str = "s1", slots: int = 1, **fields: Any) -> Endpoint:
    """Return an endpoint, which runs `MODEL` unless ``fields`` name another model."""
    model = fields.pop("model", MODEL)
    url = fields.pop("url", f"http://{server}.example/run")
    return Endpoint(model=model, server=server, url=url, slots=slots, **fields)


async def add(bench: Bench, server: str = "s1", slots: int = 1, **fields: Any) -> EndpointInfo:
    """Register an endpoint, and return its state."""
    return await bench.slots.register(endpoint(server, slots, **fields))


async def serve(bench: Bench, server: str = "s1", slots: int = 1, **fields: Any) -> None:
    """Register an endpoint, and report that its server is idle, so that the endpoint is healthy."""
    result = await add(bench, server, slots, **fields)
    await bench.slots.reconcile(result.endpoint.model, server, Seen(active=0), settled=LONG)


async def inspect_pool(bench: Bench, model: str | None = None) -> PoolView:
    """Return the pool, after checking that its counts match its leases."""
    view = await bench.slots.inspect(model)
    check_pool(view)
    return view


async def glance(bench: Bench, server: str = "s1", model: str = MODEL) -> EndpointInfo:
    """Return the state of one endpoint; fail if it is not registered."""
    view = await inspect_pool(bench, model)
    (result,) = [info for info in view.endpoints if info.endpoint.server == server]
    return result


async def take(
    bench: Bench, count: int = 1, holder: str = "h1", model: str = MODEL, ttl: float = LONG
) -> list[SlotLease]:
    """Acquire ``count`` slots; fail if fewer are free."""
    leases = await bench.slots.acquire(model, holder, ttl=ttl, limit=count)
    assert len(leases) == count, f"expected {count} slots, got {len(leases)}"
    return list(leases)


async def running(
    bench: Bench, *jobs: str, holder: str = "h1", model: str = MODEL, ttl: float = LONG
) -> list[SlotLease]:
    """Acquire a slot for each job, and bind its lease to the job."""
    leases = await take(bench, len(jobs), holder, model)
    bound = await bench.slots.assign(*zip(leases, jobs, strict=True), ttl=ttl)
    assert None not in bound, "a current lease was not bound to its job"
    return [lease for lease in bound if lease is not None]


async def take_over(bench: Bench) -> tuple[SlotLease, SlotLease]:
    """Let holder ``h2`` acquire a slot and take ``job-1`` over; return that slot's lease and the lease of the job."""
    (fresh,) = await take(bench, holder="h2")
    (over,) = await bench.slots.assign((fresh, "job-1"), ttl=LONG)
    assert over is not None, "a job was not taken over: expected a lease"
    return fresh, over


async def report_observation(
    bench: Bench,
    active: int | None,
    *jobs: str,
    server: str = "s1",
    model: str = MODEL,
    settled: float | None = None,
) -> list[str | None]:
    """Report ``active`` running jobs (``None``: no answer); return the jobs whose leases ended."""
    result = None
    if active is not None:
        result = Seen(active=active, jobs=frozenset(jobs) if jobs else None)
    settled = bench.short if settled is None else settled
    ended = await bench.slots.reconcile(model, server, result, settled=settled)
    assert all(not lease.token and lease.note is None for lease in ended), "a token was shown"
    return [lease.job for lease in ended]


async def report_twice(bench: Bench, active: int) -> list[str | None]:
    """Report the same number of jobs twice, ``bench.short`` apart; return the jobs whose leases ended."""
    assert await report_observation(bench, active) == [], "the first report must end no lease"
    await bench.advance(bench.short)
    return await report_observation(bench, active)


async def check_stale(bench: Bench, lease: SlotLease) -> None:
    """Fail if the stale token of ``lease`` changes anything, with any method of the pool."""
    pool, before = bench.slots, await inspect_pool(bench)
    assert await pool.release(lease) == (False,), "a stale token has released a slot"
    assert await pool.renew(lease, ttl=LONG) == (None,), "a stale token was renewed"
    assert await pool.detach(lease, ttl=LONG) == (None,), "a stale token has detached a lease"
    assert await pool.assign((lease, "stale-job"), ttl=LONG) == (None,), "a stale token took a job"
    await pool.acquire(lease.model, "unknown", ttl=LONG, limit=0, releasing=[lease])
    if lease.job is not None:
        remaining = await pool.leave(lease.model, lease.job, lease.token, b'"stale"')
        assert remaining is Left.LATE, "a stale token has left a note"
    after = await inspect_pool(bench)
    assert after.leases == before.leases, "a stale token has changed a lease"
