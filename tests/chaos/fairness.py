"""Measures fairness between tenants: one tenant has many tasks, 99 others have ten each, three servers consume."""

from __future__ import annotations

import asyncio
import math
import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec

from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import Order
from taskqueue_core.tasks import Task
from tests.chaos.limiting import limit
from tests.chaos.world import Shape, World

RESULTS = Path(__file__).parent / "results" / "fairness.json"
SLOWER = 2.0
"""maximum ratio between the waiting times of the 99 small tenants with and without the large one"""
JAIN = 0.95
"""minimum of Jain's fairness index over the deliveries of all tenants; 1 means equal shares"""
SLACK = 0.1
"""extra seconds allowed on a busy machine"""
MANY = 1_000_000
_TENANTS = 99
_EACH = 10
_SERVERS = 3
_AT_ONCE = 20
_WORK = 0.005
"""seconds of work per batch"""
_BATCH = 500
_QUEUES = ("idle", "busy")


class Turns(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured. Times are seconds from the confirmation of a small tenant's task to its delivery."""

    tasks: int
    """number of tasks of the one large tenant"""
    idle_p50: float
    idle_p99: float
    """99th percentile of the 99 small tenants' waiting times when they are alone"""
    p50: float
    p99: float
    """99th percentile of the 99 small tenants' waiting times next to the large tenant"""
    jain: float
    """Jain's index over the deliveries of all 100 tenants while all had waiting tasks, that is until the first small
    tenant had received all of its tasks"""

    @property
    def ok(self) -> bool:
        """Whether waiting times and fairness index are within their limits."""
        return self.p99 <= SLOWER * self.idle_p99 + SLACK and self.jain >= JAIN


class _Drain:
    """Several servers that consume one queue and record when each tenant's tasks were delivered."""

    def __init__(self, world: World, key: str, backends: Sequence[Backend]) -> None:
        self.world = world
        self.key = key
        self.backends = backends
        self.order: list[str] = []
        """tenant of each delivery, in order"""
        self.out: dict[str, float] = {}
        """time of delivery of each small tenant's task, by id"""
        self._enough = asyncio.Event()

    async def run(self) -> None:
        """Consume until all tasks of the 99 small tenants have been delivered."""
        taking = [asyncio.create_task(self._serve(n)) for n in range(len(self.backends))]
        await self._enough.wait()
        await asyncio.gather(*taking)

    def under_way(self, number: int) -> bool:
        """Return whether at least ``number`` tasks have been delivered."""
        return len(self.order) >= number

    async def _serve(self, number: int) -> None:
        async with self.backends[number].subscribe([self.key], f"s{number}") as subscription:
            while not self._enough.is_set():
                received = await subscription.receive(_AT_ONCE, 0.05)
                for delivery in received.deliveries:
                    tenant = delivery.task.tenant or ""
                    self.order.append(tenant)
                    if tenant != "many":
                        self.out[delivery.task.id] = delivery.delivered_at
                if len(self.out) == _TENANTS * _EACH:
                    self._enough.set()
                await asyncio.sleep(_WORK)
                if received.deliveries:
                    await subscription.ack(*received.deliveries)


async def measure(folder: Path, tasks: int) -> Turns:
    """Measure on a separate Redis: the 99 small tenants alone, then next to one tenant with ``tasks`` tasks."""
    shape = Shape(
        tasks=0, consumers=0, keys=_QUEUES, lease=15.0, answer_timeout=5.0, operation_timeout=10.0
    )
    async with World(folder, shape) as world:
        for key in _QUEUES:
            await limit(world, key, order=Order.FAIR)
        backends = [world.open_backend(world.redis.port) for _ in range(_SERVERS)]
        await _publish(world, [f"m{n}" for n in range(tasks)], "many")
        waits: dict[str, list[float]] = {}
        jain = 0.0
        for key in _QUEUES:
            drain = _Drain(world, key, backends)
            taking = asyncio.create_task(drain.run())
            # The small tenants arrive while the large one is being served already.
            if key == "busy":
                await world.until(partial(drain.under_way, 200), "it is under way")
            sent = await _publish_few(world, key)
            since = len(drain.order)
            await taking
            waits[key] = sorted(drain.out[name] - at for name, at in sent.items())
            jain = _jain(drain.order, since)
    return Turns(
        tasks=tasks,
        idle_p50=_quantile(waits["idle"], 0.5),
        idle_p99=_quantile(waits["idle"], 0.99),
        p50=_quantile(waits["busy"], 0.5),
        p99=_quantile(waits["busy"], 0.99),
        jain=jain,
    )


async def _publish(world: World, ids: Sequence[str], tenant: str) -> None:
    for start in range(0, len(ids), _BATCH):
        some = ids[start : start + _BATCH]
        await world.backend.publisher.publish(
            *(Task(key="busy", id=name, tenant=tenant) for name in some)
        )


async def _publish_few(world: World, key: str) -> dict[str, float]:
    """Publish the tasks of the 99 small tenants in one call; return when each was confirmed."""
    tasks = [
        Task(key=key, id=f"{key}-{tenant}-{n}", tenant=f"t{tenant}")
        for n in range(_EACH)
        for tenant in range(_TENANTS)
    ]
    await world.backend.publisher.publish(*tasks)
    at = world.backend.now()
    return {task.id: at for task in tasks}


def _quantile(ordered: Sequence[float], part: float) -> float:
    return max(0.0, ordered[math.ceil(part * len(ordered)) - 1])


def _jain(order: Sequence[str], since: int) -> float:
    """Return Jain's index over the tenants' deliveries, from position ``since`` until a tenant has no tasks left."""
    had: Counter[str] = Counter()
    shares: Counter[str] = Counter()
    for place, tenant in enumerate(order):
        had[tenant] += 1
        shares[tenant] += place >= since
        if tenant != "many" and had[tenant] == _EACH:
            break
    counts = [shares[tenant] for tenant in ("many", *(f"t{n}" for n in range(_TENANTS)))]
    return sum(counts) ** 2 / (len(counts) * sum(count * count for count in counts))


def campaign(tasks: int = MANY) -> Turns:
    """Run the measurement and save its results."""
    folder = Path(tempfile.mkdtemp(prefix="taskqueue-fairness-"))
    try:
        turns = asyncio.run(measure(folder / "run", tasks))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(turns), indent=2) + b"\n")
    return turns


def table(path: Path = RESULTS) -> str:
    """Return the results of the last campaign as a Markdown table."""
    turns = msgspec.json.decode(path.read_bytes(), type=Turns)
    rows = [
        ("tasks of the one tenant", f"{turns.tasks:,}"),
        ("wait of the 99 alone, median and p99", f"{turns.idle_p50:.3f} s, {turns.idle_p99:.3f} s"),
        (
            "wait of the 99 together with it, median and p99",
            f"{turns.p50:.3f} s, {turns.p99:.3f} s",
        ),
        ("Jain's index of all 100", f"{turns.jain:.4f}"),
    ]
    lines = ["| figure | value |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| {name} | {value} |" for name, value in rows)]) + "\n"
