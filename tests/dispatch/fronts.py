"""An HTTP server that imitates an unreliable proxy: it loses some requests and some responses."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Self

Reply = bytes
CUT = b""
"""a response that is empty because the connection is cut"""


def reply(status: int, body: bytes = b"{}", *headers: str) -> Reply:
    """Return a complete HTTP response as bytes."""
    lines = [f"HTTP/1.1 {status} Words", f"content-length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


class Flaky:
    """A proxy that passes POST requests to ``answer``.

    It refuses some with 502, and cuts off the response to others. The responses in ``script`` are sent first, in this
    order, without a call of ``answer``.
    """

    def __init__(
        self,
        answer: Callable[[bytes], Awaitable[Reply]],
        *,
        refused: float = 0.0,
        cut: float = 0.0,
        script: Sequence[Reply] = (),
        seed: int = 0,
    ) -> None:
        """Create the proxy; ``refused`` and ``cut`` are fractions of all requests."""
        self._answer = answer
        self._refused = refused
        self._cut = cut
        self._script = list(script)
        self._random, self._cuts = random.Random(seed), random.Random(seed)
        self._server: asyncio.Server | None = None
        self._at_work: set[asyncio.Task[None]] = set()
        self.count: Counter[str] = Counter()
        self.bodies: list[bytes] = []
        self.url = ""

    async def __aenter__(self) -> Self:
        """Start to listen on a free port."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/queue/submit"
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop listening, and cut all open connections."""
        assert self._server is not None
        self._server.close()
        for task in self._at_work:
            task.cancel()
        await asyncio.gather(*self._at_work, return_exceptions=True)
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._at_work.add(task)
        try:
            while await self._one(reader, writer):
                pass
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()
            self._at_work.discard(task)

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
        body = await reader.readexactly(length)
        self.bodies.append(body)
        told = await self._told(body)
        writer.write(told)
        await writer.drain()
        return b"\r\n\r\n" in told and b"x-cut" not in told

    async def _told(self, body: bytes) -> Reply:
        self.count["requests"] += 1
        if self._script:
            return self._script.pop(0)
        chance = self._random.random()
        if chance < self._refused:
            self.count["refused"] += 1
            return reply(502, b"<html>Bad Gateway</html>")
        told = await self._answer(body)
        if chance > 1 - self._cut:
            self.count["cut"] += 1
            return self._cuts.choice(
                [CUT, told[:20], told[:-3].replace(b" Words", b" Words\r\nx-cut: 1")]
            )
        return told
