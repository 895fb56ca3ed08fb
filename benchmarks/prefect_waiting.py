"""Print what waiting runs cost Prefect servers: ``python benchmarks/prefect_waiting.py [--runs N] [--seconds N]``.

Two replicas on one PostgreSQL compare the runs that wait with the queue. The figures are the processor time of each
replica while many runs are scheduled for tomorrow, less that before there were any.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for parts of the tests

import httpx2
import prefect_figures as figures
from prefect_delivery import key
from prefect_sides import Ours, Side, sides
from prefect_speed import create_run, used

from taskqueue_prefect.names import name_of
from tests.prefect.environment import python_with_prefect
from tests.redis.backends import opened

_SETTLE = 30.0


async def _create_one(side: Side, name: str) -> None:
    at = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    async with httpx2.AsyncClient(base_url=side.a.api, trust_env=False, timeout=30) as client:
        await create_run(client, name, scheduled_time=at)


async def _until_enqueued(side: Side, name: str, count: int) -> None:
    async with opened(side.site.redis.url, side.site.prefix) as backend:
        while (await backend.control.ledger(name_of(name))).scheduled < count:  # noqa: ASYNC110 - other processes enqueue
            await asyncio.sleep(1)


def _measure(side: Side, runs: int, seconds: float) -> None:
    replicas = (side.a.pid, side.b.pid)
    time.sleep(_SETTLE)
    without = used(seconds, replicas)
    name = key()
    asyncio.run(_create_one(side, name))
    url = side.site.settings["PREFECT_API_DATABASE_CONNECTION_URL"]
    side.site.run("fill.py", url, str(runs - 1), api=side.a.api)
    asyncio.run(_until_enqueued(side, name, runs))
    time.sleep(_SETTLE)
    found = used(seconds, replicas)
    for which, after, before in zip("ab", found, without, strict=True):
        print(
            f"replica {which}: {100 * (after - before):.2f} % of a core ({100 * before:.2f} without)"
        )


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100_000, help="Number of waiting runs.")
    parser.add_argument("--seconds", type=float, default=600, help="Duration of each sample.")
    chosen = parser.parse_args()
    with sides(python_with_prefect(), {figures.OURS: _Roomy}) as (side,):
        _measure(side, chosen.runs, chosen.seconds)


class _Roomy(Ours):
    """Servers whose queues have room for all runs."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.settings |= {"TASKQUEUE_PREFECT_CAPACITY": "1000000"}


if __name__ == "__main__":
    main()
