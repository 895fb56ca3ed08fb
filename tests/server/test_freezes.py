"""A server that was frozen itself: who went silent meanwhile is still found out, and who did not is not blamed."""

from __future__ import annotations

import asyncio
import time

from tests.server.support import eventually, running


class TestFreeze:
    """The event loop stands still for much longer than the lease."""

    async def test_a_silent_worker_is_given_up_after_a_freeze(self) -> None:
        """Faults A4 and B10: a worker that vanished during the freeze does not keep its tasks for ever."""
        async with running(lease=0.3, grace=0) as it:
            await it.publish("a")
            async with it.worker(credit=1) as worker:
                await worker.deliveries(1)
                time.sleep(1.0)  # noqa: ASYNC251 - everything stands still, as when the process is stopped
                await it.reaches(waiting=1, seconds=2.0)
                assert await worker.closed() == 4408

    async def test_a_live_worker_keeps_its_tasks_through_a_freeze(self) -> None:
        """Fault B10: what a worker said during the freeze is read before it is called silent."""
        async with running(lease=0.6, grace=0) as it, it.worker(credit=1) as worker:
            await it.publish("a")
            (got,) = await worker.deliveries(1)
            await worker.send("ping", n=1)
            time.sleep(1.5)  # noqa: ASYNC251 - as above
            await worker.frame("pong")
            await worker.send("ack", receipts=[got["receipt"]])
            assert await worker.settled(1) == ([got["receipt"]], [])
            await eventually(lambda: len(it.hub.registry) == 1)
            await asyncio.sleep(0)
