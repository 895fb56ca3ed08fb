"""Calling a handler with its middleware and its dependencies."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from functools import partial
from typing import Any

from taskqueue_core.application.context import CONTEXT
from taskqueue_core.application.dependencies import call_with_dependencies
from taskqueue_worker.handlers import Handler
from taskqueue_worker.outcomes import HandlerCall
from taskqueue_worker.threads import Threads


def is_plain(handler: Handler) -> bool:
    """Return whether a handler is called without anything around it."""
    return not (handler.arguments.dependencies or handler.middleware)


async def invoke(call: HandlerCall, arguments: dict[str, Any], threads: Threads) -> Any:
    """Call the middleware of a handler, and in it the handler, with its dependencies; return the result.

    A synchronous handler is called in one of the ``threads``, its middleware and dependencies in the event loop.
    """
    handler = call.handler
    context = call.jobs[0].context
    CONTEXT.set(context)

    def run(dependencies: dict[str, Any]) -> Awaitable[Any]:
        function = partial(handler.function, **(arguments | dependencies))
        return function() if handler.is_async else _in_thread(call, function, threads)

    async def innermost() -> Any:
        if handler.arguments.dependencies:
            return await call_with_dependencies(handler.function, run)
        return await run({})

    handle: Callable[[], Awaitable[Any]] = innermost
    for middleware in reversed(handler.middleware):
        handle = partial(middleware.run, context, handle)
    return await handle()


async def _in_thread(call: HandlerCall, function: partial[Any], threads: Threads) -> Any:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
    context = copy_context()

    def run() -> None:
        end: tuple[Any, BaseException | None]
        try:
            end = context.run(function), None
        except BaseException as error:  # noqa: BLE001 - a handler may raise any exception
            end = None, error
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, end)

    def settle(end: tuple[Any, BaseException | None]) -> None:
        if not ended.done():
            ended.set_result(end)

    threads.submit(run)
    cancelled: asyncio.CancelledError | None = None
    while not ended.done():
        try:
            await asyncio.wait([ended])
        except asyncio.CancelledError as cancellation:
            # The handler still uses its dependencies, so they stay open until it returns, unless the worker ends.
            cancelled = cancellation
            if call.releasing:
                raise
    value, error = ended.result()
    if cancelled is not None:
        raise cancelled
    if error is not None:
        raise error
    return value
