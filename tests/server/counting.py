"""Count what a server in this process reads from its clients in each turn of the event loop, and what it holds."""

from __future__ import annotations

import asyncio
from asyncio import sslproto
from collections import Counter
from typing import Any

import h11
import pytest
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.server import ServerProtocol


class Counts:
    """Bytes that were parsed in each turn and for each connection, and the most that one connection held."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Count from now on. Only servers may use h11 and the server side of TLS and websockets in this process."""
        self.turn = 0
        self.by_turn: Counter[tuple[str, int]] = Counter()
        self.by_connection: Counter[tuple[str, int]] = Counter()
        self.most_held = 0
        self._open: dict[int, Any] = {}
        loop: Any = asyncio.get_running_loop()
        run_once = loop._run_once

        def counted_turn() -> None:
            self.turn += 1
            run_once()
            for protocol in self._open.values():
                self.most_held = max(self.most_held, _held(protocol))

        monkeypatch.setattr(loop, "_run_once", counted_turn)
        self._watch(monkeypatch, h11.Connection, "receive_data", "http", len)
        self._watch(monkeypatch, ServerProtocol, "receive_data", "frames", len)
        self._watch(monkeypatch, sslproto.SSLProtocol, "buffer_updated", "tls", int)
        for kind in (H11Protocol, WebSocketsSansIOProtocol):
            self._register(monkeypatch, kind)

    @property
    def longest_turn(self) -> int:
        """The largest number of bytes of one layer (TLS, HTTP or websocket) that were parsed in one turn."""
        return max(self.by_turn.values())

    def _watch(
        self, monkeypatch: pytest.MonkeyPatch, kind: Any, name: str, layer: str, size: Any
    ) -> None:
        parse = getattr(kind, name)

        def counted(protocol: Any, data: Any) -> Any:
            if layer != "tls" or protocol._server_side:
                self.by_turn[layer, self.turn] += size(data)
                self.by_connection[layer, id(protocol)] += size(data)
            return parse(protocol, data)

        monkeypatch.setattr(kind, name, counted)

    def _register(self, monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
        made, lost = kind.connection_made, kind.connection_lost

        def connection_made(protocol: Any, transport: Any) -> None:
            self._open[id(protocol)] = protocol
            made(protocol, transport)

        def connection_lost(protocol: Any, exc: Any) -> None:
            self._open.pop(id(protocol), None)
            lost(protocol, exc)

        monkeypatch.setattr(kind, "connection_made", connection_made)
        monkeypatch.setattr(kind, "connection_lost", connection_lost)


def _held(protocol: Any) -> int:
    """Return the number of bytes in all buffers of a connection."""
    unread = len(getattr(protocol, "_unread", b"")) - getattr(protocol, "_read_bytes", 0)
    closed = protocol.transport.is_closing()  # then a TLS transport has no buffers
    written = 0 if closed else int(protocol.transport.get_write_buffer_size())
    if isinstance(protocol, H11Protocol):
        cycle: Any = protocol.cycle
        body = cycle.body if cycle else b""
        return unread + written + len(body) + len(protocol.conn.trailing_data[0])
    messages = sum(len(str(event)) for event in protocol.queue._queue)
    fragments = sum(map(len, protocol.frames)) if hasattr(protocol, "frames") else 0
    return unread + written + messages + fragments + len(protocol.conn.reader.buffer)
