"""One connection to Redis, which any number of callers use at the same time.

Redis answers commands in the order in which they were sent, so each answer completes the oldest pending future. The
future of a cancelled caller stays in the queue, and its answer is read and dropped. Therefore no caller can receive
the answer to another caller's command.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias, cast

from hiredis import PushNotification, pack_command

from taskqueue_redis.config import RedisSettings
from taskqueue_redis.connection.failures import ErrorReply, Lost, classify

Word: TypeAlias = bytes | str | int | float

# The type stub of hiredis allows only one argument.
_pack = cast("Callable[[tuple[Word, ...]], bytes]", pack_command)

_QUIET = 30.0
_CONFIRMATIONS = {b"subscribe", b"unsubscribe"}
"""push messages of RESP3 that answer a command; other push messages are ignored"""


class RedisConnection(asyncio.Protocol):
    """A connection to Redis.

    It takes over the socket and the parser of a connection of redis-py that has logged in. Once it
    has ended, ``lost`` is the reason. After `quiet` seconds without data it sends a PING, and after `patience` seconds
    without data it closes itself if an answer is pending.
    """

    def __init__(self, opened: Any, incomplete: object, settings: RedisSettings) -> None:
        """Take over ``opened``, whose parser returns ``incomplete`` until it has a whole reply. Raises `Lost`."""
        self.lost: Lost | None = None
        self.crowd = asyncio.Semaphore(settings.in_flight)
        """acquired before each command is sent, and released with its answer"""
        self.quiet = settings.address.options.get("health_check_interval", _QUIET) or math.inf
        self.patience = settings.answer_timeout
        self.loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[asyncio.Future[Any] | None, float]] = deque()
        """pending answers, with the time of their commands; None for a PING of `check`"""
        self._heard = self.loop.time()
        self._pinged = 0.0
        """time of a PING that is unanswered, after `listen`"""
        self._timer: asyncio.TimerHandle | None = None
        self._deliver: Callable[[Any], None] | None = None
        self._ended: Callable[[], None] | None = None
        self._closed = self.loop.create_future()
        self._incomplete = incomplete
        # The objects of redis-py would close the socket if they were deleted.
        stream, self._writer, self._reader = opened._reader, opened._writer, opened._parser._reader  # noqa: SLF001
        self._transport: asyncio.Transport = self._writer.transport
        if self._transport.is_closing() or stream.at_eof():
            raise Lost("Redis closed the connection", sent=False)
        opened._reader = opened._writer = None  # noqa: SLF001
        self._transport.set_protocol(self)
        self._transport.resume_reading()
        self.check()
        if rest := bytes(stream._buffer):  # noqa: SLF001 - what redis-py has received, but not parsed
            self.data_received(rest)

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
        future: asyncio.Future[Any] = self.loop.create_future()
        self._waiting.append((future, sent))
        self._transport.write(packed)
        return future

    async def call(self, *words: Word) -> Any:
        """Send a command and return the reply. Raises `ErrorReply` for an error reply, and `Lost`."""
        await self.crowd.acquire()
        reply = await self.ask(words, self.loop.time())
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
        self.check()

    @property
    def listening(self) -> bool:
        """Whether `listen` was called."""
        return self._deliver is not None

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

    def data_received(self, data: bytes) -> None:
        reader, waiting, incomplete = self._reader, self._waiting, self._incomplete
        self._heard, self._pinged = self.loop.time(), 0.0
        reader.feed(data)
        try:
            if self._deliver is not None:
                while (reply := reader.gets()) is not incomplete:
                    self._deliver(reply)
                return
            while (reply := reader.gets()) is not incomplete:
                if type(reply) is PushNotification and reply[0] not in _CONFIRMATIONS:
                    continue
                if not waiting:
                    self.give_up(f"unexpected message from Redis: {_shown(reply)}")
                    return
                future, _ = waiting.popleft()
                if future is None:
                    continue
                self.crowd.release()
                if not future.done():
                    future.set_result(reply)
        except Exception:  # noqa: BLE001 - the parser of redis-py raises errors of redis-py
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
            if future is None:
                continue
            self.crowd.release()  # a caller that waits for the semaphore finds the connection closed
            if not future.done():
                future.set_exception(Lost(reason, sent=True))
        self._waiting.clear()
        if self._ended is not None:
            self._ended()

    def check(self) -> None:
        """Close the connection if an answer is overdue, send a PING if it is idle, and plan the next check."""
        # One timer is enough, because the oldest command waits longest. While data arrives, the connection works,
        # so each piece of data restarts the time limits.
        if self._timer is not None:
            self._timer.cancel()
        if self.lost is not None:
            return
        now = self.loop.time()
        sent = self._waiting[0][1] if self._waiting else self._pinged
        if sent and now >= max(sent, self._heard) + self.patience:
            self.give_up("no answer within TASKQUEUE_REDIS_ANSWER_TIMEOUT")
            return
        if not sent and now >= self._heard + self.quiet:
            sent = now
            if self._deliver is None:
                self._waiting.append((None, now))
            else:
                self._pinged = now
            self._transport.write(_pack(("PING",)))
        due = max(sent, self._heard) + self.patience if sent else self._heard + self.quiet
        # The next check is early enough for a command that is sent before it.
        self._timer = self.loop.call_at(min(due, now + min(self.quiet, self.patience)), self.check)


def _reason(error: Exception | None) -> str:
    if error is None:
        return "Redis closed the connection"
    return getattr(error, "strerror", None) or type(error).__name__


def _shown(reply: Any) -> str:
    if isinstance(reply, ErrorReply):
        return str(classify(reply)[1])
    return type(reply).__name__
