"""One connection to Redis, which any number of callers use at the same time.

Redis answers commands in the order in which they were sent, so each answer completes the oldest pending future. The
future of a cancelled caller stays in the queue, and its answer is read and dropped. Therefore no caller can receive
the answer to another caller's command.
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

# The type stub of hiredis allows only one argument.
_pack = cast("Callable[[tuple[Word, ...]], bytes]", pack_command)

# On an idle connection, the kernel detects a vanished peer within 10 + 3 * 5 seconds.
_KEEPALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))


class Wire(asyncio.Protocol):
    """A connection to Redis. Once it has ended, ``lost`` is the reason.

    ``answer_timeout``: seconds without any data after which the connection closes itself if an answer is pending.
    ``in_flight``: maximum number of commands that wait for an answer; the semaphore `crowd` counts them.
    """

    def __init__(self, answer_timeout: float, in_flight: int) -> None:
        self.lost: Lost | None = None
        self.crowd = asyncio.Semaphore(in_flight)
        """acquired before each command is sent, and released with its answer"""
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
        """Send a command and return a future for its reply. The caller must have acquired `crowd` for the command.

        An error reply is the future's result, not its exception. The future fails with `Lost` if the connection ends.
        ``sent``: the event loop's current time. Raises `Lost` if the command was not sent.
        """
        if not self.open:
            self.crowd.release()  # because no answer will arrive that would release it
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
        """Send a command and return the reply. Raises `ErrorReply` for an error reply, and `Lost`."""
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
        """Whether the connection is open and no answer is pending."""
        return self.open and not self._waiting

    def listen(self, deliver: Callable[[Any], None], ended: Callable[[], None]) -> None:
        """Switch to pub/sub: pass all that Redis sends to ``deliver``; call ``ended`` when the connection ends.

        After this call, commands may be sent only by `tell`.
        """
        self._deliver, self._ended = deliver, ended

    def tell(self, *words: Word) -> None:
        """Send a command after `listen`; its answer is passed to ``deliver`` like any message."""
        if self.lost is None:
            self._transport.write(_pack(words))

    def give_up(self, reason: str) -> None:
        """Close the connection at once; calls that wait for an answer raise `Lost` with this reason."""
        if self.lost is None:
            self._end(reason)
            self._transport.abort()

    async def aclose(self) -> None:
        """Close the connection, and wait until the socket is closed."""
        self.give_up("this process closed the connection")
        await asyncio.shield(self._closed)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport has all methods of `asyncio.Transport`, but does not inherit from it
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
                    self.give_up(f"unexpected message from Redis: {_shown(reply)}")
                    return
                future, _ = waiting.popleft()
                self.crowd.release()
                if not future.done():
                    future.set_result(reply)
        except ProtocolError:
            self.give_up("Redis sent data that violates its protocol")

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
            self.crowd.release()  # a caller that waits for the semaphore finds the connection closed
            if not future.done():
                future.set_exception(Lost(reason, sent=True))
        self._waiting.clear()
        if self._ended is not None:
            self._ended()

    def _check(self) -> None:
        # One timer is enough, because the oldest command waits longest. While data arrives, the connection works,
        # so each piece of data starts the time limit again.
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
    """Connect to a server and log in with the user and password of ``settings``.

    Raises `OSError`, `TimeoutError`, `Lost`, `ErrorReply` or `ConfigurationError`.
    """
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
        # The name helps operators. This command also shows whether the server has too many connections: the server
        # reports that in its answer to the first command, and this command is the first if there is no password.
        await wire.call("CLIENT", "SETNAME", "taskqueue")
    except ErrorReply as error:
        policy, failure = judge(error)
        if not says_denied(failure) and policy is not Policy.RAISE:
            raise


def _keep_alive(wire: Wire) -> None:
    peer = wire._transport.get_extra_info("socket")  # noqa: SLF001 - the class is defined in this module
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):  # not every operating system has all three options
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _reason(error: Exception | None) -> str:
    if error is None:
        return "Redis closed the connection"
    return getattr(error, "strerror", None) or type(error).__name__


def _shown(reply: Any) -> str:
    if isinstance(reply, ErrorReply):
        return str(judge(reply)[1])
    return type(reply).__name__
