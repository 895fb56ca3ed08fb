"""Idle subscribers, which wait for runs that are never created. Usage: ``prefect_idlers.py COUNT KEYS URL``.

Prints *up* when all have subscribed. Runs until terminated, or until a subscriber loses its connection.
"""

from __future__ import annotations

import asyncio
import json
import sys

from websockets.asyncio.client import ClientConnection, connect
from websockets.typing import Subprotocol

_AT_ONCE = 20


async def subscriber(number: int, keys: int, url: str) -> ClientConnection:
    """Connect one subscriber."""
    socket = await connect(url, subprotocols=[Subprotocol("prefect")], proxy=None, open_timeout=60)
    await socket.send(json.dumps({"type": "auth", "token": None}))
    await socket.recv()
    names = [f"idle-{number}-{one}" for one in range(keys)]
    subscribe = {"type": "subscribe", "keys": names, "client_id": f"idle-{number}"}
    await socket.send(json.dumps(subscribe))
    return socket


async def main(count: int, keys: int, url: str) -> None:
    """Connect all subscribers, in groups."""
    sockets: list[ClientConnection] = []
    for first in range(0, count, _AT_ONCE):
        some = range(first, min(first + _AT_ONCE, count))
        sockets += await asyncio.gather(*(subscriber(number, keys, url) for number in some))
    print("up", flush=True)
    ends = [asyncio.create_task(socket.wait_closed()) for socket in sockets]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)


asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
