"""Calls that come while one is under way go together in the next one; a lone one goes at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class Coalescer(Generic[Item, Answer]):
    """Sends items in batches, one batch at a time, in their order.

    A caller that is cancelled leaves its items to be sent: they are done whole or not at all.
    """

    def __init__(
        self, send: Callable[[Sequence[Item]], Awaitable[Sequence[Answer]]], most: int
    ) -> None:
        """Send by ``send``, which answers each item; up to ``most`` items at once.

        ``send`` must bear being cancelled.
        """
        self._send = send
        self._most = most
        self._waiting: deque[tuple[Sequence[Item], asyncio.Future[Sequence[Answer]]]] = deque()
        self._busy = False
        self._rest: asyncio.Task[None] | None = None
        """sends what came while the lone one that found nothing under way was sent"""

    async def submit(self, items: Sequence[Item]) -> Sequence[Answer]:
        """Return the answers, or raise what sending the batch raised. More items than a batch go in several."""
        if len(items) > self._most:
            answers: list[Answer] = []
            for start in range(0, len(items), self._most):
                answers += await self._submit(items[start : start + self._most])
            return answers
        return await self._submit(items)

    async def _submit(self, items: Sequence[Item]) -> Sequence[Answer]:
        if self._busy:
            answer: asyncio.Future[Sequence[Answer]] = asyncio.get_running_loop().create_future()
            self._waiting.append((items, answer))
            return await answer
        self._busy = True
        try:
            return await self._send(items)
        finally:
            if self._waiting:
                self._rest = asyncio.create_task(self._send_rest())
            else:
                self._busy = False

    async def sent(self) -> None:
        """Wait until what was submitted before has been answered."""
        if self._busy:
            with contextlib.suppress(Exception):  # its callers get the failure
                await self.submit(())

    async def _send_rest(self) -> None:
        try:
            while self._waiting:
                await self._send_next()
        finally:
            self._busy = False
            self._rest = None
            while self._waiting:  # only where the loop itself was ended
                self._waiting.popleft()[1].cancel()

    async def _send_next(self) -> None:
        items, first = self._waiting.popleft()
        callers = [(len(items), first)]
        batch = list(items)
        while self._waiting and len(batch) + len(self._waiting[0][0]) <= self._most:
            more, caller = self._waiting.popleft()
            callers.append((len(more), caller))
            batch.extend(more)
        try:
            answers = await self._send(batch) if batch else ()
        except Exception as error:  # noqa: BLE001 - each caller gets it
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
