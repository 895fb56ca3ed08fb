"""Run the benchmarks in one run and print medians. Usage: ``python3 dev.py bench [options]``.

Without options, it measures the memory backend in one process, tasks over a WebSocket, the dispatcher, and the Redis
backend in comparison with other libraries and with minimal queues. Longer measurements need an option: ``--area spark``
for the pipeline on Spark, ``--area prefect`` for Prefect servers. Every round runs every measurement once, so that a
slow minute of the machine affects all of them. A row is invalid, and fails the run, if not every published task was
handled. The figures are written to ``benchmarks/results/`` as a JSON file, from which ``benchmarks/report.py`` updates
the pages. ``--against COMMIT`` instead compares the speed of the working tree with the speed of a commit: see
``--against COMMIT --help``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import secrets
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # for parts of the tests
sys.path.insert(0, str(Path(__file__).parent))

import catalog
import compare
import dispatching
import figures as of_figures
import in_process
import over_socket
import prefect_area
import prefect_figures
import render
import side_by_side
import spark_area
import targets

_ROUND = 100
"""figures of at least this size are shown without decimals"""
RESULTS = Path(__file__).parent / "results"

Measurement = Callable[[], Coroutine[Any, Any, dict[str, float]]]
AREAS: dict[str, tuple[Measurement, ...]] = {
    "memory": in_process.MEASUREMENTS,
    "socket": over_socket.MEASUREMENTS,
    "dispatch": dispatching.MEASUREMENTS,
}
REDIS = "redis"
SPARK = "spark"
PREFECT = "prefect"


def main() -> int:
    """Run the chosen areas, or compare two versions; return the exit code."""
    if any(word.startswith("--against") for word in sys.argv[1:]):
        return compare.main(sys.argv[1:])
    options = _options()
    areas = [REDIS] if options.redis or options.peers or options.entries else options.area
    areas = areas or [*AREAS, REDIS]
    start = time.time()
    figures: dict[str, list[float]] = {}
    for number in range(options.rounds or (1 if options.quick else 5)):
        for area in AREAS:
            if area in areas:
                print(f"round {number + 1}: {area}", file=sys.stderr)
                _measure(area, figures)
    report = _about(start)
    report["figures"] = {n: {"median": median(v), "values": v} for n, v in figures.items()}
    if figures:
        _print(figures)
        for what, goals in targets.AREAS.values():
            reach, _ = of_figures.tables(report["figures"], goals, what)
            print(render.text([reach] if reach[2] else [], []))
    invalid = False
    if REDIS in areas:
        found = report["side_by_side"] = _side_by_side(options)
        print(render.plain(found))
        invalid = any(turn["invalid"] for turn in found["turns"])
    if SPARK in areas:
        invalid = _pipeline(options, report) or invalid
    if PREFECT in areas:
        invalid = _servers(options, report) or invalid
    _save(report)
    return 1 if invalid else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--area", choices=[*sorted(AREAS), REDIS, SPARK, PREFECT], action="append")
    parser.add_argument(
        "--redis", action="store_true", help="measure only ours on Redis, and the floors"
    )
    parser.add_argument(
        "--peers", action="store_true", help="measure only ours on Redis, floors and peers"
    )
    parser.add_argument("--entries", help="names of the entries to measure, separated by commas")
    parser.add_argument("--rounds", type=int, help="number of rounds, in place of the plan's")
    parser.add_argument("--seed", type=int, help="random seed of the order in each round")
    parser.add_argument(
        "--aof", action="store_true", help="use an append-only file with fsync every second"
    )
    parser.add_argument(
        "--attempt",
        type=Path,
        action="append",
        help="tree of Prefect's source to measure as well, with --area prefect",
    )
    parser.add_argument(
        "--only",
        choices=sorted(one.__name__ for one in prefect_area.MEASUREMENTS),
        action="append",
        help="measurement to make, with --area prefect",
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="one round of a second per entry")
    size.add_argument("--full", action="store_true", help="seven long rounds, backlog of 1,000,000")
    return parser.parse_args()


def _measure(area: str, figures: dict[str, list[float]]) -> None:
    for measure in AREAS[area]:
        for name, value in asyncio.run(measure()).items():
            figures.setdefault(f"{area}: {name}", []).append(value)


def _side_by_side(options: argparse.Namespace) -> dict[str, Any]:
    plan = side_by_side.FULL if options.full else side_by_side.USUAL
    plan = side_by_side.QUICK if options.quick else plan
    names = [name.strip() for name in options.entries.split(",")] if options.entries else None
    if unknown := set(names or ()) - {entry.name for entry in catalog.ALL}:
        raise SystemExit(
            f"no entry {sorted(unknown)}; there are: {', '.join(e.name for e in catalog.ALL)}"
        )
    entries = side_by_side.chosen(names, peers=options.peers or not options.redis)
    seed = secrets.randbelow(1 << 31) if options.seed is None else options.seed
    print(f"seed {seed}", file=sys.stderr)
    return side_by_side.measure(
        entries, plan, seed=seed, rounds=options.rounds, durable=options.aof
    )


def _pipeline(options: argparse.Namespace, report: dict[str, Any]) -> bool:
    """Measure the pipeline and add the figures to a report; return whether any figure was invalid."""
    size = "full" if options.full else "quick" if options.quick else "usual"
    found = report["pipeline"] = spark_area.measure(size, rounds=options.rounds)
    print(render.text(spark_area.tables(found), spark_area.notes(found)))
    return bool(found["invalid"])


def _servers(options: argparse.Namespace, report: dict[str, Any]) -> bool:
    """Measure the Prefect servers and add the figures to a report; return whether any figure was invalid."""
    if (why := prefect_area.absent()) is not None:
        print(f"prefect is left out: {why}", file=sys.stderr)
        return False
    trees = [tree.absolute() for tree in options.attempt or ()]
    found = report["prefect"] = prefect_area.measure(
        rounds=options.rounds or 1, trees=trees, only=options.only or ()
    )
    print(render.text(prefect_figures.tables(found["figures"]), prefect_figures.notes(found)))
    return bool(found["invalid"])


def _print(figures: dict[str, list[float]]) -> None:
    width = max(map(len, figures))
    print(f"{'figure':<{width}}  {'median':>12}  {'min':>12}  {'max':>12}")
    for name, values in figures.items():
        shown = (median(values), min(values), max(values))
        row = "  ".join(f"{x:>12,.0f}" if x >= _ROUND else f"{x:>12.3g}" for x in shown)
        print(f"{name:<{width}}  {row}")


def _about(start: float) -> dict[str, Any]:
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(start)),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((x.partition(":")[2].strip() for x in lines if x.startswith("model name")), "")


def _save(report: dict[str, Any]) -> None:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"saved {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")


if __name__ == "__main__":
    sys.exit(main())
