"""Add or execute tasks on docket. Usage: ``prefect_docket.py URL MARKS LEASE SECONDS COUNT add|work``."""

from __future__ import annotations

import asyncio
import sys
from datetime import timedelta
from pathlib import Path

from docket import Docket, Worker

URL, MARKS, LEASE, SECONDS, COUNT, WHAT = sys.argv[1:]


async def long(name: str) -> None:
    """Record the start, and sleep."""
    with Path(MARKS).open("a") as file:  # noqa: ASYNC230 - one line
        file.write(f"{name}\n")
    await asyncio.sleep(float(SECONDS))


async def main() -> None:
    """Add the tasks, or execute tasks until terminated."""
    async with Docket("bench", url=URL) as docket:
        docket.register(long)
        if WHAT == "add":
            for number in range(int(COUNT)):
                await docket.add(long)(f"long-{number}")
            return
        lease = timedelta(seconds=float(LEASE))
        async with Worker(docket, concurrency=1, redelivery_timeout=lease) as worker:
            await worker.run_forever()


asyncio.run(main())
