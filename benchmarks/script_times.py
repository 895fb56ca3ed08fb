"""Print what each Redis script costs at its largest size: ``python benchmarks/script_times.py [--runs N]``.

The table has, per script, the commands and the bytes of its most expensive call, and how many milliseconds of processor
time Redis needed for it, which is for how long Redis serves no other client. The time is the lowest of several runs.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for parts of the tests

from tests.redis.backends import opened
from tests.redis.bounds import Cost
from tests.redis.engines import find_engine
from tests.redis.largest import measure
from tests.redis.servers import RedisServer

_RUNS = 3
_GOAL = 20.0
"""milliseconds"""


async def _run() -> dict[str, Cost]:
    with (
        tempfile.TemporaryDirectory() as folder,
        RedisServer(find_engine(), Path(folder)) as server,
    ):
        async with opened(server.url, "times", lease=60.0, housekeeping=60.0) as backend:
            return await measure(backend, server)


def main() -> None:
    """Measure all scripts, and print the table, the slowest script first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=_RUNS, help="Number of runs.")
    runs = [asyncio.run(_run()) for _ in range(parser.parse_args().runs)]
    lowest = {
        name: min((run[name] for run in runs), key=lambda c: c.milliseconds) for name in runs[0]
    }
    print(f"{'script':16} {'commands':>8} {'kB':>7} {'ms':>6}")
    for name, cost in sorted(lowest.items(), key=lambda item: -item[1].milliseconds):
        above = "  above the goal" if cost.milliseconds > _GOAL else ""
        print(
            f"{name:16} {cost.commands:8} {cost.bytes / 1000:7.0f} {cost.milliseconds:6.1f}{above}"
        )


if __name__ == "__main__":
    main()
