"""The floor of the socket: bare uvicorn and websockets, sending bodies one by one as far as a credit window goes.

It stores and guarantees nothing: a body is encoded when it is sent, an ack is decoded and gives its credit back.
Usage: ``python window_floor.py BODIES BYTES`` prints its address as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import uvicorn

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class Floor:
    """An ASGI application with one kind of socket."""

    def __init__(self, bodies: int, size: int) -> None:
        """Send so many bodies of so many bytes to each client."""
        self._bodies = bodies
        self._body = "x" * size

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """Serve one socket until all is acknowledged."""
        await receive()
        await send({"type": "websocket.accept", "subprotocol": scope["subprotocols"][0]})
        hello = msgspec.json.decode((await receive())["text"])
        credit = left = 0
        room = asyncio.Event()

        async def stream() -> None:
            nonlocal credit
            encode = msgspec.json.Encoder().encode
            for number in range(self._bodies):
                while not credit:
                    room.clear()
                    await room.wait()
                credit -= 1
                body = {"type": "deliver", "id": str(number), "payload": self._body}
                await send({"type": "websocket.send", "text": encode(body).decode()})

        credit = hello["credit"]
        left = self._bodies
        sending = asyncio.create_task(stream())
        decode = msgspec.json.Decoder().decode
        while left:
            ack = decode((await receive())["text"])
            credit += len(ack["receipts"])
            left -= len(ack["receipts"])
            room.set()
        await sending
        await send({"type": "websocket.close", "code": 1000})


def main(bodies: int, size: int) -> None:
    """Serve until terminated."""
    config = uvicorn.Config(
        Floor(bodies, size),
        port=0,
        ws="websockets-sansio",
        ws_per_message_deflate=False,
        ws_ping_interval=None,
        lifespan="off",
        log_level="critical",
    )
    listener = config.bind_socket()
    # As ours: without it asyncio leaves small frames waiting for the last one's acknowledgement.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    print(
        json.dumps(
            {"url": f"http://127.0.0.1:{listener.getsockname()[1]}/", "pid": str(os.getpid())}
        ),
        flush=True,
    )
    asyncio.run(uvicorn.Server(config).serve([listener]))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
