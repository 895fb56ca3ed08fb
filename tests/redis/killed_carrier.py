"""A process that carries lines between partitions, and kills itself at one of the steps: run by `test_after_faults`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

from taskqueue_core.consumer.carrier import carry
from tests.redis.backends import opened

PARTITIONS = 4


class Killed:
    """The lines of a backend. Before or after its first call of one method, the process is killed."""

    def __init__(self, dependencies: Any, step: str, when: str) -> None:
        self._dependencies = dependencies
        self._step = step
        self._when = when

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._dependencies, name)
        if name != self._step:
            return found

        async def call(*args: Any) -> Any:
            if self._when == "after":
                await found(*args)
            os.kill(os.getpid(), signal.SIGKILL)

        return call


async def main(url: str, prefix: str, step: str, when: str) -> None:
    """Carry lines until the process is killed."""
    async with opened(url, prefix, partitions=PARTITIONS) as backend:
        lines: Any = Killed(backend.dependencies, step, when)
        await carry(lines)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
