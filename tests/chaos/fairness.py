"""How fair turns are: one tenant has many tasks, 99 others ten each, and three servers share the work."""

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
"""how many times longer the 99 may wait beside the one than alone"""
JAIN = 0.95
"""Jain's index of what each tenant has had, at least; 1 is the same for all"""
SLACK = 0.1
"""seconds, for a machine that does other things as well"""
MANY = 1_000_000
_TENANTS = 99
_EACH = 10
_SERVERS = 3
_AT_ONCE = 20
_WORK = 0.005
"""seconds of each batch"""
_BATCH = 500
_QUEUES = ("idle", "busy")


class Turns(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured. Times are seconds from the confirmation of a task of the 99 to its hand-out."""

    tasks: int
    """of the one tenant that has many"""
    idle_p50: float
    idle_p99: float
    """of the 99, alone"""
    p50: float
    p99: float
    """of the 99, beside it"""
    jain: float
    """of the hand-outs of all 100 while all had something waiting: until the first of the 99 had all of its tasks"""

    @property
    def ok(self) -> bool:
        """Whether it is as fair as it has to be."""
        return self.p99 <= SLOWER * self.idle_p99 + SLACK and self.jain >= JAIN


class _Drain:
    """Servers that take from one queue, and note when each tenant's tasks were handed out."""

    def __init__(self, world: World, key: str, backends: Sequence[Backend]) -> None:
        self.world = world
        self.key = key
        self.backends = backends
        self.order: list[str] = []
        """the tenant of each hand-out"""
        self.out: dict[str, float] = {}
        """when each task of the 99 was handed out"""
        self._enough = asyncio.Event()

    async def run(self) -> None:
        """Take until all of the 99 have been handed out."""
        taking = [asyncio.create_task(self._serve(n)) for n in range(len(self.backends))]
        await self._enough.wait()
        await asyncio.gather(*taking)

    def under_way(self, number: int) -> bool:
        """Whether so many have been handed out."""
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
    """Measure on a Redis of its own: the 99 alone, then beside one tenant with so many tasks."""
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
            if key == "busy":  # they come while the one is served already
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
    """Publish the tasks of the 99, all at once; return when they were confirmed."""
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
    """Return Jain's index of the tenants' hand-outs, from a place in the order on and as long as all had something."""
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
    """Measure, and write down what came of it."""
    folder = Path(tempfile.mkdtemp(prefix="taskqueue-fairness-"))
    try:
        turns = asyncio.run(measure(folder / "run", tasks))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(turns), indent=2) + b"\n")
    return turns


def table(path: Path = RESULTS) -> str:
    """Return what the last campaign came to as Markdown."""
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
