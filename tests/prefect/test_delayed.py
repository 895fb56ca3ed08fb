"""Test with real Prefect workers at one replica and a client at the other."""

from __future__ import annotations

import asyncio
from collections import defaultdict

from taskqueue_core.tasks import State
from taskqueue_redis import RedisBackend
from tests.prefect.replicas import LEASE, SECONDS, Replica, Site, executed, worker
from tests.server.support import eventually

DELAY = 1.0
"""seconds between the attempts of `background.fail_once`"""


async def test_what_is_delayed_is_executed(
    pair: tuple[Replica, Replica], site: Site, backend: RedisBackend
) -> None:
    """Rows E1, E6, E8, REV-E2: runs created at one replica are executed by workers of the other, and retried in time.

    Each worker executes one run at a time. While it is busy for longer than a lease, the run that it has received but
    not acked stays with it.
    """
    a, b = pair
    words = ("2", "short-", "0", "wait", "6", "long-", "fail_once", "2", "again-")
    with worker(site, "w1", b.api, 1), worker(site, "w2", b.api, 1):
        runs = await asyncio.to_thread(site.run, "delay.py", *words, api=a.api)
        keys = {run: str(a.client.get(f"/task_runs/{run}").json()["task_key"]) for run in runs}

        async def in_hand() -> set[str]:
            found = set()
            for run, key in keys.items():
                (status,) = await backend.control.statuses(key, run)
                assert status is not None
                assert (status.attempt, status.losses) in {(1, 0), (2, 0)}
                if status.state is State.IN_FLIGHT:
                    found.add(run)
            return found

        async def both_are_busy() -> bool:
            begun = [name for name in executed(site) if name.startswith("long-")]
            return len(begun) == 2 and len(await in_hand()) == 2

        async def for_longer_than_a_lease() -> bool:
            held = await in_hand()
            await asyncio.sleep(1.5 * LEASE)
            return len(held) == 2 and await in_hand() == held

        await eventually(both_are_busy, SECONDS)
        await eventually(for_longer_than_a_lease, SECONDS)
        (site.folder / "gate").touch()
        await asyncio.to_thread(a.all_reach, "Completed", runs)
    times = defaultdict(list)
    for line in executed(site):
        name, _, at = line.partition("@")
        times[name].append(float(at or 0))
    once = {f"short-{n}" for n in range(2)} | {f"long-{n}" for n in range(6)}
    again = {f"again-{n}" for n in range(2)}
    assert {name: len(times[name]) for name in once | again} == {
        **dict.fromkeys(once, 1),
        **dict.fromkeys(again, 2),
    }
    for earlier, later in (times[name] for name in again):
        assert later - earlier >= DELAY
