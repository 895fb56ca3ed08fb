"""Pushing results to a dispatcher, which then need not poll for them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from urllib.parse import quote

import httpx2

_ATTEMPTS = 6
_FIRST_WAIT = 0.5
_SECONDS = 10.0
_AT_ONCE = 256
_FINAL = range(400, 500)
_RETRY_STATUSES = frozenset({408, 425, 429})
_log = logging.getLogger("taskqueue.gpu")


class Pusher:
    """A background sender of results. A result that could not be pushed can still be polled."""

    def __init__(
        self, dispatcher: str, *, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        """Create a pusher without any I/O.

        ``dispatcher`` is a URL, to which ``/tasks/callback/{job_id}`` is appended.
        """
        self._base = dispatcher.rstrip("/")
        self._sleep = sleep
        self._client: httpx2.AsyncClient | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def push(self, job_id: str, token: str, report: bytes) -> None:
        """Start pushing a report.

        If 256 pushes are running already, do nothing, because the result can still be polled.
        """
        if len(self._tasks) < _AT_ONCE:
            task = asyncio.create_task(self._push(job_id, token, report))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def aclose(self) -> None:
        """Cancel running pushes."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _push(self, job_id: str, token: str, report: bytes) -> None:
        for attempt in range(_ATTEMPTS):
            if attempt:
                await self._sleep(_FIRST_WAIT * 2.0 ** (attempt - 1))
            if await self._is_delivered(job_id, token, report):
                return
        _log.warning("the dispatcher did not accept a result", extra={"job_id": job_id})

    async def _is_delivered(self, job_id: str, token: str, report: bytes) -> bool:
        client = self._client = self._client or httpx2.AsyncClient(
            trust_env=False, follow_redirects=False, timeout=_SECONDS
        )
        url = f"{self._base}/tasks/callback/{quote(job_id, safe='')}"
        headers = {"content-type": "application/json", "x-lease-token": token}
        try:
            async with (
                asyncio.timeout(_SECONDS),
                client.stream("POST", url, content=report, headers=headers) as answer,
            ):
                status = answer.status_code
        except (TimeoutError, httpx2.HTTPError, OSError):
            return False
        return answer.is_success or (status in _FINAL and status not in _RETRY_STATUSES)
