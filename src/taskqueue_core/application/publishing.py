"""Publishing calls of declared tasks together, each through its middleware."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any

from taskqueue_core.application.call import Call, PublishMiddleware
from taskqueue_core.application.handles import Handle, handled_id
from taskqueue_core.concurrency import gather_all
from taskqueue_core.errors import ConfigurationError, InvalidInput
from taskqueue_core.limits import LIMITS, kind_of
from taskqueue_core.queue import Queue
from taskqueue_core.tasks import Confirmation, Task

Send = Callable[[Call[Any]], Awaitable[Confirmation]]


def checked_calls(calls: object) -> list[Call[Any]]:
    """Return calls as a list. Raises `InvalidInput` if they are something else."""
    several = isinstance(calls, Iterable)
    given: list[Any] = list(calls) if isinstance(calls, Iterable) else [calls]
    wrong = [each for each in given if not isinstance(each, Call)]
    if wrong or not several:
        for each in wrong:
            if inspect.iscoroutine(each):  # of a publish, which was not awaited
                each.close()
        got = kind_of(wrong[0]) if wrong else "one call"
        raise InvalidInput("calls", got, "calls, as in publish_many([resize.call('cat.png')])")
    return given


async def publish_calls(queue: Queue, calls: Sequence[Call[Any]], wait: float) -> list[Handle[Any]]:
    """Publish calls in batches, and return their handles in order; a refused call has one, too."""
    if any(call.function.middleware for call in calls):
        confirmations: Sequence[Confirmation] = await _publish_through(queue, calls, wait)
    else:
        tasks = [await call.task(queue) for call in calls]
        confirmations = await queue.publish_many(tasks, wait=wait)
    return [
        Handle(
            each.key,
            handled_id(each),
            queue,
            call.function.read_result,
            each,
            encoding=call.function.encoding,
        )
        for call, each in zip(calls, confirmations, strict=True)
    ]


async def _publish_through(
    queue: Queue, calls: Sequence[Call[Any]], wait: float
) -> list[Confirmation]:
    loop = asyncio.get_running_loop()
    end = loop.time() + wait

    async def send(tasks: Sequence[tuple[int, Task]]) -> Sequence[Confirmation]:
        remaining = max(0.0, end - loop.time())
        return await queue.publish_many([task for _, task in tasks], wait=remaining)

    confirmations = []
    for start in range(0, len(calls), LIMITS.batch):
        batch = calls[start : start + LIMITS.batch]
        confirmations += await publish_together(batch, lambda call: call.task(queue), send)
    return confirmations


async def publish_together(
    calls: Sequence[Call[Any]],
    encode: Callable[[Call[Any]], Awaitable[Task]],
    send: Callable[[Sequence[tuple[int, Task]]], Awaitable[Sequence[Confirmation]]],
) -> list[Confirmation]:
    """Publish calls through the middleware of each, and return the confirmations in order.

    ``send`` gets the tasks that ``encode`` makes of the calls, with the positions of these, once the middleware of each
    call has sent its call or ended.
    """
    return await _Batch(encode, send).publish(calls)


class _Batch:
    """Calls whose tasks are sent together, as soon as the middleware of each has sent its call or ended."""

    def __init__(
        self,
        encode: Callable[[Call[Any]], Awaitable[Task]],
        send: Callable[[Sequence[tuple[int, Task]]], Awaitable[Sequence[Confirmation]]],
    ) -> None:
        self._encode = encode
        self._send_all = send
        self._loop = asyncio.get_running_loop()
        self._active = 0
        self._waiting: list[tuple[int, Task, asyncio.Future[Confirmation]]] = []
        self._sending: set[asyncio.Task[None]] = set()

    async def publish(self, calls: Sequence[Call[Any]]) -> list[Confirmation]:
        self._active = len(calls)
        running = [
            self._loop.create_task(self._through(place, call)) for place, call in enumerate(calls)
        ]
        try:
            return await gather_all(running)
        finally:
            unfinished = [each for each in (*running, *self._sending) if not each.done()]
            for each in unfinished:
                each.cancel()
            await asyncio.gather(*unfinished, return_exceptions=True)

    async def _through(self, place: int, call: Call[Any]) -> Confirmation:
        send: Send = partial(self._send, place)
        for middleware in reversed(call.function.middleware):
            send = _around(middleware, send)
        try:
            return await send(call)
        finally:
            self._active -= 1
            self._send_waiting()

    async def _send(self, place: int, call: Call[Any]) -> Confirmation:
        answer: asyncio.Future[Confirmation] = self._loop.create_future()
        self._waiting.append((place, await self._encode(call), answer))
        self._send_waiting()
        return await answer

    def _send_waiting(self) -> None:
        if self._waiting and len(self._waiting) >= self._active:
            waiting, self._waiting = self._waiting, []
            sending = self._loop.create_task(self._publish(waiting))
            self._sending.add(sending)
            sending.add_done_callback(self._sending.discard)

    async def _publish(self, waiting: list[tuple[int, Task, asyncio.Future[Confirmation]]]) -> None:
        try:
            confirmations = await self._send_all([(place, task) for place, task, _ in waiting])
        except Exception as error:  # noqa: BLE001 - the middleware gets the error
            for _, _, answer in waiting:
                if not answer.done():
                    answer.set_exception(error)
            return
        for (_, _, answer), confirmation in zip(waiting, confirmations, strict=True):
            if not answer.done():
                answer.set_result(confirmation)


def _around(middleware: PublishMiddleware, send: Send) -> Send:
    async def publish(call: Call[Any]) -> Confirmation:
        confirmation = await middleware.publish(call, send)
        if not isinstance(confirmation, Confirmation):
            raise ConfigurationError(
                f"{type(middleware).__name__}.publish returned a {type(confirmation).__name__}; expected the "
                "confirmation: write 'return await send(call)'"
            )
        return confirmation

    return publish
