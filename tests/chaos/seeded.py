"""One seeded chaos run: the seed decides its faults and its kind; its result is small enough to keep."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from taskqueue_core.capabilities import Order
from taskqueue_core.rate_limit import RateLimit
from tests.chaos.checker import Figures
from tests.chaos.dispatching import Dispatching
from tests.chaos.edges import Edges
from tests.chaos.flowing import Flowing
from tests.chaos.nemesis import WORKFLOWS, Fault, describe, schedule
from tests.chaos.replicas import Replicas
from tests.chaos.world import Shape, World

MIX = (
    "mixed",
    "mixed",
    "mixed",
    "processes",
    "redis",
    "limits",
    "links",
    "servers",
    "order",
    "secrets",
    "edges",
    "dispatch",
)
"""menus of faults, used in turn for consecutive seeds"""
_SECONDS = 1.8
_COUNT = 10
_OVER_HTTP = 1500
"""maximum number of tasks of a run with servers"""
_NUMBERS = {
    "consumer": 2,
    "producer": 2,
    "server": 2,
    "worker": 3,
    "queue": 3,
    "dispatcher": 2,
    "gpu": 3,
}
_FLOWING = {"server": 3, "planner": 2, "queue": 4, "child": 3}
_FLOWING_SECONDS, _FLOWING_COUNT = 4.0, 6
_LIMITS: Mapping[str, Mapping[str, Any]] = {
    "alpha": {"max_inflight": 10},
    "beta": {"rate_limit": RateLimit(max_tokens=300)},
    "gamma": {"capacity": 100, "max_inflight": 15, "rate_limit": RateLimit(max_tokens=400)},
}
"""limits for runs with the menu ``limits``; low enough to hold up the tasks of such a run"""
_ORDERED: Mapping[str, Any] = {
    "entities": 40,
    "tenants": 5,
    "priorities": (2, 5, 5, 8),
    "hanging": ("gamma",),
    "limits": {
        "alpha": {"order": Order.FAIR, "weights": {"t1": 3}, "max_inflight": 20},
        "beta": {"floor_share": 0.2, "max_inflight": 20},
        "gamma": {
            "order": Order.FAIR,
            "tenant_max_inflight": 6,
            "tenant_rate_limit": RateLimit(max_tokens=150),
            "floor_share": 0.1,
            "max_processing_time": 1.0,
        },
    },
}
"""changes to the shape of runs with the menu ``order``"""


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """What is needed to repeat a run."""

    seed: int
    menu: str
    faults: tuple[Fault, ...]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run."""

    scenario: Scenario
    figures: Figures = Figures()
    violations: tuple[str, ...] = ()
    rules: dict[str, int] = {}
    folder: str = ""
    """folder with the logs of a failed run; empty if the run passed"""
    wall: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether no rule was broken."""
        return not self.violations

    def __str__(self) -> str:
        """Return the schedule, the violations and the folder of the logs."""
        head = describe(self.scenario.seed, self.scenario.menu, self.scenario.faults)
        return "\n".join([head, *self.violations, f"logs: {self.folder}" if self.folder else ""])


def scenario(seed: int, menu: str | None = None) -> Scenario:
    """Return the scenario of a seed; by default, the seed also decides the menu."""
    menu = menu or MIX[seed % len(MIX)]
    if menu in WORKFLOWS:
        numbers = _NUMBERS | _FLOWING
        faults = schedule(
            seed, menu, seconds=_FLOWING_SECONDS, count=_FLOWING_COUNT, numbers=numbers
        )
        return Scenario(seed=seed, menu=menu, faults=faults)
    longer = 1.5 if menu == "dispatch" else 1
    faults = schedule(
        seed, menu, seconds=longer * _SECONDS, count=round(longer * _COUNT), numbers=_NUMBERS
    )
    return Scenario(seed=seed, menu=menu, faults=faults)


def carry_out(told: Scenario, shape: Shape | None = None) -> Report:
    """Execute a scenario. The logs of a failed run stay in a temporary folder."""
    folder = Path(tempfile.mkdtemp(prefix=f"taskqueue-chaos-{told.seed}-"))
    report = asyncio.run(_carry_out(told, shape, folder))
    if report.ok:
        shutil.rmtree(folder, ignore_errors=True)
    return report


async def _carry_out(told: Scenario, shape: Shape | None, folder: Path) -> Report:
    kind: Callable[..., World] = World
    shape = shape or Shape()
    if told.menu == "servers":
        kind, shape = Replicas, msgspec.structs.replace(shape, tasks=min(shape.tasks, _OVER_HTTP))
    if told.menu == "edges":
        kind = Edges
    if told.menu == "dispatch":
        kind = Dispatching
    if told.menu in WORKFLOWS:
        kind = partial(Flowing, menu=told.menu)
    if told.menu == "limits":
        shape = msgspec.structs.replace(shape, limits=_LIMITS)
    if told.menu == "order":
        shape = msgspec.structs.replace(shape, **_ORDERED)
    try:
        async with kind(folder / "run", shape, seed=told.seed) as world:
            outcome = await world.run(told.faults)
    except Exception as error:  # noqa: BLE001 - a run that breaks off counts as failed, and the next one follows
        text = f"the run broke off: {type(error).__name__}: {error}"
        return Report(scenario=told, violations=(text,), rules={"broke off": 1}, folder=str(folder))
    verdict = outcome.verdict
    rules: dict[str, int] = {}
    for one in verdict.violations:
        rules[one.rule] = rules.get(one.rule, 0) + 1
    return Report(
        scenario=told,
        figures=verdict.figures,
        violations=tuple(map(str, verdict.violations[:20])),
        rules=rules,
        folder="" if verdict.ok else str(folder),
        wall=outcome.wall,
    )
