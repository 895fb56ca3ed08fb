"""What a consumer does while the store is out of reach: tell, try again with backoff, tell again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from taskqueue_core.errors import BackendUnavailable, PublishUnconfirmed
from taskqueue_core.retry import RetryPolicy

__all__ = ["OUTAGES", "PATIENCE", "StoreLink"]

T = TypeVar("T")

OUTAGES = (BackendUnavailable, PublishUnconfirmed)
"""after these the same call may be made again"""
PATIENCE = RetryPolicy(base=0.1, cap=2.0, jitter=0.5)


class StoreLink:
    """Shared by all that one consumer does with the store."""

    def __init__(self, tell: Callable[[bool, str], Awaitable[None]]) -> None:
        """``tell`` hears of each change: whether the store is there, and why not."""
        self._tell = tell
        self._down = False

    async def insist(self, call: Callable[[], Awaitable[T]]) -> T:
        """Return the answer of a call that may be repeated, however long the store is away. Other errors pass."""
        tries = 0
        while True:
            try:
                answer = await call()
            except OUTAGES as error:
                tries += 1
                if not self._down:
                    self._down = True
                    await self._tell(False, error.code)  # noqa: FBT003 - whether it is there
                await asyncio.sleep(PATIENCE.delay(tries))
            else:
                if self._down:
                    self._down = False
                    await self._tell(True, "")  # noqa: FBT003 - as above
                return answer
