"""A server process that reports measurements of itself: one JSON object for each command line on stdin.

Usage: ``python observed_program.py BACKEND SETTINGS-AS-JSON``. The command ``look`` reports memory, descriptors, tasks
and connections; ``ledger KEY`` reports the counts of a queue; ``turns N`` reports the longest of N event loop
iterations. The end of stdin stops the server.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from taskqueue_core.assembly import open_backend
from taskqueue_core.config import Settings
from taskqueue_core.logs import set_up_logs
from taskqueue_server import ServerProcess


def look(server: ServerProcess) -> dict[str, Any]:
    """Return the measurements that must not grow.

    Free memory is returned to the system first, so that only live objects count.
    """
    assert server.context is not None
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return {
        "rss": pages * os.sysconf("SC_PAGE_SIZE"),
        "fds": len(list(Path("/proc/self/fd").iterdir())),
        "tasks": len(asyncio.all_tasks()),
        "connections": len(server.context.registry),
        "strangers": server.context.registry.strangers,
    }


async def longest(turns: int) -> dict[str, float]:
    """Return the processor seconds of the longest of ``turns`` event loop iterations.

    Processor time is used because other load on the machine does not affect it.
    """
    found = 0.0
    for _ in range(turns):
        began = time.thread_time()
        await asyncio.sleep(0)
        found = max(found, time.thread_time() - began)
    return {"seconds": found}


def tell(answer: dict[str, Any]) -> None:
    """Write a response as one JSON line."""
    sys.stdout.write(f"{json.dumps(answer)}\n")
    sys.stdout.flush()


async def obey(server: ServerProcess) -> None:
    """Respond to each command line; stop the server at the end of stdin."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while words := (await reader.readline()).decode().split():
        if words[0] == "ledger":
            assert server.context is not None
            tell(msgspec.to_builtins(await server.context.control.ledger(words[1])))
        elif words[0] == "turns":
            tell(await longest(int(words[1])))
        else:
            tell(look(server))
    server.stop()


async def main(backend: str, settings: dict[str, Any]) -> None:
    """Run the server until stdin ends."""
    chosen = Settings(**settings)
    server = ServerProcess(
        open_backend(backend, chosen),
        chosen,
        on_ready=lambda url: tell({"url": url}),
    )
    obeying = asyncio.create_task(obey(server))
    await server.run()
    await obeying


if __name__ == "__main__":
    set_up_logs()
    asyncio.run(main(sys.argv[1], json.loads(sys.argv[2])))
