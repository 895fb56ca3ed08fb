"""Workers that only ack what they receive. Usage: ``prefect_workers.py WORKERS RUNS KEY URL``.

Prints the rate of deliveries from the moment at which each worker has received a run until all runs are received. The
program parses frames itself and sends prepared ones, because a worker must cost much less than the server does. As
Prefect's own workers, it offers compression, and compresses what it sends.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import zlib
from urllib.parse import urlsplit

_HANDSHAKE = """\
GET {path} HTTP/1.1\r
Host: {host}\r
Upgrade: websocket\r
Connection: Upgrade\r
Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r
Sec-WebSocket-Version: 13\r
Sec-WebSocket-Protocol: prefect\r
Sec-WebSocket-Extensions: permessage-deflate; client_max_window_bits\r
\r
"""
_COMPRESSED_TEXT, _MASKED, _EXTENDED = 0xC1, 0x80, 126
_SECONDS = 60.0
_SIZES = {126: 2, 127: 8}
"""number of bytes that follow the first two bytes of a frame, if the frame has its length there"""


def _frame(**fields: object) -> bytes:
    """Return a frame with a compressed text. Its mask is zero."""
    deflate = zlib.compressobj(wbits=-9)
    text = deflate.compress(json.dumps(fields).encode()) + deflate.flush(zlib.Z_SYNC_FLUSH)
    text = text.removesuffix(b"\x00\x00\xff\xff")
    assert len(text) < _EXTENDED
    return bytes((_COMPRESSED_TEXT, _MASKED | len(text))) + bytes(4) + text


_ACK = _frame(type="ack")


class Drain:
    """The runs that all workers of the program have received."""

    def __init__(self, workers: int, runs: int) -> None:
        self.done = asyncio.Event()
        self._idle = workers
        self._left = runs
        self._span = (0, 0.0)

    def received(self, *, first: bool) -> None:
        """Count a run."""
        self._left -= 1
        if first:
            self._idle -= 1
            if not self._idle:
                self._span = self._left, time.monotonic()
        if not self._left:
            self.done.set()

    def rate(self) -> float:
        """Return the number of runs per second."""
        count, begin = self._span
        assert count, "a worker received no run, or all runs before another worker had one"
        return count / (time.monotonic() - begin)


class Worker(asyncio.Protocol):
    """A worker's connection."""

    def __init__(self, number: int, key: str, url: str, drain: Drain) -> None:
        parts = urlsplit(url)
        self._hello = _HANDSHAKE.format(path=parts.path, host=parts.netloc).encode()
        self._subscribe = _frame(type="subscribe", keys=[key], client_id=f"worker-{number}")
        self._drain = drain
        self._bytes = b""
        self._frames = 0
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the handshake."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._hello)

    def data_received(self, data: bytes) -> None:
        """Answer the frames that are complete."""
        self._bytes += data
        if self._hello:
            head, end, rest = self._bytes.partition(b"\r\n\r\n")
            if not end:
                return
            assert b" 101 " in head, head
            self._hello, self._bytes = b"", rest
            self._transport.write(_frame(type="auth", token=None))
        while (size := self._frame_size()) and len(self._bytes) >= size:
            kind, self._bytes = self._bytes[0], self._bytes[size:]
            assert kind & 15 == 1, f"a frame of the kind {kind & 15}"
            self._answer()

    def _frame_size(self) -> int:
        """Return the size of the next frame; 0 if its first bytes have not arrived."""
        if len(self._bytes) < 2:
            return 0
        length = self._bytes[1]
        more = _SIZES.get(length, 0)
        if len(self._bytes) < 2 + more:
            return 0
        return 2 + more + (int.from_bytes(self._bytes[2 : 2 + more]) if more else length)

    def _answer(self) -> None:
        self._frames += 1
        if self._frames == 1:  # the server has accepted the token
            self._transport.write(self._subscribe)
            return
        self._transport.write(_ACK)
        self._drain.received(first=self._frames == 2)


async def main(workers: int, runs: int, key: str, url: str) -> None:
    """Connect all workers, and print the rate."""
    drain = Drain(workers, runs)
    parts = urlsplit(url)
    loop = asyncio.get_running_loop()
    for number in range(workers):
        await loop.create_connection(
            lambda number=number: Worker(number, key, url, drain), parts.hostname, parts.port
        )
    await asyncio.wait_for(drain.done.wait(), _SECONDS)
    print(drain.rate())


asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]))
