"""The pub/sub connection of this process, on which Redis sends notifications."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from taskqueue_redis.addresses import HostAddress
from taskqueue_redis.connection.client import RedisClient
from taskqueue_redis.connection.connection import RedisConnection
from taskqueue_redis.connection.failures import (
    ErrorReply,
    Failure,
    Misconfigured,
    NotReached,
)
from taskqueue_redis.connection.nodes import Backoff
from taskqueue_redis.connection.retrying import LOGGER

# A dead connection is closed after twice this time, so twice this time must be well below 15 seconds.
_QUIET = 5.0  # seconds without data before a PING, and then before the connection is closed
# Maximum number of channels in one SUBSCRIBE command, so that Redis can serve other clients between two commands.
_CHANNELS = 500
_MESSAGE = 3  # number of elements of a pub/sub message, and of a subscription's confirmation


class PubSubListener:
    """A pub/sub client, which calls ``heard(channel, message)`` for each message on a subscribed channel.

    If its connection is lost, it reconnects, subscribes to all channels again, and calls ``reopened()``, because
    messages may have been missed. Both callbacks run in the event loop and must not block.
    It runs from the first `listen` until `aclose`.
    """

    def __init__(
        self,
        link: RedisClient,
        heard: Callable[[str, bytes], None],
        reopened: Callable[[], None],
        *,
        quiet: float = _QUIET,
        patience: float = _QUIET,
    ) -> None:
        """Create the client without connecting.

        ``quiet``: seconds without data before a PING. ``patience``: seconds to wait for the answer to the PING.
        """
        self._link = link
        self._heard = heard
        self._reopened = reopened
        self._quiet = quiet
        self._patience = patience
        self._wanted: set[str] = set()
        self._changed: dict[str, None] = {}
        """channels whose subscription may have to change, in the order of the requests"""
        self._asked: set[str] = set()
        """channels for which SUBSCRIBE was sent on the current connection"""
        self._due: dict[str, int] = {}
        """number of pending confirmations by channel"""
        self._missed: set[str] = set()
        """channels that are not yet confirmed on the current connection"""
        self._listeners: dict[asyncio.Future[None], set[str]] = {}
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._refusal: Failure | None = None
        self._failure: Failure | None = None
        self._worked = False
        self._closed = False

    async def listen(self, *channels: str) -> None:
        """Subscribe to channels, and return once Redis has confirmed all of them.

        Raises a `Failure` after TASKQUEUE_REDIS_OPERATION_TIMEOUT, and `Misconfigured` at once if the configuration
        is wrong. The client continues to subscribe to the channels in the background even after an error.
        """
        if self._closed:
            raise NotReached("the pub/sub client was closed")
        self._wanted.update(channels)
        missing = {channel for channel in channels if not self._confirmed(channel)}
        if not missing:
            return
        self._changed.update(dict.fromkeys(channels))
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._listeners[future] = missing
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="pub/sub listener")
        self._news.set()
        try:
            async with asyncio.timeout(self._link.settings.operation_timeout):
                await future
        except TimeoutError:
            raise self._failure or NotReached("Redis does not confirm a subscription") from None
        finally:
            self._listeners.pop(future, None)

    def ignore(self, *channels: str) -> None:
        """Unsubscribe from channels: ignore their messages from now on, and tell Redis in the background."""
        self._wanted.difference_update(channels)
        self._changed.update(dict.fromkeys(channels))
        self._news.set()

    @property
    def works(self) -> bool:
        """Whether messages on all subscribed channels arrive, as far as this process knows."""
        return self._worked and self._failure is None

    async def aclose(self) -> None:
        """Close the connection. No callback is called after this has returned. Idempotent."""
        self._closed = True
        self._fail(NotReached("the pub/sub client was closed"))
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        backoff = Backoff()
        place: HostAddress | None = None
        while True:
            try:
                place, connection = await self._link.listener(avoid=place)
                try:
                    await self._serve(connection, place, backoff)
                finally:
                    self._asked.clear()
                    await connection.aclose()
            except Failure as failure:
                self._failure = failure
                self._link.trouble.note(failure)
                if isinstance(failure, Misconfigured):
                    self._fail(failure)
            except Exception:  # noqa: BLE001 - without this task no notification arrives, so it must not end
                LOGGER.exception("the pub/sub client failed; restarting it")
                self._failure = NotReached("the pub/sub client failed")
            await asyncio.sleep(backoff.next())

    async def _serve(
        self, connection: RedisConnection, place: HostAddress, backoff: Backoff
    ) -> None:
        """Use a new connection until it ends, and raise the `Failure` that describes why."""
        self._due.clear()
        self._refusal = None
        self._changed = dict.fromkeys(self._wanted)
        self._missed = set(self._wanted)
        working = False
        connection.quiet, connection.patience = self._quiet, self._patience
        connection.listen(self._deliver, self._news.set)
        while connection.lost is None:
            self._news.clear()
            if self._refusal is not None:
                raise self._refusal
            self._subscribe(connection)
            if not working and not self._missed:
                working = True
                backoff.reset()
                self._works()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._quiet):
                    await self._news.wait()
            if not self._link.in_charge(place):
                connection.give_up("another server is the master now")
        raise NotReached(f"the pub/sub connection ended: {connection.lost.reason}")

    def _works(self) -> None:
        again, self._worked, self._failure = self._worked, True, None
        if again:
            LOGGER.info("notifications work again")
            self._call(self._reopened)

    def _subscribe(self, connection: RedisConnection) -> None:
        changed, self._changed = self._changed, {}
        new = [name for name in changed if name in self._wanted and name not in self._asked]
        old = [name for name in changed if name not in self._wanted and name in self._asked]
        for names in _parts(new):
            connection.tell("SUBSCRIBE", *names)
        for names in _parts(old):
            connection.tell("UNSUBSCRIBE", *names)
        for name in new:
            self._due[name] = self._due.get(name, 0) + 1
        self._asked.update(new)
        self._asked.difference_update(old)
        self._missed &= self._wanted

    def _deliver(self, reply: Any) -> None:
        if isinstance(reply, ErrorReply):
            self._refusal = self._link.refused(reply)
            self._news.set()
        elif isinstance(reply, list) and len(reply) == _MESSAGE and reply[0] == b"message":
            channel = reply[1].decode()
            if channel in self._wanted:
                self._call(self._heard, channel, reply[2])
        elif isinstance(reply, list) and len(reply) == _MESSAGE and reply[0] == b"subscribe":
            self._confirm(reply[1].decode())

    def _confirm(self, channel: str) -> None:
        due = self._due.get(channel, 0) - 1
        if due > 0:
            self._due[channel] = due
            return
        self._due.pop(channel, None)
        if self._missed:
            self._missed.discard(channel)
            if not self._missed:
                self._news.set()
        for future, missing in self._listeners.items():
            missing.discard(channel)
            if not missing and not future.done():
                future.set_result(None)

    def _confirmed(self, channel: str) -> bool:
        return channel in self._asked and channel not in self._due

    def _call(self, callback: Callable[..., None], *arguments: object) -> None:
        try:
            callback(*arguments)
        except Exception:  # noqa: BLE001 - a failing callback must not stop later notifications
            LOGGER.exception("a callback for notifications failed")

    def _fail(self, failure: Failure) -> None:
        for future in self._listeners:
            if not future.done():
                future.set_exception(failure)


def _parts(names: list[str]) -> Iterator[list[str]]:
    for start in range(0, len(names), _CHANNELS):
        yield names[start : start + _CHANNELS]
