"""One connection of a worker to a server: reading, writing and the heartbeat."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Callable
from enum import StrEnum

import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed
from websockets.typing import Subprotocol

from taskqueue_core.errors import ProtocolViolation
from taskqueue_core.limits import LIMITS
from taskqueue_core.protocol.client_session import (
    ClientSession,
    ClientSessionState,
    Draining,
    Event,
    Welcomed,
)
from taskqueue_core.protocol.frames import CLOSE_CLEAN, CLOSE_PROTOCOL, SUBPROTOCOL
from taskqueue_core.server_address import ServerAddress

OPEN_SECONDS = 10.0
"""maximum number of seconds for the WebSocket handshake, and again for the server's welcome frame after it"""
_CLOSE_SECONDS = 2.0
_log = logging.getLogger("taskqueue.worker")


class EndKind(StrEnum):
    """The ways in which a connection ends."""

    LEFT = "left"
    """the worker sent a bye frame"""
    DRAINED = "drained"
    """the server is shutting down, and this worker has no deliveries and no unconfirmed outcomes"""
    CLOSED = "closed"
    """the server closed the connection, or the network failed"""
    SILENT = "silent"
    """no frame was received for the time of the lease, or no welcome frame within `OPEN_SECONDS`"""
    VIOLATED = "violated"
    """the server violated the protocol"""


class ConnectionEnd(msgspec.Struct, frozen=True):
    """How and why a connection ended, and the close code, which is ``None`` if there was none."""

    kind: EndKind
    reason: str
    code: int | None = None


class _NoRedirectConnect(connect):
    def process_redirect(self, exc: Exception) -> Exception | str:
        return exc  # do not follow a redirect, because the token must not be sent to another server


async def open_socket(
    address: ServerAddress, token: str | None = None, tls: ssl.SSLContext | None = None
) -> ClientConnection:
    """Open a WebSocket to a server. The token is sent in the Authorization header.

    Compression is off, because payloads are small and a small compressed frame could expand to a huge one.
    """
    secure = address.tls
    return await _NoRedirectConnect(
        address.socket_uri,
        additional_headers=None if token is None else {"Authorization": f"Bearer {token}"},
        ssl=(tls or True) if secure else None,  # True: trust the system's certificate authorities
        subprotocols=[Subprotocol(SUBPROTOCOL)],
        compression=None,
        max_size=LIMITS.frame,
        open_timeout=OPEN_SECONDS,
        close_timeout=_CLOSE_SECONDS,
        ping_interval=None,  # the protocol has ping frames of its own
        proxy=None if address.loopback else True,
    )


class ServerConnection:
    """One connection to a server, which transports the frames of a session. `run` can be called only once."""

    def __init__(
        self,
        socket: ClientConnection,
        session: ClientSession,
        handle: Callable[[list[Event]], None],
    ) -> None:
        """Create a connection. ``handle`` is called with the events of each received frame, and must not block."""
        self._socket = socket
        self._session = session
        self._handle = handle
        self._loop = asyncio.get_running_loop()
        self._received_at = self._loop.time()
        self.has_outgoing = asyncio.Event()
        """an event that is set when the session may have frames to send"""
        self._welcomed = asyncio.Event()

    def abort(self) -> None:
        """Close the TCP connection without a closing handshake, as a crash of this process would."""
        self._socket.transport.abort()

    async def run(self) -> ConnectionEnd:
        """Send and receive frames until the connection ends, close the socket, and return how the connection ended."""
        self._session.connected()
        parts = (self._read(), self._write(), self._watch_pings())
        tasks = [asyncio.create_task(part) for part in parts]
        end: ConnectionEnd | None = None
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            # If several tasks ended at the same time, prefer a reason found by this process to "the socket was closed".
            end = min((task.result() for task in done), key=lambda end: end.kind is EndKind.CLOSED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._session.disconnected()
            await self._close(end)
        return end

    async def _close(self, end: ConnectionEnd | None) -> None:
        if end is None or end.kind is EndKind.SILENT:
            self.abort()
            return
        code = CLOSE_PROTOCOL if end.kind is EndKind.VIOLATED else CLOSE_CLEAN
        await self._socket.close(code, end.reason.encode()[:123].decode("utf-8", "ignore"))

    async def _read(self) -> ConnectionEnd:
        try:
            while True:
                text = await self._socket.recv(decode=False)
                self._received_at = self._loop.time()
                try:
                    events = self._session.receive(text)
                except ProtocolViolation as error:
                    if error.fatal:
                        return ConnectionEnd(EndKind.VIOLATED, str(error))
                    _log.debug("ignored a frame: %s", error)
                    continue
                for event in events:
                    if isinstance(event, Welcomed):
                        self._welcomed.set()
                    elif isinstance(event, Draining):
                        seconds = max(0.0, min(event.seconds, 3600.0))
                        self._loop.call_later(seconds + 1.0, self.abort)
                self._handle(events)
                self.has_outgoing.set()
        except ConnectionClosed:
            return self._closed()

    async def _write(self) -> ConnectionEnd:
        session = self._session
        try:
            while True:
                self.has_outgoing.clear()
                for text in session.outgoing():
                    await self._socket.send(text)
                if session.state is ClientSessionState.CLOSED:
                    return ConnectionEnd(EndKind.LEFT, "bye")
                if session.state is ClientSessionState.DRAINING and not (
                    session.held or session.unconfirmed
                ):
                    return ConnectionEnd(EndKind.DRAINED, "drained")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(session.pause):
                        await self.has_outgoing.wait()
        except ConnectionClosed:
            return self._closed()

    async def _watch_pings(self) -> ConnectionEnd:
        # asyncio.wait_for is not used here, because before Python 3.12 it may lose a cancellation.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(OPEN_SECONDS):
                await self._welcomed.wait()
        lease = self._session.lease
        if not self._welcomed.is_set() or lease is None:
            return ConnectionEnd(EndKind.SILENT, "the server sent no welcome frame")
        overslept = False
        while True:
            now = self._loop.time()
            wait = lease / 3 if overslept else min(lease / 3, self._received_at + lease - now)
            await asyncio.sleep(max(wait, 0.001))
            # If this process was suspended, frames may have arrived that have not been read yet. So do not conclude
            # from this round that the server is silent.
            overslept = self._loop.time() - now > wait + lease / 3
            if self._loop.time() - self._received_at >= lease and not overslept:
                return ConnectionEnd(EndKind.SILENT, f"nothing was received for {lease:g} s")
            self._session.ping()
            self.has_outgoing.set()

    def _closed(self) -> ConnectionEnd:
        code, reason = self._socket.close_code, self._socket.close_reason
        text = f"closed with code {code}" + (f" ({reason})" if reason else "")
        return ConnectionEnd(EndKind.CLOSED, text, code)
