"""`TestQueue`: drains that a crash, the end of the process or a cancellation interrupts."""

from __future__ import annotations

import asyncio
import threading

import pytest

from taskqueue_core import Context
from taskqueue_worker.testing import TestQueue
from tests.application.shop import Shop


async def test_crash(shop: Shop, taskqueue: TestQueue) -> None:
    """U11: when the worker vanishes, what it runs counts as a loss, and runs again in the next drain."""
    begun, losses = asyncio.Event(), list[int]()

    @shop.tasks.task
    async def hang(context: Context) -> None:
        losses.append(context.losses)
        begun.set()
        if not context.losses:
            await asyncio.Event().wait()

    await hang.publish()
    await taskqueue.crash()
    draining = asyncio.create_task(taskqueue.drain())
    await begun.wait()
    await taskqueue.crash()
    assert [run.end for run in (await draining).runs] == ["lost"]
    assert [run.end for run in (await taskqueue.drain()).runs] == ["done"]
    assert losses == [0, 1]


async def test_crash_with_a_thread(shop: Shop, taskqueue: TestQueue) -> None:
    """U11: a function in a thread runs on after a crash; its outcome is ignored, and its context says so."""
    begun, ended, go, revoked = asyncio.Event(), asyncio.Event(), threading.Event(), list[bool]()
    loop = asyncio.get_running_loop()

    @shop.tasks.task
    def slow(context: Context) -> int:
        if not context.losses:
            loop.call_soon_threadsafe(begun.set)
            go.wait()
            revoked.append(context.revoked)
            loop.call_soon_threadsafe(ended.set)
        return context.losses

    handle = await slow.publish()
    draining = asyncio.create_task(taskqueue.drain())
    await begun.wait()
    await taskqueue.crash()
    assert (await draining).count(end="lost") == 1
    go.set()
    assert (await taskqueue.drain()).count(end="done") == 1
    assert await handle.result() == 1
    await ended.wait()
    assert revoked == [True]


async def test_crash_inside_a_handler(shop: Shop, taskqueue: TestQueue) -> None:
    """U11: a handler that crashes its own worker does not continue."""
    reached = list[str]()

    @shop.tasks.task
    async def dies(context: Context) -> None:
        if not context.losses:
            await taskqueue.crash()
        reached.append(f"losses {context.losses}")

    await dies.publish()
    assert (await taskqueue.drain()).count(end="lost") == 1
    assert (await taskqueue.drain()).count(end="done") == 1
    assert reached == ["losses 1"]


async def test_a_handler_that_ends_the_process(shop: Shop, taskqueue: TestQueue) -> None:
    """U11: `SystemExit` in a handler is raised by the drain; the task counts as lost, and runs again."""

    @shop.tasks.task
    def leave(context: Context) -> None:
        if not context.losses:
            raise SystemExit(3)

    await leave.publish()
    with pytest.raises(SystemExit):
        await taskqueue.drain()
    assert (await taskqueue.drain()).count(end="done") == 1


async def test_a_cancelled_drain(shop: Shop, taskqueue: TestQueue) -> None:
    """U11: a drain that is cancelled releases what it runs, without a loss."""
    losses, begun = list[int](), asyncio.Event()

    @shop.tasks.task
    async def hang(context: Context) -> None:
        losses.append(context.losses)
        begun.set()
        if len(losses) == 1:
            await asyncio.Event().wait()

    await hang.publish()
    draining = asyncio.create_task(taskqueue.drain())
    await begun.wait()
    draining.cancel()
    with pytest.raises(asyncio.CancelledError):
        await draining
    await taskqueue.drain()
    assert losses == [0, 0]
