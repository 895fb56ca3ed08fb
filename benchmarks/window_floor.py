"""A minimal WebSocket server on uvicorn, which sends bodies one after another as long as the client has credit.

It stores nothing and guarantees nothing: it encodes each body when it sends it, and each decoded ack adds one credit.
Usage: ``python window_floor.py BODIES BYTES``. It prints its address as JSON.
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
    """The ASGI application of the minimal server."""

    def __init__(self, bodies: int, size: int) -> None:
        """Prepare to send ``bodies`` bodies of ``size`` bytes to each client."""
        self._bodies = bodies
        self._body = "x" * size

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """Serve one WebSocket until all bodies are acknowledged."""
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
    # Disable Nagle's algorithm, as the server of this project does. With it, small frames wait for acknowledgements.
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
