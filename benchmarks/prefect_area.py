"""Prefect servers with the queue of this project, compared in the same run with servers that have Prefect's own queue.

Every round starts all processes again. Measurements that count runs use both kinds of servers at the same time;
measurements of time or CPU use one kind after the other. Earlier solutions are measured last.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import prefect_backlog
import prefect_busy
import prefect_delivery
import prefect_figures as figures
import prefect_speed
import pytest
from prefect_sides import BOTH, Side, attempts, sides, versions

from tests.prefect.environment import python_with_prefect

Measurement = Callable[[Side], dict[str, float]]
Turn = tuple[str, str, Callable[[], dict[str, float]]]
_AT_ONCE: tuple[Measurement, ...] = (
    prefect_backlog.across,
    prefect_backlog.restart,
    prefect_backlog.kill,
    prefect_busy.busy,
    prefect_delivery.due,
    prefect_delivery.again,
    prefect_delivery.full,
    prefect_backlog.many,
)
_ALONE: tuple[Measurement, ...] = (
    prefect_speed.idle,
    prefect_speed.speed,
    prefect_speed.drain,
)
_OF_ATTEMPTS = (prefect_busy.busy, prefect_delivery.due)
"""the measurements that are made for earlier solutions"""
MEASUREMENTS = (*_ALONE, *_AT_ONCE)


def absent() -> str | None:
    """Return the reason why this machine cannot run the measurements, or None if it can."""
    try:
        python_with_prefect()
    except pytest.skip.Exception as why:
        return str(why)
    return None


def measure(*, rounds: int, trees: Sequence[Path] = (), only: Sequence[str] = ()) -> dict[str, Any]:
    """Return the figures by name, each with its values in all rounds, and the errors.

    ``trees`` are folders of Prefect's source code with earlier solutions. ``only`` are the names of measurements.
    """
    python = python_with_prefect()
    chosen = [one for one in MEASUREMENTS if not only or one.__name__ in only]
    start = time.monotonic()
    values: dict[str, list[float]] = {}
    invalid: dict[str, str] = {}
    for number in range(1, rounds + 1):
        for kinds in (BOTH, *([attempts(trees)] if trees else [])):
            asked = [one for one in chosen if kinds is BOTH or one in _OF_ATTEMPTS]
            try:
                with sides(python, kinds) as found:
                    for one in asked:
                        name = f"round {number}: prefect, {one.__name__}"
                        print(name, file=sys.stderr, flush=True)
                        _take(_turns(one, found), values, invalid, at_once=one in _AT_ONCE)
            except Exception as error:  # noqa: BLE001 - as below
                invalid[", ".join(kinds)] = _said(error)
    return {
        "rounds": rounds,
        "seconds": time.monotonic() - start,
        "versions": versions(python),
        "figures": figures.medians(values),
        "invalid": invalid,
    }


def _turns(measurement: Measurement, found: Sequence[Side]) -> list[Turn]:
    name = measurement.__name__
    turns: list[Turn] = [(name, side.name, partial(measurement, side)) for side in found]
    if measurement is prefect_busy.busy and found[0].name in BOTH:
        turns.append((name, figures.DOCKET, prefect_busy.on_docket))
    return turns


def _take(
    turns: Sequence[Turn],
    values: dict[str, list[float]],
    invalid: dict[str, str],
    *,
    at_once: bool,
) -> None:
    with ThreadPoolExecutor(len(turns) if at_once else 1) as pool:
        for turn, found in zip(turns, pool.map(_taken, turns), strict=True):
            what, whose, _ = turn
            if isinstance(found, str):
                invalid[f"{what}, {whose}"] = found
                continue
            for figure, value in found.items():
                values.setdefault(figures.name(figure, whose), []).append(value)


def _taken(turn: Turn) -> dict[str, float] | str:
    what, whose, measurement = turn
    try:
        return measurement()
    except Exception as error:  # noqa: BLE001 - a failure must not affect the other measurements
        said = _said(error)
        print(f"INVALID {what}, {whose}: {said}", file=sys.stderr, flush=True)
        return said


def _said(error: Exception) -> str:
    traceback.print_exception(error)
    return (str(error).strip() or repr(error)).splitlines()[-1]
