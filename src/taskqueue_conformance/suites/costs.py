"""Costs of a backend: ended tasks leave no records behind, and idle queues take next to no time.

The time limits are far above what a backend with indexes needs, and far below what a scan of all records takes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from taskqueue_conformance.bench import KEY, OTHER, Bench
from taskqueue_conformance.harness import Harness
from taskqueue_conformance.selection import needs
from taskqueue_core.backend import Capability
from taskqueue_core.capabilities import has

_MANY = 20_000
"""number of tasks in another queue"""
_BATCH = 500
_KEYS = 1000
_TIMES = 30
"""number of calls of which the fastest is compared"""
_WATCH = 0.5
"""seconds of real time for which a waiting receive is watched"""


class CostsSuite(Harness):
    """Tests of growth and of the time that idle queues take."""

    @needs("stored", "manual_clock", Capability.CONTROL)
    async def test_nothing_remains_of_the_ended(self, bench: Bench) -> None:
        """Once all tasks have ended and their windows have passed, the store is no larger than in an earlier round."""
        await bench.configure(dedupe_window=1.0, result_ttl=1.0)
        sizes = []
        for number in range(4):
            await _round(bench, f"r{number}")
            await bench.advance(2.0)
            while (await bench.control.maintain()).forgotten:
                pass
            sizes.append(await bench.harness.stored(bench.backend))
        assert sizes[-1] <= sizes[1], f"the store grows with each round: its sizes were {sizes}"

    async def test_tasks_of_other_keys_cost_nothing(self, bench: Bench) -> None:
        """Thousands of waiting and scheduled tasks in another queue do not slow down a receive."""
        subscription = await bench.subscribed("t1")

        async def receive_and_release() -> None:
            await subscription.redeliver(*(await subscription.receive(1, 0)).deliveries)

        before = await _fastest(receive_and_release)
        for start in range(0, _MANY, _BATCH):
            later = bench.now + 3600 if start % (4 * _BATCH) == 0 else None
            names = (f"t{number}" for number in range(start, start + _BATCH))
            await bench.publish(*names, key=OTHER, not_before=later)
        after = await _fastest(receive_and_release)
        assert after <= 4 * before + 0.001, (
            f"a receive and a release take {after * 1000:.2f} ms because of {_MANY} tasks in another queue: "
            f"expected about {before * 1000:.2f} ms as before"
        )

    async def test_idle_keys_cost_little(self, bench: Bench) -> None:
        """A receive on 1,000 idle keys takes about a millisecond."""
        subscription = bench.subscribe(*(f"{KEY}{number}" for number in range(_KEYS)))
        fastest = await _fastest(lambda: subscription.receive(1, 0))
        assert fastest < 0.01, (
            f"an empty receive on {_KEYS} keys takes {fastest * 1000:.1f} ms: expected about 1 ms"
        )

    async def test_waiting_takes_no_time(self, bench: Bench) -> None:
        """A receive that waits does not poll: it takes hardly any processor time."""
        waiting = await bench.start(bench.subscribe().receive(1, None))
        before = time.process_time()
        await asyncio.to_thread(time.sleep, _WATCH)
        used = time.process_time() - before
        assert not waiting.done(), "a receive returned at once: expected it to wait"
        assert used < _WATCH / 10, (
            f"a waiting receive used {used:.2f} s of processor time in {_WATCH} s: expected none"
        )


async def _fastest(call: Callable[[], Awaitable[object]]) -> float:
    times = []
    for _ in range(_TIMES):
        begun = time.perf_counter()
        await call()
        times.append(time.perf_counter() - begun)
    return min(times)


async def _round(bench: Bench, name: str) -> None:
    """Publish tasks, and let them end in different ways."""
    names = [f"{name}-{end}" for end in ("ack", "retry", "release", "lost", "cancel", "bury")]
    subscription = await bench.subscribed(*names)
    await bench.publish(f"{name}-due", not_before=bench.now + 1)
    await bench.publish(f"{name}-late", deadline=bench.now + 1, not_before=bench.now + 9)
    for delivery in await bench.take(subscription, len(names)):
        match delivery.task.id.rpartition("-")[2]:
            case "retry":
                if bench.backend.capabilities.atomic_retry:
                    await bench.retry(delivery.task, settles=delivery, error="failed")
                else:
                    await subscription.ack(delivery)
                    await bench.retry(delivery.task, error="failed")
            case "release":
                await subscription.redeliver(delivery)
            case "lost":
                await subscription.redeliver(delivery, lost=True)
            case "cancel":
                await bench.control.progress(delivery, "half")
                await bench.control.cancel(KEY, delivery.task.id)
            case "bury" if has(bench.backend, Capability.DEAD_LETTERS):
                await bench.bury(subscription, delivery)
                await bench.dead_letters.discard(KEY, delivery.task.id)
            case _:
                await subscription.ack(delivery, results=[b"1"])
    await bench.advance(1.0)
    await bench.control.maintain()
    while taken := await bench.take(subscription, 9):
        await subscription.ack(*taken, results=[b"1"] * len(taken))
    await subscription.close()
