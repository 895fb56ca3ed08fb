"""The performance targets, and the check whether a run reached them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import scaling
import tables
from tables import BASE

SUBSCRIPTION = "taskqueue subscription"
HANDLER = "taskqueue handler"
BATCHES = "taskqueue batch"


@dataclass(frozen=True)
class Target:
    """An upper or lower bound for one number of a run."""

    figure: str
    measure: str
    """description of the number"""
    sign: Literal["≥", "≤"]
    bound: float
    value: Callable[[Found], float | None]

    def reached(self, found: Found) -> bool | None:
        """Return whether the run meets the bound, or ``None`` if it did not measure the number."""
        value = self.value(found)
        if value is None:
            return None
        return value <= self.bound if self.sign == "≤" else value >= self.bound


Values = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Goal:
    """A bound for one figure of the socket, the dispatcher or the pipeline."""

    name: str
    """name of the figure, whose values are repeated measurements of the same number"""
    figure: str
    measure: str
    sign: Literal["≥", "≤"]
    bound: float
    taken: Callable[[Sequence[float]], float] = median

    def value(self, values: Values) -> float | None:
        """Return the number to which the bound applies, or ``None`` if the run did not measure it."""
        return self.taken(values[self.name]) if self.name in values else None

    def reached(self, values: Values) -> bool | None:
        """Return whether the run meets the bound, or ``None`` if it did not measure the number."""
        value = self.value(values)
        if value is None:
            return None
        return value <= self.bound if self.sign == "≤" else value >= self.bound


class Found:
    """The numbers of a run, looked up by name."""

    def __init__(self, run: dict[str, Any]) -> None:
        self._cells = {(cell["entry"], cell["figure"]): cell for cell in run["summary"]}
        self._scaling = run["scaling"]
        self.contended = False
        """whether a number that was looked up came from a contended measurement, since this was last set to False"""

    def cell(self, entry: str, figure: str, part: str = "value") -> float | None:
        """Return a figure of an entry, or another part of the cell, such as a ratio."""
        cell = self._cells.get((entry, figure), {})
        self.contended = self.contended or cell.get("contended", False)
        if part == "to_best_peer":
            self.contended = self.contended or cell.get("peer_contended", False)
        value: float | None = cell.get(part)
        return value

    def ratio(self, entry: str, figure: str, to: str) -> float | None:
        """Return a figure relative to that of another entry."""
        one, other = self.cell(entry, figure), self.cell(to, figure)
        return one / other if one is not None and other else None

    def cost(self, what: str, name: str, entry: str = SUBSCRIPTION) -> float | None:
        """Return the seconds per task for a combination of keys, or for a backlog."""
        windows = self._scaling.get(what, {}).get(entry, {}).get(name)
        if not windows:
            return None
        counted, contended = tables.quiet(windows)
        self.contended = self.contended or contended
        return float(median(window["seconds"] / window["tasks"] for window in counted))

    def growth(self, what: str, name: str, base: str) -> float | None:
        """Return a cost relative to the cost of ``base``."""
        one, other = self.cost(what, name), self.cost(what, base)
        return one / other if one is not None and other else None

    def deepest(self) -> str | None:
        """Return the name of the largest backlog."""
        names = list(self._scaling.get("backlog", {}).get(SUBSCRIPTION, {}))
        return names[-1] if names else None

    def memory(self, entry: str) -> dict[str, float] | None:
        """Return the bytes before publishing, with waiting tasks, after the drain and after deletion, and the tasks."""
        found: dict[str, float] | None = self._scaling.get("memory", {}).get(entry)
        return found


def _queued(found: Found) -> float | None:
    ours, floor = found.memory(SUBSCRIPTION), found.memory(BASE)
    if ours is None or floor is None:
        return None
    return (ours["queued"] - ours["before"]) / (floor["queued"] - floor["before"])


def _forgotten(found: Found) -> float | None:
    ours = found.memory(SUBSCRIPTION)
    return ours["forgotten"] / ours["before"] if ours else None


def _backlog(found: Found) -> float | None:
    name = found.deepest()
    return found.growth("backlog", name, "backlog 1,000") if name else None


TARGETS = (
    Target(
        "drain, per-task ack, Subscription",
        "x floor",
        "≥",
        0.5,
        lambda f: f.ratio(SUBSCRIPTION, "drain", BASE),
    ),
    Target(
        "drain, per-task ack, Subscription",
        "x best peer",
        "≥",
        5,
        lambda f: f.cell(SUBSCRIPTION, "drain", "to_best_peer"),
    ),
    Target(
        "drain, one coroutine call per task",
        "x best peer",
        "≥",
        3,
        lambda f: f.cell(HANDLER, "drain", "to_best_peer"),
    ),
    Target(
        "drain, batch handler",
        "x faststream-batch",
        "≥",
        1,
        lambda f: f.ratio(BATCHES, "drain", "faststream-batch"),
    ),
    Target(
        "bulk publish",
        "x best peer",
        "≥",
        2.5,
        lambda f: f.cell(SUBSCRIPTION, "bulk", "to_best_peer"),
    ),
    Target(
        "publish one by one", "x floor", "≥", 0.85, lambda f: f.ratio(SUBSCRIPTION, "publish", BASE)
    ),
    Target("latency at 200/s, p50", "x floor", "≤", 2, lambda f: f.ratio(HANDLER, "p50", BASE)),
    Target("latency at 200/s, p99", "ms", "≤", 2, lambda f: f.cell(HANDLER, "p99")),
    Target(
        "round trips per task, busy",
        "Subscription",
        "≤",
        0.05,
        lambda f: f.cell(SUBSCRIPTION, "round trips"),
    ),
    Target(
        "round trips per task, busy",
        "one coroutine call per task",
        "≤",
        0.05,
        lambda f: f.cell(HANDLER, "round trips"),
    ),
    Target("Redis memory per queued task", "x floor", "≤", 2, _queued),
    Target("memory once dedupe_window has passed", "x before", "≤", 1.1, _forgotten),
    Target(
        "cost per task, 1,000 keys subscribed, 10 with work",
        "x 1 key",
        "≤",
        1.3,
        lambda f: f.growth("keys", "1,000 keys, 10 with work", scaling.BASE),
    ),
    Target(
        "cost per task, 100 keys with one task each",
        "x 1 key",
        "≤",
        3,
        lambda f: f.growth("keys", "100 keys, one task each", scaling.BASE),
    ),
    Target(
        "drain with max_inflight, rate_limit and capacity",
        "x no limits",
        "≥",
        0.7,
        lambda f: f.growth("limits", scaling.UNLIMITED, list(scaling.LIMITS)[-1]),
    ),
    Target(
        "drain with max_inflight, rate_limit and fair order over 100 tenants and 3 priorities",
        "x no limits",
        "≥",
        0.7,
        lambda f: f.growth("limits", scaling.MIXED, list(scaling.ORDERS)[-1]),
    ),
    Target("cost per task, deepest backlog", "x backlog 1,000", "≤", 1.2, _backlog),
)


def _off(ratios: Sequence[float]) -> float:
    return median(abs(ratio - 1) for ratio in ratios)


def _near(ratios: Sequence[float]) -> float:
    return sum(abs(ratio - 1) <= 0.2 for ratio in ratios) / len(ratios)


_VIRTUAL = "capacity, virtual time: observed p95 wait, x expected"
PIPELINE = (
    Goal(
        "journal read per core: our reader, x plain loop",
        "journal read per core",
        "x plain hiredis and Arrow",
        "≥",
        0.8,
    ),
    Goal(
        "publish, the sink, x plain script",
        "publish through the sink",
        "x plain chunked script",
        "≥",
        0.7,
    ),
    Goal(
        "audit of 1,000,000 events, just after the start of the session, s",
        "audit of 1,000,000 events, cold",
        "s",
        "≤",
        10,
    ),
    Goal(
        "audit, cost per event of ten times as many events, x",
        "audit, 10 x the events",
        "x cost per event",
        "≤",
        1.2,
    ),
    Goal(
        "Redis's longest command during a backfill, ms",
        "Redis blocked by a backfill",
        "ms",
        "≤",
        5,
        max,
    ),
    Goal("micro-batch of 100 transitions, ms", "micro-batch of 100", "ms", "≤", 700),
    Goal(
        "share of the throughput that the journal takes",
        "cost of the journal",
        "share of publish and drain",
        "≤",
        0.15,
    ),
    Goal(_VIRTUAL, "capacity advice, applied", "p95 wait off by, median", "≤", 0.2, _off),
    Goal(_VIRTUAL, "capacity advice, applied", "share of loads within 20 %", "≥", 0.8, _near),
    *(
        Goal(
            f"capacity, real time, {name}: observed p95 wait, x expected",
            f"capacity advice, applied on {name}",
            "p95 wait off by, median",
            "≤",
            0.2,
            _off,
        )
        for name in ("memory", "Redis")
    ),
)
"""targets of the pipeline"""

SOCKET = (
    *(
        Goal(
            f"socket: one worker, credit 100: {name}, x bare socket",
            f"tasks through one socket, {name}",
            "x bare uvicorn and websockets",
            "≥",
            0.5,
        )
        for name in ("memory", "Redis")
    ),
    Goal(
        "socket: publish to handler at 200/s, p99 ms",
        "latency through server and worker at 200/s, p99",
        "ms",
        "≤",
        5,
    ),
)
"""targets of the socket"""
_BACKLOG = "dispatch: 8 slots, jobs of 20 to 200 ms: Redis"
DISPATCH = (
    Goal(
        f"{_BACKLOG}, slot utilisation",
        "slots at a full backlog, Redis",
        "share of their time",
        "≥",
        0.97,
    ),
    Goal(
        f"{_BACKLOG}, slot free to next POST, p50 ms",
        "from a free slot to the next POST, Redis, p50",
        "ms",
        "≤",
        3,
    ),
)
"""targets of the dispatcher"""
AREAS = {"socket": ("the socket", SOCKET), "dispatch": ("the dispatcher", DISPATCH)}
"""title and targets of each area, by its name"""
