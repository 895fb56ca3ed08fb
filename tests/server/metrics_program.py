"""A program that runs a server on a free port and prints its address."""

from __future__ import annotations

import asyncio

from taskqueue_memory import MemoryBackend
from taskqueue_server import ServerProcess
from tests.server.support import settings


async def main() -> None:
    """Run the server until a signal arrives."""
    server = ServerProcess(MemoryBackend(), settings(), on_ready=lambda url: print(url, flush=True))  # noqa: T201
    await server.run()


asyncio.run(main())
