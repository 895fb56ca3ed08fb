"""Compare the speed of two commits: python3 dev.py bench --against BEFORE [--pairs 20] [--area memory] [--floor 0.95].

The working tree is compared with the commit BEFORE. A pair has new processes of both versions, and measures many short
slices in turn, while the other version waits: BEFORE, working tree, working tree, BEFORE and so on. So a slow second of
the machine affects both. A row is the number of tasks per second of processor time, of all processes of the workload
and of the store; other programs of the machine affect it far less than the time that passes. The ratio of a row is the
rate of the working tree divided by the rate of BEFORE, so it is above 1 if the working tree is faster: in a pair, it is
the median of the slices; of all pairs, the mean. The confidence interval of 95 % comes from resampling the pairs. The
ratio by the time that passes is shown as well. The exit code is 1 if the lower end of a row's interval is below the
floor.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import fmean, median
from typing import Self

from processes import RedisServer

HERE = Path(__file__).parent
ROOT = HERE.parent
AREAS = {"memory": 4_000, "redis": 2_000, "server, memory": 2_000, "server, redis": 2_000}
"""by area: the number of tasks of a slice"""
RESAMPLES = 10_000

Figures = Mapping[str, tuple[float, float]]
"""by row: the time and the processor time for one task, in seconds"""


def main(arguments: Sequence[str]) -> int:
    """Measure the pairs, print a table, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="dev.py bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--against", required=True, metavar="BEFORE", help="commit to compare with")
    parser.add_argument("--pairs", type=int, default=20, help="number of pairs")
    parser.add_argument("--slices", type=int, default=10, help="slices of a version in a pair")
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
    """Print a row for each figure of an area; return the rows that are slower than allowed."""
    pairs: list[list[tuple[Figures, Figures]]] = []
    for number in range(options.pairs):
        print(f"{area}: pair {number + 1} of {options.pairs}", file=sys.stderr)
        pairs.append(_pair(area, before, number, options.slices))
    slow = []
    for name in pairs[0][0][0]:
        passed, used = (
            [[(before[name][kind], after[name][kind]) for before, after in pair] for pair in pairs]
            for kind in (0, 1)
        )
        low, high = _interval(_ratios(used))
        rates = (1 / median(each[side] for pair in used for each in pair) for side in (0, 1))
        print(
            f"{area}: {name:<38}",
            *(f"{rate:>10,.4g}" for rate in rates),
            f" ratio {_mean(_ratios(used)):.3f} ({low:.3f} to {high:.3f})",
            " by time {:.3f} ({:.3f} to {:.3f})".format(
                _mean(_ratios(passed)), *_interval(_ratios(passed))
            ),
            flush=True,
        )
        if low < options.floor:
            slow.append(f"{area}: {name}")
    return slow


def _pair(area: str, before: Path, number: int, slices: int) -> list[tuple[Figures, Figures]]:
    """Measure slices of both versions in turn; return the figures of the slices that follow one another."""
    with ExitStack() as stack:
        sides = [stack.enter_context(Side(area, tree, number)) for tree in (before, ROOT)]
        found: list[list[Figures]] = [[], []]
        for turn in range(slices + 1):  # the first slices are the warm-up
            order = (0, 1) if (turn + number) % 2 else (1, 0)
            for side in order:
                found[side].append(sides[side].slice())
        return list(zip(*(figures[1:] for figures in found), strict=True))


class Side:
    """The processes of one version, with a new store, which measure slices when they are asked to."""

    def __init__(self, area: str, tree: Path, seed: int) -> None:
        self._area = area
        self._tree = tree
        self._seed = seed
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        """Start the processes. Both versions of a pair have the same order of sets, by the seed of the hashes."""
        variables = {
            **os.environ,
            "PYTHONPATH": str(self._tree / "src"),
            "PYTHONHASHSEED": str(self._seed),
        }
        words = [sys.executable, str(HERE / "workloads.py"), self._area, str(AREAS[self._area])]
        if "redis" in self._area:
            redis = self._stack.enter_context(RedisServer())
            variables["TASKQUEUE_REDIS_URL"] = redis.url
            words.append(str(redis.process.pid))
        self._process = self._stack.enter_context(
            subprocess.Popen(
                words, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        )
        return self

    def __exit__(self, *_: object) -> None:
        """End the processes."""
        self._stack.close()

    def slice(self) -> Figures:
        """Measure one slice."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"invalid: the workloads of {self._tree} have ended")
        figures: Figures = json.loads(line)
        return figures


def _ratios(pairs: Sequence[Sequence[tuple[float, float]]]) -> list[float]:
    """Return the logarithm of the ratio of each pair."""
    return [median(math.log(before / after) for before, after in pair) for pair in pairs]


def _mean(logs: Sequence[float]) -> float:
    return math.exp(fmean(logs))


def _interval(logs: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the mean ratio, computed by bootstrapping."""
    chance = random.Random(1)
    means = sorted(fmean(chance.choices(logs, k=len(logs))) for _ in range(RESAMPLES))
    return math.exp(means[RESAMPLES // 40]), math.exp(means[-RESAMPLES // 40])


def _git(*words: str) -> None:
    command = ["git", "-C", str(ROOT), *words]
    subprocess.run(command, check=True, capture_output=True)
