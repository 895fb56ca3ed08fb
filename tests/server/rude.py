"""Hand-written websocket frames over a plain TCP socket, for peers that violate the protocol."""

from __future__ import annotations

import asyncio
import contextlib
import socket as plain
import struct
from typing import Any, Self

import msgspec

CONT, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10
_RESET = struct.pack("ii", 1, 0)
_SECONDS = 10.0


def frame(payload: bytes, opcode: int = TEXT, *, fin: bool = True, mask: bytes = bytes(4)) -> bytes:
    """Return the bytes of one client frame."""
    size = len(payload)
    first = bytes([(0x80 if fin else 0) | opcode])
    if size < 126:
        head = first + bytes([0x80 | size])
    elif size < 1 << 16:
        head = first + b"\xfe" + size.to_bytes(2, "big")
    else:
        head = first + b"\xff" + size.to_bytes(8, "big")
    if mask != bytes(4):
        payload = bytes(byte ^ mask[n % 4] for n, byte in enumerate(payload))
    return head + mask + payload


class RawSocket:
    """A websocket connection after its handshake, without a websocket library on the client side."""

    def __init__(self, socket: plain.socket, patience: float = _SECONDS) -> None:
        self.socket = socket
        self._patience = patience
        self.closed_with: int | None = None
        """close code that the server sent, once it has been read"""
        self.reason = b""
        self._buffer = b""
        self._early = b""
        """bytes that arrived together with the handshake response"""
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def opened(
        cls, port: int, *, receive_buffer: int = 0, patience: float = _SECONDS
    ) -> Self:
        """Connect and perform the websocket handshake.

        A small ``receive_buffer`` makes the connection fill up soon if nothing is read. Operations that take
        longer than ``patience`` seconds raise `TimeoutError`.
        """
        raw = plain.socket()
        if receive_buffer:
            raw.setsockopt(plain.SOL_SOCKET, plain.SO_RCVBUF, receive_buffer)
        raw.setblocking(False)  # noqa: FBT003 - the function accepts no keyword argument
        raw.setsockopt(plain.IPPROTO_TCP, plain.TCP_NODELAY, 1)
        it = cls(raw, patience)
        try:
            await it._loop.sock_connect(raw, ("127.0.0.1", port))
            await it.send(
                b"GET /v1/socket HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\n"
                b"Connection: Upgrade\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
                b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Protocol: taskqueue.v1\r\n\r\n"
            )
            await it._upgraded()
        except BaseException:
            raw.close()
            raise
        return it

    async def _upgraded(self) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            piece = await self._receive(4096)
            if not piece:
                raise ConnectionResetError("no handshake")
            head += piece
        head, _, self._early = head.partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 101"):
            raise ConnectionRefusedError(head.splitlines()[0])

    async def send(self, data: bytes) -> None:
        """Send bytes unchanged."""
        async with asyncio.timeout(self._patience):
            await self._loop.sock_sendall(self.socket, data)

    def say(self, kind: str, **fields: Any) -> None:
        """Send a small protocol frame at once."""
        self.socket.send(frame(msgspec.json.encode({"type": kind, **fields})))

    async def _receive(self, size: int) -> bytes:
        if self._early:
            early, self._early = self._early[:size], self._early[size:]
            return early
        async with asyncio.timeout(self._patience):
            return await self._loop.sock_recv(self.socket, size)

    async def heard(self, size: int = 65536) -> bytes:
        """Return the next bytes of frames, or nothing at the end of the connection; a close code is stored."""
        try:
            data = await self._receive(size)
        except ConnectionResetError:
            return b""
        self._note(data)
        return data

    async def end(self) -> int | None:
        """Read until the server closes the connection; return its close code, or None if it sent none."""
        while self.closed_with is None and await self.heard():
            pass
        return self.closed_with

    def _note(self, data: bytes) -> None:
        # Store the close code if these bytes contain a close frame. Server frames are not masked, and only the
        # header of each frame matters here.
        self._buffer += data
        while len(self._buffer) >= 2:
            opcode, size, at = self._buffer[0] & 15, self._buffer[1], 2
            if size >= 126:
                wide = 2 if size == 126 else 8
                size, at = int.from_bytes(self._buffer[2 : 2 + wide], "big"), 2 + wide
            if len(self._buffer) < at + size:
                return
            payload, self._buffer = self._buffer[at : at + size], self._buffer[at + size :]
            if opcode == CLOSE:
                self.closed_with, self.reason = int.from_bytes(payload[:2], "big"), payload[2:]

    def close(self, *, reset: bool = False) -> None:
        """Close the connection, with a TCP reset if ``reset`` is set."""
        if reset:
            with contextlib.suppress(OSError):
                self.socket.setsockopt(plain.SOL_SOCKET, plain.SO_LINGER, _RESET)
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
