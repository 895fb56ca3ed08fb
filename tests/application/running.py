"""A worker that runs during a test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import NamedTuple, TypeAlias

import pytest

from taskqueue_core.backend import Backend
from taskqueue_worker import BaseWorker


class World(NamedTuple):
    """A store for a test, and a function that makes a worker on it, from registries and options."""

    backend: Backend
    worker: Callable[..., BaseWorker]


OpenWorld: TypeAlias = Callable[[], AbstractAsyncContextManager[World]]

also_on_a_cluster = pytest.mark.parametrize(
    "world", ["memory", "redis", "cluster", "server"], indirect=True
)
"""runs a test on each kind of store and on a cluster"""


@asynccontextmanager
async def working(worker: BaseWorker) -> AsyncIterator[None]:
    """Run a worker in the background, and stop it at the end."""
    async with asyncio.TaskGroup() as group:
        group.create_task(worker.serve())
        try:
            yield
        finally:
            while worker._current_run is None:  # noqa: ASYNC110
                await asyncio.sleep(0)  # the worker has no event for it
            worker.stop()
