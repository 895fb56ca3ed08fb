"""The figures of Prefect servers: their names, targets and tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

import figures
from tables import shown
from targets import Goal

Table = tuple[str, list[str], list[list[str]]]
Figures = Mapping[str, Mapping[str, Any]]

OURS, STOCK = "ours", "stock"
DOCKET = "docket alone"
DELAYED, AT_ONE_OF_MANY, WAITING, LONG = 200, 60, 50, 8
"""numbers of runs in the measurements"""
LEASE = 5
"""lease of deliveries in seconds"""
PATIENCE = 20.0
"""seconds after which a run counts as lost"""

ACROSS = f"{DELAYED} delayed at one of two replicas, worker at the other: completed"
MANY = f"{AT_ONE_OF_MANY} delayed at `--no-services --workers 3`: share completed"
RESTART = f"restart with {WAITING} waiting: completed"
KILL = f"kill -9 of one of two replicas with {WAITING} waiting: completed"
KILL_TWICE = f"kill -9 of one of two replicas with {WAITING} waiting: executed more than once"
BUSY = f"{LONG} runs of 8 s, two workers of one each, lease {LEASE} s: executions"
BURIED = f"{LONG} runs of 8 s, two workers of one each, lease {LEASE} s: dead letters"
SCHEDULED = "`scheduled_time` in 8 s: sent after, s"
RETRIED = "`AwaitingRetry` in 3 s, after the ack: sent after, s"
FULL = "create beyond a queue size of 5: answered after, s"
STATUS = "create beyond a queue size of 5: status"
QUIT = "`quit` instead of an ack: sent again"
GARBAGE = "no JSON instead of an ack: sent again"
IDLE = "300 idle subscribers of 5 keys: CPU of the server, % of a core"
IDLE_REDIS = "300 idle subscribers of 5 keys: CPU of Redis, % of a core"
P50 = "from POST to the worker, p50 ms"
P99 = "from POST to the worker, p99 ms"
CREATES = "creates by 8 clients, runs/s"
DRAIN = "1000 waiting, 40 workers at one replica: runs/s"

ALL = (
    ACROSS,
    MANY,
    RESTART,
    KILL,
    KILL_TWICE,
    BUSY,
    BURIED,
    SCHEDULED,
    RETRIED,
    FULL,
    STATUS,
    QUIT,
    GARBAGE,
    IDLE,
    IDLE_REDIS,
    P50,
    P99,
    CREATES,
    DRAIN,
)
"""all figures, in the order in which the page shows them"""
BOUNDS = {SCHEDULED: PATIENCE, RETRIED: PATIENCE, FULL: 5.0}
"""timeout of a measurement in seconds; this value means that nothing was delivered in time"""
_YES = (QUIT, GARBAGE)


def name(figure: str, whose: str) -> str:
    """Return the name of a figure for one kind of server."""
    return f"prefect: {figure}: {whose}"


def _all(figure: str, bound: float, taken: Any = min) -> Goal:
    what, _, measure = figure.rpartition(": ")
    return Goal(name(figure, OURS), what, measure, "≥", bound, taken)


def _most(figure: str, bound: float, taken: Any = max) -> Goal:
    what, _, measure = figure.rpartition(": ")
    return Goal(name(figure, OURS), what, measure, "≤", bound, taken)


GOALS = (
    _all(ACROSS, DELAYED),
    _all(MANY, 1),
    _all(RESTART, WAITING),
    _all(KILL, WAITING),
    _most(KILL_TWICE, 0),
    _all(BUSY, LONG),
    _most(BUSY, LONG),
    _most(BURIED, 0),
    _all(SCHEDULED, 8),
    _most(SCHEDULED, 9),
    _all(RETRIED, 3),
    _most(RETRIED, 4),
    _most(FULL, 1),
    _all(QUIT, 1),
    _all(GARBAGE, 1),
    _most(IDLE, 2, median),
    _all(DRAIN, 1000, median),
)
"""targets for servers with the queue of this project; each round must meet them, for CPU only the median"""


def tables(found: Figures) -> list[Table]:
    """Return two tables, each as a title, a header and rows: the targets, and all figures side by side."""
    whose = list(dict.fromkeys(one.rpartition(": ")[2] for one in found))
    whose.sort(key=lambda one: [OURS, STOCK, one].index(one))
    rows = [
        [figure, *(_cell(figure, found.get(name(figure, one))) for one in whose)]
        for figure in ALL
        if any(name(figure, one) in found for one in whose)
    ]
    reach, _ = figures.tables(found, GOALS, "servers of Prefect")
    return [reach, ("Side by side", ["", *whose], rows)]


def _cell(figure: str, found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "-"
    values = found["values"]
    said = [_said(figure, value) for value in (median(values), min(values), max(values))]
    spread = "" if said[1] == said[2] else f" ({said[1]} to {said[2]})"
    return said[0] + spread


def _said(figure: str, value: float) -> str:
    if figure in BOUNDS and value >= BOUNDS[figure]:
        return f"not within {BOUNDS[figure]:g}"
    if figure in _YES:
        return "yes" if value else "no"
    return "no answer" if figure == STATUS and not value else shown(value)


def notes(run: Mapping[str, Any]) -> list[str]:
    """Return the notes on the tables."""
    versions = ", ".join(f"{what} {version}" for what, version in run["versions"].items())
    said = [f"{versions}; {run['rounds']} rounds; {run['seconds']:.0f} s in all"]
    ours, stock = (run["figures"].get(name(DRAIN, one)) for one in (OURS, STOCK))
    if ours and stock and len(ours["values"]) == len(stock["values"]):
        shares = sorted(
            one / other for one, other in zip(ours["values"], stock["values"], strict=True)
        )
        said.append(
            f"{DRAIN}, share of stock in each round: {median(shares):.2f} ({shares[0]:.2f} to {shares[-1]:.2f})"
        )
    return said + [f"INVALID: {what}: {why}" for what, why in run["invalid"].items()]


def medians(values: Mapping[str, Iterable[float]]) -> dict[str, dict[str, Any]]:
    """Return the figures with their medians, in the format of a result file."""
    return {one: {"median": median(each), "values": list(each)} for one, each in values.items()}
