"""The summary of a run: medians over undisturbed measurements, ranges, and ratios.

A measurement is undisturbed ("quiet") if other processes used at most `meter.QUIET` cores during it, whatever its
result. A median is computed from the undisturbed measurements if there are at least two of them, or if the only
measurement is undisturbed. Otherwise it is computed from all measurements and marked as contended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import catalog
from meter import QUIET

BASE = "floor-p100"
Window = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure that is measured for all entries."""

    name: str
    window: str
    value: Callable[[Window], float | None]
    unit: str
    more_is_better: bool = False


def _rate(window: Window) -> float | None:
    return window["tasks"] / window["seconds"] if window.get("seconds") else None


def _of(name: str, times: float = 1.0) -> Callable[[Window], float | None]:
    return lambda window: None if window.get(name) is None else times * window[name]


def _per_thousand(name: str) -> Callable[[Window], float | None]:
    return lambda window: 1000 * window[name] / window["tasks"]


FIGURES = (
    Figure(name="publish", window="single", value=_rate, unit="/s", more_is_better=True),
    Figure(name="bulk", window="bulk", value=_rate, unit="/s", more_is_better=True),
    Figure(name="drain", window="drain", value=_rate, unit="/s", more_is_better=True),
    Figure(name="p50", window="latency", value=_of("p50", 1e3), unit="ms"),
    Figure(name="p99", window="latency", value=_of("p99", 1e3), unit="ms"),
    Figure(name="commands", window="drain", value=_of("commands"), unit="/task"),
    Figure(name="round trips", window="drain", value=_of("reads"), unit="/task"),
    Figure(name="bytes in", window="drain", value=_of("bytes_in"), unit="B/task"),
    Figure(name="bytes out", window="drain", value=_of("bytes_out"), unit="B/task"),
    Figure(name="client CPU", window="drain", value=_per_thousand("cpu"), unit="s/1k"),
    Figure(name="Redis CPU", window="drain", value=_per_thousand("redis_cpu"), unit="s/1k"),
    Figure(name="publish commands", window="single", value=_of("commands"), unit="/task"),
    Figure(name="publish trips", window="single", value=_of("reads"), unit="/task"),
    Figure(name="publish CPU", window="single", value=_per_thousand("cpu"), unit="s/1k"),
    Figure(name="bulk trips", window="bulk", value=_of("reads"), unit="/task"),
    Figure(name="bulk CPU", window="bulk", value=_per_thousand("cpu"), unit="s/1k"),
    Figure(name="queued", window="memory", value=_of("queued", 0.1), unit="MB/100k"),
    Figure(name="drained", window="memory", value=_of("drained", 0.1), unit="MB/100k"),
)


@dataclass(kw_only=True)
class Cell:
    """The values of one figure for one entry."""

    entry: str
    figure: str
    unit: str
    value: float
    low: float
    high: float
    windows: int
    contended: bool
    to_floor: float | None = None
    to_best_peer: float | None = None
    peer_contended: bool = False
    """whether the figure of the best other library comes from contended measurements"""


def quiet(windows: Iterable[Window]) -> tuple[list[Window], bool]:
    """Return the measurements to use, and whether they are contended."""
    everything = list(windows)
    good = [window for window in everything if window.get("foreign", 0.0) <= QUIET]
    enough = len(good) >= min(2, len(everything))
    return (good, False) if enough else (everything, True)


def summarize(turns: Iterable[dict[str, Any]]) -> list[Cell]:
    """Return all cells of a run, with their ratios. Invalid turns contribute no cells."""
    windows: dict[tuple[str, str], list[Window]] = {}
    for turn in turns:
        for name, window in turn["windows"].items():
            windows.setdefault((turn["entry"], name), []).append(window)
    cells = [
        cell
        for (entry, name), every in windows.items()
        for figure in FIGURES
        if figure.window == name and (cell := _cell(entry, figure, every))
    ]
    _relate(cells)
    return cells


def _cell(entry: str, figure: Figure, windows: list[Window]) -> Cell | None:
    counted, contended = quiet(windows)
    values = [value for window in counted if (value := figure.value(window)) is not None]
    if not values:
        return None
    return Cell(
        entry=entry,
        figure=figure.name,
        unit=figure.unit,
        value=median(values),
        low=min(values),
        high=max(values),
        windows=len(values),
        contended=contended,
    )


def _relate(cells: list[Cell]) -> None:
    table = {(cell.entry, cell.figure): cell for cell in cells}
    for cell in cells:
        floor = table.get((BASE, cell.figure))
        best = best_peer(table, cell.entry, cell.figure)
        cell.to_floor = cell.value / floor.value if floor and floor.value else None
        cell.peer_contended = best is not None and best.contended
        cell.to_best_peer = cell.value / best.value if best and best.value else None


def best_peer(table: dict[tuple[str, str], Cell], entry: str, figure: str) -> Cell | None:
    """Return the best figure among the libraries that give the same delivery guarantee and work in the same way.

    For publishing, all libraries are compared. Otherwise an entry with one call per batch is compared with libraries
    that do the same, and any other entry with libraries that make one call per task.
    """
    about = {one.name: one for one in catalog.ALL}
    group = "batch" if "batch" in about[entry].compare else "handler"
    publishing = figure.startswith(("publish", "bulk"))
    rivals = [
        table[peer.name, figure]
        for peer in catalog.PEERS
        if (peer.name, figure) in table
        and peer.promise == catalog.AT_LEAST_ONCE
        and (publishing or group in peer.compare)
    ]
    if not rivals:
        return None
    more = next(one.more_is_better for one in FIGURES if one.name == figure)
    return (max if more else min)(rivals, key=lambda cell: cell.value)


def rows(cells: Iterable[Cell]) -> list[dict[str, Any]]:
    """Return the cells in the format of the result file."""
    return [asdict(cell) for cell in cells]


def shown(value: float | None) -> str:
    """Format a number with three significant digits."""
    if value is None:
        return "-"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 0.001 or value == 0 else f"{value:.4f}"
