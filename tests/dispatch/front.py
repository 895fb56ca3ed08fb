"""A front before a server, as clouds have them: in a burst it answers some requests itself, and loses some answers."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

__all__ = ["Front", "fronting"]

_BAD_GATEWAY = b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\n\r\n"
_END = b"\r\n\r\n"


class Front:
    """Passes whole requests and answers on, for HTTP/1.1 with lengths."""

    def __init__(self, port: int, *, refused: float, cut: float, seed: int) -> None:
        """Send to ``port``; answer a share ``refused`` with 502 at once, and lose a share ``cut`` of the answers."""
        self.port = 0
        self.refused = 0
        self.cut = 0
        self._upstream = port
        self._chances = refused, cut
        self._random = random.Random(seed)
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take one connection of a client, until it ends or its answer is lost."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with contextlib.closing(writer):
            try:
                answers, requests = await asyncio.open_connection("127.0.0.1", self._upstream)
                with contextlib.closing(requests):
                    while await self._pass_on(reader, writer, answers, requests):
                        await writer.drain()
            except (asyncio.IncompleteReadError, OSError):
                pass

    async def _pass_on(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        answers: asyncio.StreamReader,
        requests: asyncio.StreamWriter,
    ) -> bool:
        request = await _message(reader)
        chance, (refused, cut) = self._random.random(), self._chances
        if chance < refused:
            self.refused += 1
            writer.write(_BAD_GATEWAY)
            return True
        requests.write(request)
        answer = await _message(answers)
        if chance > 1 - cut:
            self.cut += 1
            return False
        writer.write(answer)
        return True

    async def stop(self) -> None:
        """End every connection."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def fronting(
    port: int, *, refused: float = 0.05, cut: float = 0.01, seed: int = 1
) -> AsyncIterator[Front]:
    """Give a front of a server on this machine."""
    front = Front(port, refused=refused, cut=cut, seed=seed)
    server = await asyncio.start_server(front.serve, "127.0.0.1", 0)
    front.port = server.sockets[0].getsockname()[1]
    try:
        yield front
    finally:
        server.close()
        await front.stop()
        await server.wait_closed()


async def _message(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(_END)
    length = 0
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            length = int(value)
    return head + await reader.readexactly(length)
