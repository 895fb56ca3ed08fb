"""One connection, which any number of callers use at once.

Commands are written as they come and Redis answers them in order, so the oldest waiting future gets the
next answer. A caller that was cancelled leaves its future behind: the answer is still read, and
thrown away. That makes it impossible for an answer to reach another caller.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias, cast

from hiredis import ProtocolError, Reader, pack_command

from taskqueue_redis.addresses import HostAddress
from taskqueue_redis.config import RedisSettings
from taskqueue_redis.connection.failures import ErrorReply, Lost, Policy, judge, says_denied

Word: TypeAlias = bytes | str | int | float

_pack = cast("Callable[[tuple[Word, ...]], bytes]", pack_command)  # its stub allows one word only

# A peer that vanished while the line was quiet is found by the kernel, in 10 + 3 * 5 s.
_KEEPALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))


class Wire(asyncio.Protocol):
    """A connection that is open, until ``lost`` says why it is not.

    ``answer_timeout``: seconds without any data, while an answer is due, after which it gives itself up.
    ``in_flight``: commands on their way at once; `crowd` lets no more in.
    """

    def __init__(self, answer_timeout: float, in_flight: int) -> None:
        self.lost: Lost | None = None
        self.crowd = asyncio.Semaphore(in_flight)
        """has a place for each command on its way"""
        self._patience = answer_timeout
        self._loop = asyncio.get_running_loop()
        self._reader = Reader(replyError=ErrorReply)
        self._waiting: deque[tuple[asyncio.Future[Any], float]] = deque()
        self._heard = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._deliver: Callable[[Any], None] | None = None
        self._ended: Callable[[], None] | None = None
        self._closed = self._loop.create_future()
        self._transport: asyncio.Transport

    def ask(self, words: tuple[Word, ...], sent: float) -> asyncio.Future[Any]:
        """Send a command whose place is taken; the future gets its answer (errors too), or fails with `Lost`.

        ``sent`` is the loop's time. Raises `Lost` if nothing was sent.
        """
        if not self.open:
            self.crowd.release()  # closing: its end is known, and is about to be told
            raise Lost(self.lost.reason if self.lost else "the connection ended", sent=False)
        try:
            packed = _pack(words)
        except BaseException:
            self.crowd.release()
            raise
        future: asyncio.Future[Any] = self._loop.create_future()
        self._waiting.append((future, sent))
        if self._timer is None:
            self._timer = self._loop.call_at(sent + self._patience, self._check)
        self._transport.write(packed)
        return future

    async def call(self, *words: Word) -> Any:
        """Send a command, return its answer. Raises `Lost`, and `ErrorReply` for an error."""
        await self.crowd.acquire()
        reply = await self.ask(words, self._loop.time())
        if isinstance(reply, ErrorReply):
            raise reply
        return reply

    @property
    def open(self) -> bool:
        """Whether a command can be sent."""
        return self.lost is None and not self._transport.is_closing()

    @property
    def idle(self) -> bool:
        """Whether it is open and owes no answer."""
        return self.open and not self._waiting

    def listen(self, deliver: Callable[[Any], None], ended: Callable[[], None]) -> None:
        """From now on nothing is asked: whatever comes is delivered, and its end is told."""
        self._deliver, self._ended = deliver, ended

    def tell(self, *words: Word) -> None:
        """Send a command whose answer, if any, is delivered to who listens."""
        if self.lost is None:
            self._transport.write(_pack(words))

    def give_up(self, reason: str) -> None:
        """End it at once; who waits for an answer gets `Lost`."""
        if self.lost is None:
            self._end(reason)
            self._transport.abort()

    async def aclose(self) -> None:
        """End it, and wait until the socket is closed."""
        self.give_up("the connection was closed here")
        await asyncio.shield(self._closed)

    # What asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's is one in all but its base class
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        reader, waiting = self._reader, self._waiting
        self._heard = self._loop.time()
        reader.feed(data)
        try:
            if self._deliver is not None:
                while (reply := reader.gets()) is not False:
                    self._deliver(reply)
                return
            while (reply := reader.gets()) is not False:
                if not waiting:
                    self.give_up(f"Redis said what nobody asked for: {_shown(reply)}")
                    return
                future, _ = waiting.popleft()
                self.crowd.release()
                if not future.done():
                    future.set_result(reply)
        except ProtocolError:
            self.give_up("what came does not follow Redis' protocol")

    def connection_lost(self, error: Exception | None) -> None:
        self._end(_reason(error))
        if not self._closed.done():
            self._closed.set_result(None)

    def _end(self, reason: str) -> None:
        if self.lost is not None:
            return
        self.lost = Lost(reason, sent=True)
        if self._timer is not None:
            self._timer.cancel()
        for future, _ in self._waiting:
            self.crowd.release()  # who waits for a place comes to know
            if not future.done():
                future.set_exception(Lost(reason, sent=True))
        self._waiting.clear()
        if self._ended is not None:
            self._ended()

    def _check(self) -> None:
        # One timer for all: the oldest waits longest. A line that moves is not dead,
        # so the last data count too.
        self._timer = None
        if not self._waiting:
            return
        due = max(self._waiting[0][1], self._heard) + self._patience
        if self._loop.time() >= due:
            self.give_up("no answer within TASKQUEUE_REDIS_ANSWER_TIMEOUT")
        else:
            self._timer = self._loop.call_at(due, self._check)


async def open_wire(
    place: HostAddress,
    settings: RedisSettings,
    *,
    sentinel: bool = False,
    in_flight: int | None = None,
) -> Wire:
    """Connect and log in. Raises `OSError`, `TimeoutError`, `Lost`, `ErrorReply`, `ConfigurationError`."""
    settings.refuse_exposed(place)
    loop = asyncio.get_running_loop()

    def make() -> Wire:
        return Wire(settings.answer_timeout, in_flight or settings.in_flight)

    context = settings.tls_context
    async with asyncio.timeout(settings.connect_timeout):
        if place.path:
            _, wire = await loop.create_unix_connection(make, place.path)
        else:
            _, wire = await loop.create_connection(
                make,
                place.host,
                place.port,
                ssl=context,
                ssl_handshake_timeout=settings.connect_timeout if context else None,
            )
            _keep_alive(wire)
        try:
            await _log_in(wire, settings, sentinel=sentinel)
        except BaseException:
            wire.give_up("the login failed")
            raise
    return wire


async def _log_in(wire: Wire, settings: RedisSettings, *, sentinel: bool) -> None:
    user, password = settings.user_name, settings.password_now()
    if sentinel:
        secret = settings.sentinel_password
        user, password = settings.sentinel_user, secret.get_secret_value() if secret else ""
    if password:
        await wire.call("AUTH", *((user, password) if user else (password,)))
    if settings.address.database and not sentinel:
        await wire.call("SELECT", settings.address.database)
    try:
        # The name helps operators; and a server that has no connection left says so in answer to something.
        await wire.call("CLIENT", "SETNAME", "taskqueue")
    except ErrorReply as error:
        policy, failure = judge(error)
        if not says_denied(failure) and policy is not Policy.RAISE:
            raise


def _keep_alive(wire: Wire) -> None:
    peer = wire._transport.get_extra_info("socket")  # noqa: SLF001 - its maker's right
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):  # not on every system
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _reason(error: Exception | None) -> str:
    if error is None:
        return "Redis closed the connection"
    return getattr(error, "strerror", None) or type(error).__name__


def _shown(reply: Any) -> str:
    if isinstance(reply, ErrorReply):
        return str(judge(reply)[1])
    return type(reply).__name__
