"""Workers of an older or a newer version: they put off what they cannot execute."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from taskqueue_core import Handle, Tasks, connect
from taskqueue_core.clock import ManualClock
from taskqueue_core.queue import Queue
from taskqueue_core.tasks import State, Task, TaskStatus
from taskqueue_memory import MemoryBackend
from taskqueue_worker import LocalWorker, Worker
from taskqueue_worker.unknown_tasks import PATIENCE, UNKNOWN_TASK
from tests.application.running import working
from tests.server.support import running

NEW, OLD = Tasks(), Tasks()
RUNS: list[str] = []


@NEW.task("resize", queue="images")
@OLD.task("resize", queue="images")
def resize(image: str) -> str:
    """A task of both versions."""
    RUNS.append(image)
    return image


@NEW.task("crop", queue="images")
def crop(image: str, width: int) -> str:
    """A task of the new version alone."""
    return f"{image} {width}"


async def _status(handle: Handle[Any], *states: State) -> TaskStatus:
    while True:
        status = await handle.status()
        if status is not None and status.state in states:
            return status
        await asyncio.sleep(0.002)


@pytest.mark.parametrize("through_a_server", [False, True])
async def test_a_task_that_only_the_new_version_has(*, through_a_server: bool) -> None:
    """U2: a worker without one task of a shared queue puts it off by 30 s, without an attempt, and does the others."""
    backend = MemoryBackend()
    async with running(backend) as it, connect(backend) as queue, NEW.connect(queue):
        worker = (
            Worker(OLD, url=it.server.url)
            if through_a_server
            else LocalWorker(OLD, backend=backend)
        )
        async with working(worker):
            unknown = await crop.publish("cat.png", width=3)
            assert await (await resize.publish("dog.png")).result(5) == "dog.png"
            status = await _status(unknown, State.SCHEDULED)
        assert (status.attempt, status.error, status.last_failure) == (2, None, None)
        record = backend._store.find("images", unknown.id)
        assert record is not None
        assert (record.attempt, record.prior) == (2, 1)


async def test_after_an_hour_it_is_dead() -> None:
    """U2: a task that no worker has for an hour is a dead letter with the reason ``unknown_task``."""
    clock = ManualClock()
    backend = MemoryBackend(clock=clock)
    async with connect(backend) as queue, NEW.connect(queue):
        start = clock.now()
        async with working(LocalWorker(OLD, backend=backend)):
            handle = await crop.publish("cat.png", width=3)
            while (await _status(handle, State.SCHEDULED, State.DEAD)).state is State.SCHEDULED:
                await clock.advance(30)
                await asyncio.sleep(0.001)
            assert clock.now() - start == pytest.approx(PATIENCE, abs=90)
        (letter,) = await backend.dead_letters.list("images")
        assert letter.reason == UNKNOWN_TASK
        assert letter.history[-1].error == "no worker has the task 'crop'"
        # A redrive runs it, once there is a worker that has the task.
        await backend.dead_letters.redrive("images")
        async with working(LocalWorker(NEW, backend=backend)):
            assert await handle.result(5, wait_for_redrive=True) == "cat.png 3"


async def test_a_payload_for_another_version() -> None:
    """U2: a payload that does not fit is put off if it was written by another schema; else it is dead at once."""
    old, new = Tasks(), Tasks()

    @old.task("fit")
    def fit(image: str) -> str:
        return image

    @new.task("fit")
    def newer_fit(image: str, width: int) -> str:
        return f"{image} {width}"

    assert old.functions["fit"].headers != new.functions["fit"].headers
    backend = MemoryBackend()
    async with connect(backend) as queue, old.connect(queue):
        worker = LocalWorker(new, backend=backend)
        async with working(worker):
            other = await fit.publish("cat.png")
            status = await _status(other, State.SCHEDULED)
            assert (status.attempt, status.error) == (2, None)
            own = dict(new.functions["fit"].headers)
            for headers in (own, {}):
                wrong = await _raw(queue, headers)
                assert (await _status(wrong, State.DEAD)).error == "invalid_payload"
    assert newer_fit.headers["taskqueue-schema"] == own["taskqueue-schema"]


async def _raw(queue: Queue, headers: dict[str, str]) -> Handle[Any]:
    task = Task.of("fit", {"image": "cat.png"}, headers=headers)
    await queue.publish_many([task])
    return Handle("fit", task.id, queue, bytes)


def test_a_type_without_a_schema_has_no_fingerprint() -> None:
    """U2: a parameter of a type that has no JSON Schema leaves out the header."""
    tasks = Tasks()

    @tasks.task
    def call(function: Callable[[], int]) -> None: ...

    assert call.headers == {}
