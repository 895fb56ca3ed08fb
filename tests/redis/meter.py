"""A meter of the script calls of a backend: commands, bytes and milliseconds of each."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import taskqueue_redis
from taskqueue_redis import RedisBackend
from taskqueue_redis.scripts.assembly import source
from tests.redis.script_costs import Cost
from tests.redis.servers import RedisServer

SCRIPTS = tuple(
    sorted(
        path.stem
        for path in (Path(taskqueue_redis.__file__).parent / "lua").glob("*.lua")
        if path.stem != "install"
    )
)
"""all scripts, except the one that runs once per process and executes five commands"""


class Meter:
    """Measures the script calls of a backend, one at a time."""

    def __init__(self, backend: RedisBackend, server: RedisServer) -> None:
        """Begin to measure."""
        self.costs: dict[str, Cost] = {}
        """by script, the maximum of each figure"""
        self._connection = server.connect()
        self._lock = asyncio.Lock()
        scripts: Any = backend._context.scripts
        self._inner = scripts.run
        scripts.run = self._run
        for name in SCRIPTS:
            self._connection.call("SCRIPT", "LOAD", source(name))

    def close(self) -> None:
        """Close the connection to the server."""
        self._connection.close()

    async def _run(self, name: str, partition: str, *args: Any, **options: Any) -> Any:
        async with self._lock:
            commands, spent = self._executed(), self._spent()
            reply = await self._inner(name, partition, *args, **options)
            spent, commands = self._spent() - spent, self._executed() - commands
        # Do not count EVALSHA, and INFO.
        now = Cost(commands - 3, size_of(args) + size_of(reply), spent * 1000)
        before = self.costs.get(name, now)
        self.costs[name] = Cost(
            max(before.commands, now.commands),
            max(before.bytes, now.bytes),
            max(before.milliseconds, now.milliseconds),
        )
        return reply

    def _executed(self) -> int:
        return int(self._info("stats")["total_commands_processed"])

    def _spent(self) -> float:
        """Return the processor time of the thread that executes scripts: other processes do not influence it much."""
        info = self._info("cpu")
        return sum(float(info[f"used_cpu_{kind}_main_thread"]) for kind in ("user", "sys"))

    def _info(self, section: str) -> dict[str, str]:
        lines = self._connection.call("INFO", section).decode().splitlines()
        return dict(line.split(":", 1) for line in lines if ":" in line)


def size_of(value: Any) -> int:
    """Return the number of bytes in a reply or in arguments."""
    if isinstance(value, bytes | str):
        return len(value)
    return sum(map(size_of, value)) if isinstance(value, list | tuple) else 8
