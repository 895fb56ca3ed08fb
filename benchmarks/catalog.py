"""The entries of the comparison, how they are measured, and their delivery guarantees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["ours", "floor", "peer"]

AT_LEAST_ONCE = "at least once"
AT_MOST_ONCE = "at most once"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One row of the table."""

    name: str
    kind: Kind
    program: str
    """name of the program's file in ``entries/``, without prefix and suffix"""
    mode: str = ""
    environment: str
    tasks: int
    """number of tasks for the workloads ``bulk publish`` and ``drain``, which then take about one second"""
    promise: str = AT_LEAST_ONCE
    """the delivery guarantee of the measured configuration"""
    acknowledges: str
    """when and how a task is settled"""
    recovers: str
    """how a task is redelivered after its worker has died"""
    settings: str = "defaults"
    """settings that differ from the library's defaults, chosen for the fastest drain"""
    compare: frozenset[str] = frozenset({"handler"})
    """the groups in which the entry is compared: ``handler`` (one call per task) or ``batch`` (one call per batch)"""


def _floor(mode: str, tasks: int, acknowledges: str, name: str = "") -> Entry:
    return Entry(
        name=name or f"floor-{mode}",
        kind="floor",
        program="entry_floors",
        mode=mode,
        environment="floor",
        tasks=tasks,
        acknowledges=acknowledges,
        recovers="none",
        settings="redis-py, hiredis, uvloop, orjson",
        compare=frozenset(),
    )


def _ours(mode: str, acknowledges: str, compare: str = "handler") -> Entry:
    return Entry(
        name=f"taskqueue {mode}",
        kind="ours",
        program="entry_taskqueue",
        mode=mode,
        environment="taskqueue",
        tasks=30_000,
        acknowledges=acknowledges,
        recovers="lease by heartbeat; at once where a socket closes",
        settings="uvloop",
        compare=frozenset({compare}),
    )


def _peer(name: str, *, of: str = "", **more: Any) -> Entry:
    """Return an entry of the library ``of`` (default: ``name``), with its own program and environment."""
    library = of or name
    return Entry(name=name, kind="peer", program=f"entry_{library}", environment=library, **more)


FLOORS = (
    _floor("p100", 50_000, "XACK and XDEL per batch of 100"),
    _floor("p1", 3_000, "XACK and XDEL per task"),
    _floor("task", 50_000, "as floor-p100, one asyncio task per message"),
    _floor("lua", 50_000, "as floor-p100, by one script"),
)
CONTROL = _floor("p100", 50_000, "the very same as floor-p100: the A/A control", "floor-again")

OURS = (
    _ours("subscription", "every task's receipt, in batches of 100"),
    _ours("handler", "every task's receipt, gathered; one coroutine call per task"),
    _ours("batch", "every task's receipt, after one call per batch", "batch"),
)

PEERS = (
    _peer(
        "docket",
        tasks=3_000,
        acknowledges="a script after the task",
        recovers="XAUTOCLAIM of leases that are not renewed, 5 min",
        settings="concurrency 100, check interval 1 ms, 400 connections",
    ),
    _peer(
        "taskiq-stream",
        of="taskiq",
        tasks=4_000,
        acknowledges="XACK after the task; entries are never deleted",
        recovers="XAUTOCLAIM after 10 min idle",
        settings="no results, 100 at a time, read 100",
    ),
    _peer(
        "dramatiq",
        tasks=8_000,
        acknowledges="a script after the task",
        recovers="heartbeat 60 s, on 0.1 % of calls",
        settings="16 threads, prefetch 1000, no results",
    ),
    _peer(
        "streaq",
        tasks=2_500,
        acknowledges="XACK and XDEL in MULTI after the task",
        recovers="XAUTOCLAIM after 60 s idle",
        settings="concurrency 100, prefetch 100, no results",
    ),
    _peer(
        "arq",
        tasks=3_000,
        acknowledges="ZREM after the task",
        recovers="its in-progress key expires, 310 s",
        settings="100 jobs, poll 1 ms, no results",
    ),
    _peer(
        "faststream",
        mode="one",
        tasks=5_000,
        acknowledges="XACK after the handler; entries are never deleted",
        recovers="none in this configuration",
        settings="read 100",
    ),
    _peer(
        "faststream-batch",
        of="faststream",
        mode="batch",
        tasks=20_000,
        acknowledges="XACK after the handler of a batch; entries are never deleted",
        recovers="none in this configuration",
        settings="read 100",
        compare=frozenset({"batch"}),
    ),
    _peer(
        "huey",
        tasks=8_000,
        promise=AT_MOST_ONCE,
        acknowledges="none: BRPOP",
        recovers="none",
        settings="one thread, no results",
        compare=frozenset(),
    ),
)

ALL = (*OURS, *FLOORS, CONTROL, *PEERS)
