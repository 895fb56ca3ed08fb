"""Print what clients without a token cost a server: ``python benchmarks/unauthenticated.py [--seconds N]``.

The first table has the processor time of the longest turn of the server's event loop while 32 clients send as fast as
they can, and of 99.9 % of the turns. The second table has the memory of a connection whose client waits.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import gc
import json
import os
import ssl
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for parts of the tests

from taskqueue_core.config import Settings
from taskqueue_memory import MemoryBackend
from taskqueue_server import ServerProcess
from tests.server.access import everybody
from tests.server.rude import PING, frame
from tests.server.tls import Files, make_files

_CLIENTS = 32
_SILENT = 400
_GOAL = 1.0
"""milliseconds"""
_HEAD = "HTTP/1.1\r\nHost: 127.0.0.1\r\n"
_FORM = f"POST /login {_HEAD}Content-Type: application/x-www-form-urlencoded\r\n"
_UPGRADE = (
    f"GET /v1/socket {_HEAD}Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Protocol: taskqueue.v1\r\n\r\n"
).encode()
_NAME = b"%C3%A9" * 20_000 + b"=1"
FLOODS = {
    "connections": b"",
    "requests": f"GET /alive {_HEAD}\r\n".encode() * 1000,
    "pages": f"GET /login {_HEAD}\r\n".encode(),
    "header fields": f"GET /alive {_HEAD}".encode() + b"a: b\r\n" * 10_000,
    "a form": f"{_FORM}Content-Length: {len(_NAME)}\r\n\r\n".encode() + _NAME,
    "a short form": f"{_FORM}Content-Length: 8000\r\n\r\n".encode() + _NAME[:8000],
    "chunks of one byte": f"POST /alive {_HEAD}Transfer-Encoding: chunked\r\n\r\n".encode()
    + b"1\r\nx\r\n" * 20_000,
    "frames of one byte": _UPGRADE
    + b"".join((frame(b"x", fin=False), frame(b"x", 0, fin=False) * 20_000)),
    "pings": _UPGRADE + frame(b"", PING) * 20_000,
}
SILENCE = {
    "nothing": b"",
    "half of a head": b"GET /alive HTTP/1.1\r\nHost: " + b"x" * 8000,
    "half of a form": f"{_FORM}Content-Length: 8000\r\n\r\n".encode() + _NAME[:7999],
    "half of a frame": _UPGRADE + frame(bytes(1_000_000))[:60_000],
}


class TimedLoop(asyncio.SelectorEventLoop):
    """An event loop that records the processor time of each turn, in milliseconds."""

    def __init__(self) -> None:
        super().__init__()
        self.turns: list[float] = []
        self.answered = False
        """whether this turn has answered the benchmark, which takes long"""

    def _run_once(self) -> None:
        began = time.thread_time()
        super()._run_once()  # type: ignore[misc]
        if self.answered:
            self.answered = False
            self.turns.clear()
        else:
            self.turns.append(1000 * (time.thread_time() - began))


def _memory() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def _serve(loop: TimedLoop, settings: dict[str, Any]) -> None:
    """Serve until stdin ends. A line on stdin is answered with the turns since the last one, and the memory."""
    server = ServerProcess(
        MemoryBackend(),
        Settings(**settings),
        on_ready=lambda url: print(json.dumps({"url": url}), flush=True),
    )
    serving = asyncio.create_task(server.run())
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while await reader.readline():
        turns, count = sorted(loop.turns), len(loop.turns)
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        figures = {
            "longest": turns[-1],
            "most": turns[int(0.999 * count)],
            "turns": count,
            "memory": _memory(),
            "connections": len(server.context.unauthenticated) if server.context else 0,
        }
        print(json.dumps(figures), flush=True)
        loop.answered = True
    server.stop()
    await serving


class _Server:
    """A server in another process."""

    def __init__(self, process: asyncio.subprocess.Process, context: ssl.SSLContext | None) -> None:
        self._process = process
        self.port = 0
        self.context = context

    async def read(self) -> dict[str, Any]:
        assert self._process.stdout
        found: dict[str, Any] = json.loads(await self._process.stdout.readline())
        return found

    async def ask(self) -> dict[str, Any]:
        assert self._process.stdin
        self._process.stdin.write(b"\n")
        return await self.read()

    async def connect(
        self, *, encrypted: bool = True
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        context = self.context if encrypted else None
        return await asyncio.open_connection("127.0.0.1", self.port, ssl=context)

    async def send(
        self, data: bytes, streams: tuple[asyncio.StreamReader, asyncio.StreamWriter]
    ) -> None:
        """Send a request, and what follows a handshake when the server has answered it."""
        reader, writer = streams
        if data.startswith(_UPGRADE):
            writer.write(_UPGRADE)
            await reader.readuntil(b"\r\n\r\n")
            data = data[len(_UPGRADE) :]
        writer.write(data)


@contextlib.asynccontextmanager
async def _started(folder: Path, files: Files | None) -> AsyncIterator[_Server]:
    settings: dict[str, Any] = {
        "port": 0,
        "tokens_file": str(everybody(folder / "tokens.toml")),
        "unauthenticated_connections": 1000,
        "unauthenticated_per_address": 1000,
    }
    context = None
    if files is not None:
        settings |= {"tls_certificate": str(files.good), "tls_key": str(files.key)}
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, "--serve", json.dumps(settings)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    server = _Server(process, context)
    server.port = int((await server.read())["url"].rsplit(":", 1)[1])
    try:
        yield server
    finally:
        process.kill()
        await process.wait()


async def _flood(server: _Server, data: bytes, until: float) -> None:
    while time.monotonic() < until:
        with contextlib.suppress(OSError, EOFError, TimeoutError):
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + 2):
                reader, writer = await server.connect()
                try:
                    await server.send(data, (reader, writer))
                    while data and await reader.read(65536):
                        pass
                finally:
                    writer.transport.abort()


async def _flooded(server: _Server, data: bytes, seconds: float) -> dict[str, Any]:
    await _flood(server, data, time.monotonic() + seconds / 10)
    await server.ask()
    until = time.monotonic() + seconds
    await asyncio.gather(*(_flood(server, data, until) for _ in range(_CLIENTS)))
    return await server.ask()


async def _held(server: _Server, data: bytes, *, encrypted: bool = True) -> float:
    """Return the kilobytes of one of many silent connections; the first ones warm the server up."""
    found = []
    for _ in range(2):
        writers = []
        before = (await server.ask())["memory"]
        for _ in range(_SILENT):
            streams = await server.connect(encrypted=encrypted)
            await server.send(data, streams)
            writers.append(streams[1])
        await asyncio.sleep(0.5)  # the server reads what was sent
        after = await server.ask()
        found.append((after["memory"] - before) / max(after["connections"], 1) / 1000)
        for writer in writers:
            writer.transport.abort()
        while (await server.ask())["connections"]:  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.1)
    return found[-1]


async def _measure(seconds: float) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = make_files(folder)
        async with _started(folder, None) as plain, _started(folder, files) as tls:
            print(
                f"{'flood':20} {'longest turn: ms':>18} {'99.9 %: ms':>11} {'TLS: ms':>8} {'99.9 %: ms':>11}"
            )
            for kind, data in FLOODS.items():
                found = [await _flooded(server, data, seconds) for server in (plain, tls)]
                above = "  above the goal" if max(one["longest"] for one in found) > _GOAL else ""
                (a, b), (c, d) = ((one["longest"], one["most"]) for one in found)
                print(f"{kind:20} {a:18.2f} {b:11.2f} {c:8.2f} {d:11.2f}{above}")
            print(f"\n{'silent after':20} {'kB':>6} {'TLS: kB':>8}")
            for kind, data in SILENCE.items():
                a, b = [await _held(server, data) for server in (plain, tls)]
                print(f"{kind:20} {a:6.0f} {b:8.0f}")
            print(f"{'no ClientHello':20} {'':6} {await _held(tls, b'', encrypted=False):8.0f}")


def main() -> None:
    """Measure, or run the server that is measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.5, help="Duration of each flood.")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.serve is None:
        asyncio.run(_measure(chosen.seconds))
        return
    gc.collect()
    gc.freeze()
    loop = TimedLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(_serve(loop, json.loads(chosen.serve)))


if __name__ == "__main__":
    main()
