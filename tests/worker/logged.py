"""Declared tasks that log, for the tests of a worker's log."""

from __future__ import annotations

import asyncio
import logging

import structlog

from taskqueue_core import Tasks

tasks = Tasks()
_log = logging.getLogger("shop")


@tasks.task
async def coroutine(secret: str) -> None:
    """Log from the event loop, from a thread of its own, and with structlog."""
    _log.info("resizing %s", "cat.png", extra={"width": 3, "key": "its own"})
    await asyncio.to_thread(_log.info, "in a thread")
    structlog.get_logger("shop").info("sized", width=4)
    _fail(secret)


@tasks.task
def thread(secret: str) -> None:
    """Log from a thread of the worker, and fail with a cause."""
    _log.debug("not shown")
    structlog.get_logger("shop").info("sized", width=4)
    try:
        _fail(secret)
    except KeyError as error:
        raise ValueError(f"no {secret}") from error


@tasks.task(batch=2)
async def batch(items: list[int]) -> None:
    """Log once for several tasks."""
    _log.info("%d items", len(items))


def _fail(secret: str) -> None:
    raise KeyError(secret)
