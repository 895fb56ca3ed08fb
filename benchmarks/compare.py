"""Compare the speed of two commits: python3 dev.py bench --against BEFORE [--pairs 20] [--area memory] [--floor 0.95].

The working tree is compared with the commit BEFORE. Each pair measures both versions, several times in alternating
order, so that a slow minute of the machine affects both, and takes the best of the runs of each version, because other
programs of the machine only make runs slower. The ratio of a row is the working tree's rate divided by the rate of
BEFORE, so it is above 1 if the working tree is faster. The confidence interval of 95 % comes from resampling the pairs.
The exit code is 1 if the lower end of a row's interval is below the floor.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import fmean, median

from processes import RedisServer

HERE = Path(__file__).parent
ROOT = HERE.parent
AREAS = ("memory", "redis", "server, memory", "server, redis")
RESAMPLES = 10_000


def main(arguments: Sequence[str]) -> int:
    """Measure the pairs, print a table, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="dev.py bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--against", required=True, metavar="BEFORE", help="commit to compare with")
    parser.add_argument("--pairs", type=int, default=20, help="number of interleaved pairs")
    parser.add_argument("--runs", type=int, default=2, help="number of runs per pair and version")
    parser.add_argument("--area", choices=AREAS, action="append", help="default: all")
    parser.add_argument(
        "--floor", type=float, default=0.95, help="smallest lower end of an interval"
    )
    options = parser.parse_args(arguments)
    with checked_out(options.against) as before:
        slow = [row for area in options.area or AREAS for row in _compare(area, before, options)]
    print("slower than allowed: " + "; ".join(slow) if slow else "no row is slower than allowed")
    return 1 if slow else 0


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """Yield a folder with the files of a commit."""
    with tempfile.TemporaryDirectory(prefix="taskqueue-compare-") as folder:
        before = Path(folder) / "before"
        _git("worktree", "add", "--detach", str(before), commit)
        try:
            yield before
        finally:
            _git("worktree", "remove", "--force", str(before))


def _compare(area: str, before: Path, options: argparse.Namespace) -> list[str]:
    """Measure one area, print its rows, and return the names of those below the floor."""
    rates: dict[str, list[tuple[float, float]]] = {}
    for number in range(options.pairs):
        print(f"{area}: pair {number + 1} of {options.pairs}", file=sys.stderr)
        order = [before, ROOT] if number % 2 else [ROOT, before]
        best: dict[Path, dict[str, float]] = {before: {}, ROOT: {}}
        for tree in order * options.runs:
            for name, rate in _measure(area, tree).items():
                best[tree][name] = max(rate, best[tree].get(name, 0.0))
        for name, rate in best[ROOT].items():
            rates.setdefault(name, []).append((best[before][name], rate))
    slow = []
    for name, row in rates.items():
        logs = [math.log(after / earlier) for earlier, after in row]
        low, high = _interval(logs)
        earlier, after = (median(values) for values in zip(*row, strict=True))
        print(
            f"{area}: {name:<48} {earlier:>10,.4g} {after:>10,.4g}"
            f"  ratio {math.exp(fmean(logs)):.3f} ({low:.3f} to {high:.3f})",
            flush=True,
        )
        if low < options.floor:
            slow.append(f"{area}: {name}")
    return slow


def _interval(logs: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the mean ratio, computed by bootstrapping."""
    chance = random.Random(1)
    means = sorted(fmean(chance.choices(logs, k=len(logs))) for _ in range(RESAMPLES))
    return math.exp(means[RESAMPLES // 40]), math.exp(means[-RESAMPLES // 40])


def _measure(area: str, tree: Path) -> dict[str, float]:
    """Run the workloads of an area with the packages of a source tree, on a new store."""
    with ExitStack() as stack:
        variables = {**os.environ, "PYTHONPATH": str(tree / "src")}
        if "redis" in area:
            variables["TASKQUEUE_REDIS_URL"] = stack.enter_context(RedisServer()).url
        run = subprocess.run(
            [sys.executable, str(HERE / "workloads.py"), area],
            env=variables,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    figures: dict[str, float] = json.loads(run.stdout)
    return figures


def _git(*words: str) -> None:
    command = ["git", "-C", str(ROOT), *words]
    subprocess.run(command, check=True, capture_output=True)
