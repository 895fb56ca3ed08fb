"""A minimal blocking Redis client with raw replies, independent of the client code under test."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any, Self

Address = tuple[str, int] | Path


class RedisError(Exception):
    """An error reply, with the text that Redis sent."""


class Resp:
    """A connection to a Redis server; each call fails after ``timeout`` seconds."""

    def __init__(self, address: Address, *, timeout: float = 10.0) -> None:
        """Connect to the server. Raises `OSError`."""
        if isinstance(address, Path):
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.settimeout(timeout)
            try:
                self._socket.connect(str(address))
            except OSError:
                self._socket.close()
                raise
        else:
            self._socket = socket.create_connection(address, timeout)
        self._reader = self._socket.makefile("rb")

    def call(self, *words: str | bytes | float) -> Any:
        """Send one command and return its reply, with bulk strings as bytes. Raises `RedisError` and `OSError`."""
        return self.pipeline([words])[0]

    def pipeline(self, commands: list[tuple[str | bytes | float, ...]]) -> list[Any]:
        """Send several commands at once; return their replies, or raise the first error reply."""
        self._socket.sendall(b"".join(map(_encode, commands)))
        replies = [self._read() for _ in commands]
        for reply in replies:
            if isinstance(reply, RedisError):
                raise reply
        return replies

    def close(self) -> None:
        """Close the connection."""
        self._reader.close()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> Any:
        line = self._reader.readline()
        if not line.endswith(b"\r\n"):
            raise ConnectionResetError("the server closed the connection")
        mark, rest = line[:1], line[1:-2]
        if mark == b"+":
            return rest.decode()
        if mark == b"-":
            return RedisError(rest.decode("utf-8", "replace"))
        if mark == b":":
            return int(rest)
        size = int(rest)
        if size < 0:
            return None
        if mark == b"$":
            return self._reader.read(size + 2)[:-2]
        replies = [self._read() for _ in range(size)]
        for reply in replies:
            if isinstance(reply, RedisError):
                raise reply
        return replies


def _encode(words: tuple[str | bytes | float, ...]) -> bytes:
    parts = [word if isinstance(word, bytes) else str(word).encode() for word in words]
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(p), p) for p in parts)
