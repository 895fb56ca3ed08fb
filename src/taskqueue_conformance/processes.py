"""Other processes that open a backend on the store of a test, and the programs that they run."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import pytest

from taskqueue_conformance.bench import KEY, Bench, ids
from taskqueue_core.backend import Backend
from taskqueue_core.errors import LeaseLost
from taskqueue_core.tasks import Delivery, Task

Program = Callable[..., Awaitable[None]]

_START = 30.0
"""seconds of real time in which a process must start"""


class Failed(NamedTuple):
    """The last message of a program that raised an exception."""

    traceback: str


class Process:
    """A process that runs a program with a backend of its own. The test and the program exchange messages."""

    def __init__(self, open_backend: Callable[[], Backend], program: Program, *values: Any) -> None:
        # The fork server has no event loop and no threads, and starts a process much faster than "spawn". It imports
        # the modules once: this one, and the one of the function that opens the first backend.
        context = multiprocessing.get_context("forkserver")
        function = open_backend.func if isinstance(open_backend, partial) else open_backend
        context.set_forkserver_preload([__name__, function.__module__])
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_run, args=(open_backend, program, theirs, values), daemon=True
        )
        try:
            self._process.start()
        except Exception as error:  # noqa: BLE001 - the class of the error depends on what cannot be sent
            pytest.fail(
                f"another process did not start ({error}): `opener` must return a function that a module defines, "
                "or a functools.partial of such a function with arguments that can be sent to another process"
            )
        theirs.close()

    async def hears(self, seconds: float) -> Any:
        """Return the next message of the program; raise `TimeoutError` if there is none within ``seconds``."""
        async with asyncio.timeout(seconds):
            while not self._pipe.poll():  # noqa: ASYNC110 - a pipe of multiprocessing has no event
                await asyncio.sleep(0.002)
        try:
            message = self._pipe.recv()
        except EOFError:
            pytest.fail("another process ended: expected it to run until the test ends it")
        if isinstance(message, Failed):
            pytest.fail(f"a call failed in another process: {message.traceback}")
        return message

    def tell(self, message: Any) -> None:
        """Send a message to the program."""
        self._pipe.send(message)

    def messages(self) -> list[Any]:
        """Return the program's messages that have not been read yet, even if it has been killed since."""
        found = []
        try:
            while self._pipe.poll():
                found.append(self._pipe.recv())
        except EOFError:
            pass
        return found

    async def kill(self) -> None:
        """End the process with SIGKILL, so that it closes nothing."""
        self._process.kill()
        await asyncio.to_thread(self._process.join)


class Processes:
    """The processes of one test. `here` opens a backend like theirs in the process of the test."""

    def __init__(self, bench: Bench, open_backend: Callable[[], Backend]) -> None:
        self.bench = bench
        self._open = open_backend
        self._running: list[Process] = []

    async def start(self, program: Program, *values: Any) -> Process:
        """Start a program, and wait until its process is ready."""
        process = Process(self._open, program, *values)
        self._running.append(process)
        assert await process.hears(_START) == "ready", "expected a process that is ready"
        return process

    @asynccontextmanager
    async def here(self) -> AsyncIterator[Bench]:
        """Open a backend on the same store in this process, and close it at the end."""
        backend = self._open()
        try:
            yield self.bench.on(backend)
        finally:
            await backend.aclose()

    async def close(self) -> None:
        """Kill all processes."""
        for process in self._running:
            await process.kill()


@asynccontextmanager
async def processes(bench: Bench) -> AsyncIterator[Processes]:
    """Yield a `Processes` for the store of ``bench``; at the end, kill all processes that it has started."""
    opened = Processes(bench, bench.harness.opener(bench.backend))
    try:
        yield opened
    finally:
        await opened.close()


def _run(
    open_backend: Callable[[], Backend],
    program: Program,
    pipe: Connection,
    values: tuple[Any, ...],
) -> None:
    asyncio.run(_open_and_run(open_backend, program, pipe, values))


async def _open_and_run(
    open_backend: Callable[[], Backend],
    program: Program,
    pipe: Connection,
    values: tuple[Any, ...],
) -> None:
    try:
        backend = open_backend()
        try:
            pipe.send("ready")
            await program(backend, pipe, *values)
        finally:
            await backend.aclose()
    except Exception:  # noqa: BLE001 - the test reports whatever the backend raised
        pipe.send(Failed(traceback.format_exc()))


async def hold(backend: Backend, pipe: Connection, consumer: str, names: list[str]) -> None:
    """Publish tasks, receive the same number of tasks, and report their ids. At the test's next message, ack them.

    While the program waits, its event loop is free, so that the backend can give signs of life.
    """
    subscription, held = backend.subscribe([KEY], consumer), list[Delivery]()
    await backend.publisher.publish(*(Task.of(KEY, name, id=name) for name in names))
    while len(held) < len(names):
        held += (await subscription.receive(len(names) - len(held), None)).deliveries
    pipe.send(ids(held))
    await asyncio.to_thread(pipe.recv)
    try:
        pipe.send([answer.value for answer in await subscription.ack(*held)])
    except LeaseLost:
        pipe.send(["lease_lost"])
    await asyncio.to_thread(pipe.recv)


async def wait(backend: Backend, pipe: Connection, consumer: str) -> None:
    """Repeatedly report that a receive is waiting, report the task that it has received, and ack the task."""
    async with backend.subscribe([KEY], consumer) as subscription:
        await subscription.receive(1, 0)
        while True:
            receiving = asyncio.ensure_future(subscription.receive(1, None))
            await asyncio.sleep(0)
            pipe.send("waiting")
            received = await receiving
            pipe.send(ids(received.deliveries))
            await subscription.ack(*received.deliveries)


async def race(backend: Backend, pipe: Connection, consumer: str, limit: int) -> None:
    """At the test's next message, receive and ack until nothing is left; report the ids and the answers to the acks."""
    async with backend.subscribe([KEY], consumer) as subscription:
        await subscription.receive(1, 0)
        pipe.send("waiting")
        await asyncio.to_thread(pipe.recv)
        taken, answers = list[str](), list[str]()
        while True:
            received = await subscription.receive(limit, 0.2)
            taken += ids(received.deliveries)
            if received.deliveries:
                try:
                    answers += [a.value for a in await subscription.ack(*received.deliveries)]
                except LeaseLost:
                    answers.append("lease_lost")
            elif not received.again:
                break
        pipe.send((taken, answers))
        await asyncio.to_thread(pipe.recv)


async def toil(backend: Backend, pipe: Connection, name: str) -> None:
    """Publish, receive, settle and retry until killed; report each publish and each ack before and after the call."""
    async with backend.subscribe([KEY], name) as subscription:
        for number in itertools.count():
            task_id = f"{name}-{number}"
            pipe.send(("begun", task_id))
            await backend.publisher.publish(Task.of(KEY, task_id, id=task_id))
            pipe.send(("published", task_id))
            for delivery in (await subscription.receive(1, 0)).deliveries:
                if number % 3 == 0:
                    await subscription.redeliver(delivery)
                elif number % 3 == 1 and delivery.attempt == 1:
                    await backend.publisher.schedule_retry(
                        delivery.task, backend.now(), settles=delivery
                    )
                else:
                    pipe.send(("acking", delivery.task.id))
                    await subscription.ack(delivery)
                    pipe.send(("done", delivery.task.id))
