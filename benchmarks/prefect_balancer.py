"""A load balancer for replicas: it forwards each connection to the next available replica."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from threading import Thread
from typing import Self


class Balancer:
    """A context manager that forwards bytes in a thread with its own event loop."""

    def __init__(self, ports: Sequence[int]) -> None:
        """Store the ports of the replicas on loopback, without starting."""
        self._ports = list(ports)
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever)
        self._open: set[asyncio.Task[None]] = set()
        self.port = 0

    @property
    def api(self) -> str:
        """The URL of the balancer, for ``PREFECT_API_URL``."""
        return f"http://127.0.0.1:{self.port}/api"

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _stop(self) -> None:
        self._server.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            for _ in self._ports:
                self._ports.append(port := self._ports.pop(0))
                with contextlib.suppress(OSError):
                    there = await asyncio.open_connection("127.0.0.1", port)
                    await self._join((reader, writer), there)
                    return
        except asyncio.CancelledError:
            pass  # it ends; a cancelled task of a stream's server would be logged
        finally:
            writer.transport.abort()
            self._open.discard(task)

    async def _join(
        self,
        one: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        other: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        """Forward bytes in both directions until one connection is closed."""
        ways = [
            asyncio.create_task(_pump(one[0], other[1])),
            asyncio.create_task(_pump(other[0], one[1])),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            other[1].close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
