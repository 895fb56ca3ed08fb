"""Coalescing of calls: a call is sent at once; calls that are made while it is in progress are then sent together."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Generic, TypeVar

from taskqueue_core.limits import LIMITS

Item = TypeVar("Item")
Answer = TypeVar("Answer")


_BYTES = 4 * 1024 * 1024
"""number of bytes after which a script call passes no further items, so that it blocks Redis only briefly"""


def split(
    items: Sequence[Item], most: int, size: Callable[[Item], int]
) -> Iterator[Sequence[Item]]:
    """Divide items into parts for one script call each: at most ``most`` items, and fewer if they are large."""
    if len(items) <= most and sum(map(size, items)) < _BYTES:
        yield items
        return
    start = total = 0
    for end, item in enumerate(items):
        if end - start == most or total >= _BYTES:
            yield items[start:end]
            start, total = end, 0
        total += size(item)
    if start < len(items):
        yield items[start:]


class Coalescer(Generic[Item, Answer]):
    """Sends items in batches and in order, with at most one batch in progress per partition.

    Even if a caller is cancelled, the items of its call (at most `LIMITS.batch`) are passed to
    ``send`` together or not at all.
    """

    def __init__(self, send: Callable[[str, Sequence[Item]], Awaitable[Sequence[Answer]]]) -> None:
        """Create a coalescer. ``send`` takes up to `LIMITS.batch` items of a partition and returns their answers."""
        self._send = send
        self._lines: dict[str, _Line[Item, Answer]] = {}

    async def submit(self, partition: str, items: Sequence[Item]) -> Sequence[Answer]:
        """Send items, and return an answer for each item. Raises the error of ``send``."""
        line = self._lines.get(partition)
        if line is None:
            line = self._lines[partition] = _Line(partial(self._send, partition))
        if len(items) <= LIMITS.batch:
            return await line.submit(items)
        answers: list[Answer] = []
        for start in range(0, len(items), LIMITS.batch):
            answers += await line.submit(items[start : start + LIMITS.batch])
        return answers

    async def sent(self) -> None:
        """Wait until all items that have been submitted so far are answered."""
        for line in tuple(self._lines.values()):
            if line.busy:
                with contextlib.suppress(
                    Exception
                ):  # the calls that submitted the items raise the error
                    await line.submit(())


class _Line(Generic[Item, Answer]):
    """The batches of one partition."""

    def __init__(self, send: Callable[[Sequence[Item]], Awaitable[Sequence[Answer]]]) -> None:
        self.busy = False
        self._send = send
        self._waiting: deque[tuple[Sequence[Item], asyncio.Future[Sequence[Answer]]]] = deque()
        self._rest: asyncio.Task[None] | None = None
        """task that sends the items that were submitted while another batch was in progress"""

    async def submit(self, items: Sequence[Item]) -> Sequence[Answer]:
        if self.busy:
            answer: asyncio.Future[Sequence[Answer]] = asyncio.get_running_loop().create_future()
            self._waiting.append((items, answer))
            return await answer
        self.busy = True
        try:
            return await self._send(items)
        finally:
            if self._waiting:
                self._rest = asyncio.create_task(self._send_rest())
            else:
                self.busy = False

    async def _send_rest(self) -> None:
        try:
            while self._waiting:
                await self._send_next()
        finally:
            self.busy = False
            self._rest = None
            while (
                self._waiting
            ):  # reached only if this task was cancelled because the event loop stops
                self._waiting.popleft()[1].cancel()

    async def _send_next(self) -> None:
        items, first = self._waiting.popleft()
        callers = [(len(items), first)]
        batch = list(items)
        while self._waiting and len(batch) + len(self._waiting[0][0]) <= LIMITS.batch:
            more, caller = self._waiting.popleft()
            callers.append((len(more), caller))
            batch.extend(more)
        try:
            answers = await self._send(batch) if batch else ()
        except Exception as error:  # noqa: BLE001 - the error is raised in every caller
            for _, caller in callers:
                if not caller.done():
                    caller.set_exception(error)
            return
        except BaseException:
            for _, caller in callers:
                caller.cancel()
            raise
        start = 0
        for number, caller in callers:
            if not caller.done():
                caller.set_result(answers[start : start + number])
            start += number
