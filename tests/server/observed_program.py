"""A server in a process of its own that tells about itself: one JSON object per line of input.

Usage: ``python observed_program.py BACKEND SETTINGS-AS-JSON``. ``look`` tells memory, descriptors, tasks and
connections; ``ledger KEY`` its counts; ``turns N`` the longest of so many turns of its loop; the end of the input stops
the server.
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
from taskqueue_server import ServerProcess
from taskqueue_server.logs import set_up_logs


def look(server: ServerProcess) -> dict[str, Any]:
    """What must not grow. Memory is that of living objects: what the allocator keeps is given back first."""
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
    """Processor seconds, which others on the machine do not add to, of the longest of so many turns of the loop."""
    found = 0.0
    for _ in range(turns):
        began = time.thread_time()
        await asyncio.sleep(0)
        found = max(found, time.thread_time() - began)
    return {"seconds": found}


def tell(answer: dict[str, Any]) -> None:
    """Write a line."""
    sys.stdout.write(f"{json.dumps(answer)}\n")
    sys.stdout.flush()


async def obey(server: ServerProcess) -> None:
    """Answer each line; stop the server at the end of the input."""
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
    """Serve until the input ends."""
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
