"""The hosts that get callbacks: the one at 127.0.0.1 answers at once, and those at other addresses hang."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec

from tests.chaos.history import Log, What
from tests.chaos.programs.common import Setup

HEALTHY = "127.0.0.1"


async def run(setup: Setup, log: Log, over: asyncio.Event) -> None:
    """Receive callbacks until SIGTERM. The path of a callback is the key of its job's queue."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await _take(reader, writer, log)
        writer.close()

    server = await asyncio.start_server(serve, "0.0.0.0", setup.port)  # noqa: S104 - for all of 127.0.0.0/8
    log.note(What.PHASE, name="serving")
    await over.wait()
    server.close()


async def _take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, log: Log) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in head[1:-2])
    body = msgspec.json.decode(await reader.readexactly(int(headers["content-length"])))
    if writer.get_extra_info("sockname")[0] != HEALTHY:
        await reader.read()
        return
    log.note(
        What.CALLBACK,
        key=head[0].split()[1].removeprefix("/"),
        task=body["job_id"],
        receipt=headers["webhook-id"],
        outcome=body["status"],
    )
    writer.write(b"HTTP/1.1 204 ok\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
    await writer.drain()
