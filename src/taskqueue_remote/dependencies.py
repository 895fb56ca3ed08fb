"""The capability ``after`` of a server's backend, used over HTTP. The server carries the lines."""

from __future__ import annotations

import asyncio
from typing import NoReturn

import msgspec

from taskqueue_core.after import TaskRef
from taskqueue_core.capabilities import Count, Line, Report
from taskqueue_core.errors import CapabilityMissing
from taskqueue_core.server_address import path
from taskqueue_remote.client import HttpClient


class _Closed(msgspec.Struct, frozen=True):
    closed: bool


class RemoteDependencies:
    """The capability ``after`` of the server's backend: a client publishes tasks that wait, and closes batches."""

    def __init__(self, client: HttpClient) -> None:
        self._client = client

    async def close(self, batch: TaskRef) -> bool:
        target = path("tasks", batch.key, batch.task_id, "close")
        return (await self._client.ask("POST", target, _Closed)).closed

    async def lines(self, limit: int, after: str | None = None) -> tuple[Line, ...]:  # noqa: ARG002 - see `Dependencies`
        """Return nothing, because the server carries the lines."""
        return ()

    async def changed(self, seconds: float) -> None:
        """Wait for this time: there are never lines."""
        await asyncio.sleep(seconds)

    async def register(self, *lines: Line) -> NoReturn:  # noqa: ARG002 - see `Dependencies`
        """Raise `CapabilityMissing`, because the server carries the lines."""
        raise _carried()

    async def release(self, *reports: Report) -> NoReturn:  # noqa: ARG002 - see `Dependencies`
        """Raise `CapabilityMissing`, because the server carries the lines."""
        raise _carried()

    async def confirm(self, *lines: Line) -> NoReturn:  # noqa: ARG002 - see `Dependencies`
        """Raise `CapabilityMissing`, because the server carries the lines."""
        raise _carried()

    async def seal(self, batch: TaskRef) -> NoReturn:  # noqa: ARG002 - see `Dependencies`
        """Raise `CapabilityMissing`, because the server does this after `close`."""
        raise _carried()

    async def tally(self, *counts: Count, sealed: bool = False) -> NoReturn:  # noqa: ARG002 - see `Dependencies`
        """Raise `CapabilityMissing`, because the server carries the lines."""
        raise _carried()


def _carried() -> CapabilityMissing:
    return CapabilityMissing("the server carries the lines between the partitions of its store")
