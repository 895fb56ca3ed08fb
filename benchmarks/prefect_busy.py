"""Runs that take longer than a lease, on busy workers, compared with the same load on docket without Prefect."""

from __future__ import annotations

import asyncio
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path

import prefect_figures as figures
from environments import python_of
from prefect_sides import Side, still

from taskqueue_prefect.names import name_of
from tests.prefect.replicas import executed, worker
from tests.redis.backends import opened
from tests.redis.engines import find_engine
from tests.redis.servers import RedisServer

SECONDS = 8
WORKERS = 2
_QUIET = SECONDS + figures.LEASE + 2.0
"""seconds without a new start, after which no further repeated execution is expected"""
_DOCKET = Path(__file__).parent / "prefect_docket.py"


def busy(side: Side) -> dict[str, float]:
    """Let two workers execute one run at a time, so that the other runs wait for longer than the lease."""

    def count() -> int:
        return sum(one.startswith("busy-") for one in executed(side.site))

    with ExitStack() as stack:
        for number in range(WORKERS):
            stack.enter_context(worker(side.site, f"busy-{number}", side.a.api, 1))
        words = ("delay.py", str(figures.LONG), "busy-", str(SECONDS))
        runs = side.site.run(*words, api=side.a.api)
        found = still(count, float("inf"), _QUIET)
        buried = _buried(side, side.a.client.get(f"/task_runs/{runs[0]}").json()["task_key"])
    if buried is None:
        return {figures.BUSY: found}
    return {figures.BUSY: found, figures.BURIED: buried}


def _buried(side: Side, key: str) -> int | None:
    """Return the number of dead letters; ``None`` if this kind of queue has no dead letters."""
    if side.name == figures.STOCK:
        return None
    if side.name == figures.OURS:
        return asyncio.run(_dead(side, name_of(key)))
    with side.site.redis.connect() as redis:
        streams = [
            one for one in redis.call("KEYS", "*dlq*") if redis.call("TYPE", one) == "stream"
        ]
        return sum(int(redis.call("XLEN", one)) for one in streams)


async def _dead(side: Side, key: str) -> int:
    async with opened(side.site.redis.url, side.site.prefix) as backend:
        ledger = await backend.control.ledger(key)
        return ledger.dead


def on_docket() -> dict[str, float]:
    """Return the executions of the same number of tasks of the same length, with docket's worker on another Redis."""
    python, variables = python_of("docket")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="docket-bench-")))
        redis = stack.enter_context(RedisServer(find_engine(), folder / "redis", aof=True))
        marks = folder / "marks"
        marks.touch()
        load = [str(figures.LEASE), str(SECONDS), str(figures.LONG)]
        words = [python, str(_DOCKET), redis.url, str(marks), *load]
        for _ in range(WORKERS):
            process = stack.enter_context(subprocess.Popen([*words, "work"], env=variables))
            stack.callback(process.kill)
        subprocess.run([*words, "add"], env=variables, check=True, timeout=60)
        found = still(lambda: len(marks.read_text().split()), float("inf"), _QUIET)
    return {figures.BUSY: found}
