"""One connection of this process on which Redis says that there is something new."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from taskqueue_redis.addresses import HostAddress
from taskqueue_redis.connection.client import Link
from taskqueue_redis.connection.connection import Wire
from taskqueue_redis.connection.failures import (
    ErrorReply,
    Failure,
    Misconfigured,
    NotReached,
    judge,
)
from taskqueue_redis.connection.nodes import Backoff
from taskqueue_redis.connection.retrying import LOGGER

# A connection whose peer vanished is given up after both, which is well within 15 s.
_QUIET = 5.0
_PATIENCE = 5.0
_CHANNELS = 500  # of one SUBSCRIBE: short enough for Redis to serve others in between
_MESSAGE = 3  # parts of a message, and of a confirmation


class Doorbell:
    """Calls ``heard(channel, message)`` for what is published on wanted channels.

    After a loss it connects again by itself, subscribes again, and calls ``reopened()``: rings may
    have been missed. Both callbacks are called in the event loop, between awaits.
    Works from the first `listen` until `aclose`.
    """

    def __init__(
        self,
        link: Link,
        heard: Callable[[str, bytes], None],
        reopened: Callable[[], None],
        *,
        quiet: float = _QUIET,
        patience: float = _PATIENCE,
    ) -> None:
        """Do no input or output. ``quiet``: seconds of silence before a PING; ``patience``: to wait for its answer."""
        self._link = link
        self._heard = heard
        self._reopened = reopened
        self._quiet = quiet
        self._patience = patience
        self._wanted: set[str] = set()
        self._changed: dict[str, None] = {}
        """channels that Redis may have to be told of, in this order"""
        self._asked: set[str] = set()
        """channels that Redis was told of, on the connection that there is"""
        self._due: dict[str, int] = {}
        """channels whose confirmation is on its way, and how often"""
        self._missed: set[str] = set()
        """what has to be confirmed before the bell works again"""
        self._listeners: dict[asyncio.Future[None], set[str]] = {}
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._last = 0.0
        self._pinged = False
        self._refusal: Failure | None = None
        self._failure: Failure | None = None
        self._worked = False
        self._closed = False

    async def listen(self, *channels: str) -> None:
        """Return once Redis has confirmed the channels; they stay wanted whatever happens.

        Raises `NotReached` if that takes longer than TASKQUEUE_REDIS_OPERATION_TIMEOUT, and
        `Misconfigured` at once where the installation is wrong; goes on trying all the same.
        """
        if self._closed:
            raise NotReached("the doorbell was closed")
        self._wanted.update(channels)
        missing = {channel for channel in channels if not self._confirmed(channel)}
        if not missing:
            return
        self._changed.update(dict.fromkeys(channels))
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._listeners[future] = missing
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="doorbell")
        self._news.set()
        try:
            async with asyncio.timeout(self._link.settings.operation_timeout):
                await future
        except TimeoutError:
            raise self._failure or NotReached("Redis does not confirm a subscription") from None
        finally:
            self._listeners.pop(future, None)

    def ignore(self, *channels: str) -> None:
        """Want the channels no longer; Redis is told soon, in the background."""
        self._wanted.difference_update(channels)
        self._changed.update(dict.fromkeys(channels))
        self._news.set()

    @property
    def works(self) -> bool:
        """Whether it hears what is wanted, as far as can be known."""
        return self._worked and self._failure is None

    async def aclose(self) -> None:
        """End it. When this returns nothing is called any more. Idempotent."""
        self._closed = True
        self._tell(NotReached("the doorbell was closed"))
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    # The task

    async def _run(self) -> None:
        backoff = Backoff()
        place: HostAddress | None = None
        while True:
            try:
                place, wire = await self._link.listener(avoid=place)
                try:
                    await self._serve(wire, place, backoff)
                finally:
                    self._asked.clear()
                    await wire.aclose()
            except Failure as failure:
                self._failure = failure
                self._link.trouble.note(failure)
                if isinstance(failure, Misconfigured):
                    self._tell(failure)
            except Exception:  # noqa: BLE001 - whatever it was: a bell that nobody hears must not go unnoticed
                LOGGER.exception("the doorbell failed, and begins anew")
                self._failure = NotReached("the doorbell failed")
            await asyncio.sleep(backoff.next())

    async def _serve(self, wire: Wire, place: HostAddress, backoff: Backoff) -> None:
        """Serve as long as the connection is of use. Raises the `Failure` that ended it."""
        self._due.clear()
        self._refusal = None
        self._changed = dict.fromkeys(self._wanted)
        self._missed = set(self._wanted)
        working = False
        loop = asyncio.get_running_loop()
        self._last, self._pinged = loop.time(), False
        wire.listen(self._deliver, self._news.set)
        while wire.lost is None:
            self._news.clear()
            if self._refusal is not None:
                raise self._refusal
            self._subscribe(wire)
            if not working and not self._missed:
                working = True
                backoff.reset()
                self._works()
            due = self._last + self._quiet + self._patience * self._pinged
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(due):
                    await self._news.wait()
            if loop.time() >= due:
                self._look_at(wire, place)
        raise NotReached(f"the doorbell's connection ended: {wire.lost.reason}")

    def _works(self) -> None:
        again, self._worked, self._failure = self._worked, True, None
        if again:
            LOGGER.info("the doorbell works again")
            self._call(self._reopened)

    def _subscribe(self, wire: Wire) -> None:
        changed, self._changed = self._changed, {}
        new = [name for name in changed if name in self._wanted and name not in self._asked]
        old = [name for name in changed if name not in self._wanted and name in self._asked]
        for names in _parts(new):
            wire.tell("SUBSCRIBE", *names)
        for names in _parts(old):
            wire.tell("UNSUBSCRIBE", *names)
        for name in new:
            self._due[name] = self._due.get(name, 0) + 1
        self._asked.update(new)
        self._asked.difference_update(old)
        self._missed &= self._wanted

    def _look_at(self, wire: Wire, place: HostAddress) -> None:
        if not self._link.in_charge(place):
            wire.give_up("another server is in charge now")
        elif self._pinged:
            wire.give_up("silence")
        elif asyncio.get_running_loop().time() - self._last >= self._quiet:
            self._pinged = True
            wire.tell("PING")

    # What Redis says

    def _deliver(self, reply: Any) -> None:
        self._last, self._pinged = asyncio.get_running_loop().time(), False
        if isinstance(reply, ErrorReply):
            self._refusal = judge(reply)[1]
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
        except Exception:  # noqa: BLE001 - the bell must go on ringing for the others
            LOGGER.exception("a listener of the doorbell failed")

    def _tell(self, failure: Failure) -> None:
        for future in self._listeners:
            if not future.done():
                future.set_exception(failure)


def _parts(names: list[str]) -> Iterator[list[str]]:
    for start in range(0, len(names), _CHANNELS):
        yield names[start : start + _CHANNELS]
