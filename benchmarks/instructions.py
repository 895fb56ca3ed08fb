"""Count the instructions per task of two commits: python benchmarks/instructions.py --against BEFORE [--area memory].

The load of the machine does not change these numbers, but changes the rates that `compare.py` measures. Valgrind, which
must be installed, counts the instructions of every Python process of a workload, with few and with many tasks; the
difference is the cost of the tasks without that of the start. The Redis server is not counted.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from compare import AREAS, HERE, ROOT, checked_out
from processes import RedisServer

SIZES = {"memory": 4_000, "redis": 800, "server, memory": 1_000, "server, redis": 1_000}
"""numbers of tasks of the small run of each area; the large run has three times as many"""
VALGRIND = ("valgrind", "-q", "--trace-children=yes", "--tool=cachegrind", "--cache-sim=no")
_COMMAND = re.compile(r"^cmd: .*?(?:taskqueue_cli (\w+)|workloads)", re.MULTILINE)
_TOTAL = re.compile(r"^summary: (\d+)", re.MULTILINE)


def main(arguments: Sequence[str]) -> int:
    """Count, and print a row per process of each area."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", required=True, metavar="BEFORE", help="commit to compare with")
    parser.add_argument("--area", choices=AREAS, action="append", help="default: all")
    options = parser.parse_args(arguments)
    with checked_out(options.against) as before:
        for area in options.area or AREAS:
            earlier, after = _per_task(area, before), _per_task(area, ROOT)
            for name, number in after.items():
                ratio = number / earlier[name]
                print(
                    f"{area}: {name:<8} {earlier[name]:>10,.0f} {number:>10,.0f}  ratio {ratio:.3f}"
                )
    return 0


def _per_task(area: str, tree: Path) -> dict[str, float]:
    """Return the instructions per task of each process."""
    size = SIZES[area]
    few, many = _count(area, tree, size), _count(area, tree, 3 * size)
    return {name: (many[name] - few[name]) / (2 * size) for name in few}


def _count(area: str, tree: Path, tasks: int) -> dict[str, int]:
    """Run the workloads of an area with the packages of a source tree; return the instructions of each process."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="taskqueue-count-")))
        variables = {**os.environ, "PYTHONPATH": str(tree / "src"), "PYTHONHASHSEED": "0"}
        variables["BENCHMARK_PAUSE"] = (
            "10"  # valgrind is slow; more questions would cost more than the tasks
        )
        if "redis" in area:
            variables["TASKQUEUE_REDIS_URL"] = stack.enter_context(RedisServer()).url
        words = [sys.executable, str(HERE / "workloads.py"), area, str(tasks)]
        counting = (*VALGRIND, f"--cachegrind-out-file={folder}/%p")
        quiet = (
            subprocess.DEVNULL
        )  # the figures of this slow run mean nothing, and valgrind warns of its caches
        subprocess.run(
            [*counting, *words], env=variables, input=b"\n", stdout=quiet, stderr=quiet, check=True
        )
        totals: dict[str, int] = {}
        for each in folder.iterdir():
            text = each.read_text(errors="replace")
            command, total = _COMMAND.search(text), _TOTAL.search(text)
            if command and total:
                name = command[1] or "client"
                totals[name] = totals.get(name, 0) + int(total[1])
        return totals


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
