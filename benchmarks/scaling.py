"""Scaling: cost per task by number of keys and backlog, memory by number of tasks, CPU of idle subscriptions."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

import catalog
import meter
from processes import Failed
from versus import Stage, stage

CYCLE = 1000
CYCLES = 10
SCATTERED = 100
IDLE = 300
"""number of subscriptions in the measurement of idle subscriptions"""
SETTLE = 1.0
"""seconds until idle workers have settled down"""
NO_PATIENCE = meter.Patience(0.0, 0.0)
"""do not wait for an undisturbed machine, for measurements that other processes do not affect"""
WINDOW = 1.0
"""the dedupe window of the memory measurement, in seconds"""

Shape = dict[str, int]
BASE = "1 key, backlog 1,000"
KEYS: dict[str, Shape] = {
    BASE: {"keys": 1, "busy": 1, "per_cycle": CYCLE, "count": CYCLES},
    "10 keys, all with work": {"keys": 10, "busy": 10, "per_cycle": CYCLE, "count": CYCLES},
    "100 keys, 10 with work": {"keys": 100, "busy": 10, "per_cycle": CYCLE, "count": CYCLES},
    "1,000 keys, 10 with work": {"keys": 1000, "busy": 10, "per_cycle": CYCLE, "count": CYCLES},
    "100 keys, one task each": {"keys": 100, "busy": 100, "per_cycle": 100, "count": SCATTERED},
}
UNLIMITED = "no limits"
LIMITS: dict[str, dict[str, Any]] = {
    UNLIMITED: {"max_inflight": None, "rate_limit": None, "capacity": None},
    "max_inflight": {"max_inflight": CYCLE},
    "rate_limit": {"max_inflight": None, "rate_limit": {"max_tokens": 1_000_000}},
    "max_inflight, rate_limit, capacity": {"max_inflight": CYCLE, "capacity": CYCLE},
}
"""settings that each step adds to those of the step before; no limit is reached"""
MIXED = "100 tenants, 3 priorities, no limits"
ORDERS: dict[str, dict[str, Any]] = {
    MIXED: {"max_inflight": None, "rate_limit": None, "capacity": None, "order": "fifo"},
    "100 tenants, 3 priorities, max_inflight, rate_limit, fair": {
        "max_inflight": CYCLE,
        "rate_limit": {"max_tokens": 1_000_000},
        "order": "fair",
    },
}
"""settings that each step adds, for tasks of many tenants"""


def limits(
    entry: catalog.Entry, *, repeats: int, patience: meter.Patience
) -> dict[str, list[dict[str, Any]]]:
    """Measure the cost per task of a drain, for each combination of the queue's limits."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in LIMITS | ORDERS}
    with stage(entry, patience=patience) as on:
        for _ in range(repeats):
            for name, changed in (LIMITS | ORDERS).items():
                on.worker("configure", **changed)
                shape = KEYS[BASE] | ({"tenants": 100} if name in ORDERS else {})
                found[name].append(_cycles(on, shape))
    return found


def keys(
    entry: catalog.Entry, *, repeats: int, patience: meter.Patience
) -> dict[str, list[dict[str, Any]]]:
    """Measure the cost per task of a drain, by the number of subscribed keys and of keys that have tasks."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in KEYS}
    with stage(entry, patience=patience) as on:
        for _ in range(repeats):  # in turn, so that a slow minute affects all combinations
            for name, shape in KEYS.items():
                found[name].append(_cycles(on, shape))
    return found


def backlog(
    entry: catalog.Entry, depths: tuple[int, ...], *, repeats: int, patience: meter.Patience
) -> dict[str, list[dict[str, Any]]]:
    """Measure the cost per task of repeatedly draining 1,000 tasks, by the number of other waiting tasks.

    Each number has a store of its own. They are measured in turn, so that a slow minute affects all of them.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    with ExitStack() as opened:
        stages = {}
        for depth in depths:
            on = stages[depth] = opened.enter_context(stage(entry, patience=patience))
            if depth > CYCLE:
                on.producer("publish_many", first=0, end=depth)
        for _ in range(repeats):
            for depth, on in stages.items():
                found.setdefault(f"backlog {depth:,}", []).append(_cycles(on, KEYS[BASE]))
    return found


def _cycles(on: Stage, shape: Shape) -> dict[str, Any]:
    tasks = shape["count"] * shape["per_cycle"]
    return on.window(tasks, lambda: on.worker("cycles", **shape))


def memory(entry: catalog.Entry, tasks: int) -> dict[str, Any]:
    """Measure Redis's memory before publishing, with waiting tasks, after the drain, and after deleting old records.

    A first small load creates the data structures that exist once in a store.
    """
    ours = entry.kind == "ours"
    with stage(entry, patience=NO_PATIENCE) as on:
        if ours:
            on.worker("configure", dedupe_window=WINDOW)
        _cycle(on, CYCLE)
        if ours:
            _forget(on)
        before = meter.memory(on.redis.ask)
        on.producer("publish_many", first=0, end=tasks)
        queued = meter.memory(on.redis.ask)
        on.work(tasks)
        on.expect(0)
        after = meter.memory(on.redis.ask)
        if ours:
            _forget(on)
        forgotten = meter.memory(on.redis.ask)
    return {
        "tasks": tasks,
        "before": before,
        "queued": queued,
        "drained": after,
        "forgotten": forgotten,
    }


def _cycle(on: Stage, tasks: int) -> None:
    on.producer("publish_many", first=0, end=tasks)
    on.work(tasks)
    on.expect(0)


def _forget(on: Stage) -> None:
    time.sleep(WINDOW + 0.2)
    on.worker("forget")


def idle(entry: catalog.Entry, seconds: float) -> dict[str, Any]:
    """Measure the cost of waiting: for one worker of another library, and for `IDLE` subscriptions of this project."""
    with stage(entry, patience=NO_PATIENCE) as on:
        subscriptions = IDLE if entry.kind == "ours" else 1
        without = int(meter.info(on.redis.ask)["connected_clients"])
        lasting = SETTLE + seconds + 0.5
        if entry.kind == "ours":
            on.worker("idle_many", seconds=lasting, subscriptions=IDLE)
        else:
            on.worker("idle", seconds=lasting)
        time.sleep(SETTLE)
        connections = int(meter.info(on.redis.ask)["connected_clients"]) - without
        client = meter.cpu_of(on.worker.process.pid)
        window = meter.RedisWindow(on.redis.ask)
        time.sleep(seconds)
        client = meter.cpu_of(on.worker.process.pid) - client
        figures = window.figures(1)
        if on.worker.process.poll() is not None:
            raise Failed("the idle worker ended")
        on.worker.answer()
    return {
        "subscriptions": subscriptions,
        "connections": connections,
        "seconds": seconds,
        "client_cpu": client / seconds,
        "redis_cpu": figures["redis_cpu"] / seconds,
        "commands": figures["commands"] / seconds,
    }
