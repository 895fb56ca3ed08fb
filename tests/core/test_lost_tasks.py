"""The warning about tasks that end with a connection to a store in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from taskqueue_core import Queue, connect, connect_sync
from taskqueue_core.capabilities import control_of
from taskqueue_memory import MemoryBackend


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the messages about lost tasks."""
    texts = [record.getMessage() for record in caplog.records if record.name == "taskqueue"]
    return [text for text in texts if text.startswith("published tasks are lost")]


async def test_tasks_that_nothing_received(caplog: pytest.LogCaptureFixture) -> None:
    """U2: one warning counts the tasks that were published to a store in memory and never received, and says why."""
    async with connect("memory") as queue:
        await queue.publish("mail", 1)
        await queue.publish("mail", 2, delay=3600)
        for number in range(7):
            await queue.publish(f"queue-{number}")
        assert warnings(caplog) == []
    (text,) = warnings(caplog)
    assert text.startswith(
        "published tasks are lost: 9 in mail, queue-0, queue-1, queue-2, queue-3, ...; no worker"
    )
    assert "connect to 'server'" in text


def test_a_blocking_connection(caplog: pytest.LogCaptureFixture) -> None:
    """U2: the same for a blocking connection."""
    with connect_sync("memory") as queue:
        queue.publish("mail", 1)
    assert [text[:36] for text in warnings(caplog)] == ["published tasks are lost: 1 in mail;"]


async def test_an_interrupted_program(caplog: pytest.LogCaptureFixture) -> None:
    """U2: a program that waits for a result until it is interrupted gets the warning, too."""
    published = asyncio.Event()

    async def program() -> None:
        async with connect("memory") as queue:
            await queue.publish("mail", 1, id="one")
            published.set()
            await queue.ends.wait("mail", "one")

    running = asyncio.create_task(program())
    await published.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(warnings(caplog)) == 1


async def _received(queue: Queue) -> None:
    async with queue.subscribe("mail", consumer="c") as subscription:
        (delivery,) = (await subscription.receive(1, 0)).deliveries
        await subscription.redeliver(delivery)  # it waits again, and a worker has seen it


async def _cancelled(queue: Queue) -> None:
    await control_of(queue.backend).purge("mail")


@pytest.mark.parametrize("end", [_received, _cancelled], ids=["received", "cancelled"])
async def test_nothing_is_lost_unseen(
    caplog: pytest.LogCaptureFixture, end: Callable[[Queue], Awaitable[None]]
) -> None:
    """U2: no warning about tasks that a consumer received, or that were cancelled, and none without tasks."""
    async with connect("memory") as queue:
        await queue.publish("mail", 1)
        await end(queue)
    async with connect("memory"):
        pass
    assert warnings(caplog) == []


async def test_a_backend_of_the_caller(caplog: pytest.LogCaptureFixture) -> None:
    """U2: a backend object that is passed does not end with the connection, so there is no warning."""
    async with connect(MemoryBackend()) as queue:
        await queue.publish("mail", 1)
    assert warnings(caplog) == []
