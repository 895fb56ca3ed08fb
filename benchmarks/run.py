"""Measure, side by side in one run, and print medians. Usage: ``python3 dev.py bench [--rounds N] [--area NAME]``.

Every round runs every measurement once, in turn, so that a slow minute of the machine hits all of
them. A row whose tasks handled are not the tasks published is invalid and fails the run. The figures
go to ``benchmarks/results/`` as one JSON file.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent))

import in_process
import over_socket

_ROUND = 100
"""figures from here on are shown without decimals"""
RESULTS = Path(__file__).parent / "results"

Measurement = Callable[[], Awaitable[dict[str, float]]]
AREAS: dict[str, tuple[Measurement, ...]] = {
    "memory": in_process.MEASUREMENTS,
    "socket": over_socket.MEASUREMENTS,
}


def main() -> int:
    """Run the chosen areas; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--area", choices=sorted(AREAS), action="append")
    options = parser.parse_args()
    figures: dict[str, list[float]] = {}
    for number in range(options.rounds):
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
        for area in options.area or AREAS:
            for measure in AREAS[area]:
                for name, value in asyncio.run(measure()).items():
                    figures.setdefault(f"{area}: {name}", []).append(value)
    _print(figures)
    _save(figures)
    return 0


def _print(figures: dict[str, list[float]]) -> None:
    width = max(map(len, figures))
    print(f"{'figure':<{width}}  {'median':>12}  {'min':>12}  {'max':>12}")
    for name, values in figures.items():
        shown = (median(values), min(values), max(values))
        row = "  ".join(f"{x:>12,.0f}" if x >= _ROUND else f"{x:>12.3g}" for x in shown)
        print(f"{name:<{width}}  {row}")


def _save(figures: dict[str, list[float]]) -> None:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.json"
    report = {
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "figures": {name: {"median": median(v), "values": v} for name, v in figures.items()},
    }
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"saved {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")


if __name__ == "__main__":
    sys.exit(main())
