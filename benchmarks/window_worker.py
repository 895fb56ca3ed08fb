"""A minimal worker on a WebSocket: it grants credit, settles deliveries in batches, and measures the time.

Usage: ``python window_worker.py {floor,ack,retry} URL TASKS WINDOW KEY``. It prints seconds and counts as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosedOK
from websockets.typing import Subprotocol

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode
_DELAY = 3600
"""seconds before a retry, which is longer than any measurement takes"""


async def _floor(socket: ClientConnection, tasks: int, window: int, _: str) -> int:
    await _say(socket, type="hello", credit=window)
    got: list[str] = []
    seen: set[str] = set()
    try:
        while True:
            frame = _decode(await socket.recv(decode=False))
            got.append(frame["id"])
            seen.add(frame["id"])
            if len(got) >= window // 2 or len(seen) == tasks:
                await _say(socket, type="ack", receipts=got)
                got = []
    except ConnectionClosedOK:
        return len(seen)


async def _ack(socket: ClientConnection, receipts: list[str]) -> None:
    await _say(socket, type="ack", receipts=receipts)


async def _retry(socket: ClientConnection, receipts: list[str]) -> None:
    for receipt in receipts:
        await _say(socket, type="retry", receipt=receipt, error="benchmark", delay=_DELAY)


async def _server(
    socket: ClientConnection,
    tasks: int,
    window: int,
    key: str,
    settle: Callable[[ClientConnection, list[str]], Awaitable[None]],
) -> int:
    await _say(socket, type="hello", worker_id="bench", keys=[key], credit=window)
    got: list[str] = []
    seen: set[str] = set()
    settled: set[str] = set()
    while len(settled) < tasks:
        frame = _decode(await socket.recv(decode=False))
        if frame["type"] == "deliver":
            got += [delivery["receipt"] for delivery in frame["deliveries"]]
            seen.update(delivery["task"]["id"] for delivery in frame["deliveries"])
            if len(got) >= window // 2 or len(seen) == tasks:
                await settle(socket, got)
                await _say(socket, type="credit", n=len(got))
                got = []
        elif frame["type"] == "settled":
            settled.update(frame.get("ok", ()))
        elif frame["type"] == "ping":
            await _say(socket, type="pong", n=frame["n"])
    await _say(socket, type="bye")
    return len(seen)


async def _say(socket: ClientConnection, **frame: Any) -> None:
    await socket.send(_encode(frame).decode())


async def main(kind: str, url: str, tasks: int, window: int, key: str) -> None:
    """Receive and settle tasks until all are settled, and print the figures."""
    work = {
        "floor": _floor,
        "ack": partial(_server, settle=_ack),
        "retry": partial(_server, settle=_retry),
    }[kind]
    address = url.replace("http", "ws", 1)
    async with connect(
        address, subprotocols=[Subprotocol("taskqueue.v1")], compression=None, proxy=None
    ) as socket:
        start, used = time.perf_counter(), time.process_time()
        handled = await work(socket, tasks, window, key)
        found = {"seconds": time.perf_counter() - start, "cpu": time.process_time() - used}
    print(json.dumps({**found, "handled": handled}), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]))
