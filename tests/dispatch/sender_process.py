"""A sender of callbacks as a process of its own: ``python -m tests.dispatch.sender_process URL PREFIX PORT``."""

from __future__ import annotations

import asyncio
import sys

from taskqueue_dispatch.callbacks import Sender
from taskqueue_dispatch.config import DispatchSettings
from tests.redis.backends import opened


async def main(url: str, prefix: str, port: int) -> None:
    """Send until killed."""
    told = DispatchSettings(
        callback_http=True, callback_networks=("127.0.0.0/8",), callback_ports=(port,)
    )
    async with opened(url, prefix) as backend:
        await Sender(backend, told).run()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
