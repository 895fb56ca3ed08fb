"""A server whose process was frozen: it detects workers that have become silent, and keeps the live ones."""

from __future__ import annotations

import asyncio

import pytest

from tests.clock import jump
from tests.server.support import running

pytestmark = pytest.mark.fast_clock
LEASE = 15.0
FROZEN = 60.0
"""seconds for which the event loop is blocked, as if the process had been stopped"""


async def test_a_silent_worker_is_given_up_after_a_freeze() -> None:
    """Faults A4 and B10: a worker that disappeared while the server was frozen loses its tasks."""
    async with running(lease=LEASE, grace=0) as it:
        await it.publish("a")
        async with it.worker(credit=1) as worker:
            await worker.deliveries(1)
            jump(FROZEN)
            began = asyncio.get_running_loop().time()
            assert await worker.closed(2 * LEASE) == 4408
            assert asyncio.get_running_loop().time() - began <= LEASE
            await it.reaches(waiting=1)


async def test_a_live_worker_keeps_its_tasks_through_a_freeze() -> None:
    """Fault B10: frames that a worker sent while the server was frozen are read before the worker is judged silent."""
    async with running(lease=LEASE, grace=0) as it, it.worker(credit=1) as worker:
        await it.publish("a")
        (got,) = await worker.deliveries(1)
        await worker.send("ping", n=1)
        jump(FROZEN)
        await worker.frame("pong")
        await worker.send("ack", receipts=[got["receipt"]])
        assert await worker.settled(1) == ([got["receipt"]], [])
        assert len(it.context.registry) == 1
