"""The example worker in Node.js against a real server: the protocol documentation is enough for another language."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from taskqueue_core.capabilities import QueueSettings, control_of, dead_letters_of
from taskqueue_core.hooks import Hooks, Identity, hookimpl
from taskqueue_core.instrumented import InstrumentedBackend
from taskqueue_core.queue import Queue
from taskqueue_core.retry import RetryPolicy
from taskqueue_core.tasks import State, Task
from taskqueue_core.workflows import WorkflowStep
from taskqueue_memory import MemoryBackend
from taskqueue_redis import RedisBackend
from taskqueue_worker import Worker
from tests.application.flows import Flows
from tests.application.running import working
from tests.binaries import node
from tests.redis.reserved import reserve
from tests.redis.serving import serving
from tests.server.support import eventually, running

WORKER = Path(__file__).parents[2] / "examples/node_worker/worker.mjs"


@asynccontextmanager
async def worker(url: str, **variables: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run the example worker until the end of the block."""
    process = await asyncio.create_subprocess_exec(
        *(str(node().path), "--experimental-websocket", str(WORKER)),
        env=os.environ | variables | {"TASKQUEUE_SERVER_URL": url},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_it_works_and_comes_back(tmp_path: Path, redis_url: str) -> None:
    """E1, REV-E5, U5: acks, retries, snoozes and dead letters of the worker take effect.

    A task that runs while the server is killed is settled with the next server.
    """
    assert redis_url
    port = reserve()
    words = ("--backend", "redis", "--port", str(port.port))
    try:
        async with contextlib.AsyncExitStack() as stack:
            backend = await stack.enter_async_context(contextlib.aclosing(RedisBackend()))
            control = control_of(backend)
            flaky = await control.settings("node.flaky")
            quick = RetryPolicy(base=0.05, cap=0.1)
            await control.configure("node.flaky", flaky.model_copy(update={"retry": quick}))
            payloads = {
                "square": {"n": 12},
                "flaky": None,
                "picky": None,
                "early": None,
                "slow": {"seconds": 0.5},
            }
            tasks = [Task.of(f"node.{name}", load, id=name) for name, load in payloads.items()]
            async with serving(tmp_path, *words) as first:
                process = await stack.enter_async_context(worker(first.url))
                await Queue(backend).publish_many(tasks)
                await eventually(lambda: state(backend, "square", State.DONE), 30)
                await eventually(lambda: state(backend, "flaky", State.DONE), 30)
                await eventually(lambda: state(backend, "picky", State.DEAD), 30)
                await eventually(lambda: state(backend, "early", State.DONE), 30)
                await eventually(lambda: state(backend, "slow", State.IN_FLIGHT), 30)
                first.send(signal.SIGKILL)
                await first.ended()
            async with serving(tmp_path, *words):
                await eventually(lambda: state(backend, "slow", State.DONE), 40)
                await Queue(backend).publish("node.square", {"n": 3}, id="again")
                await eventually(lambda: state(backend, "again", State.DONE, "node.square"), 30)
                process.send_signal(signal.SIGTERM)
                assert await asyncio.wait_for(process.wait(), 30) == 0

            assert await result(backend, "square") == 144
            assert await result(backend, "flaky") == 2
            assert await result(backend, "early") == 3
            assert await result(backend, "slow") == "slept"
            letter = await dead_letters_of(backend).get("node.picky", "picky")
            assert letter is not None
            assert letter.reason == "bad_input"
            assert "worker.mjs" in (letter.history[-1].traceback or "")
            (flaky_status,) = await control.statuses("node.flaky", "flaky")
            assert flaky_status is not None
            assert flaky_status.last_failure is not None
            assert "Error: not yet" in (flaky_status.last_failure.traceback or "")
            stats = await control.stats("node.slow")
            assert (stats.delivered, stats.redelivered, stats.lost) == (1, 0, 0)
    finally:
        port.release()


async def test_it_ends_attempts_at_their_timeout() -> None:
    """U3: the worker has the retries and the timeout of the queue, as one in Python has."""
    async with running(backend := MemoryBackend()) as it:
        policy = RetryPolicy(delays=(0.01,), max_attempts=2)
        await backend.control.configure("node.slow", QueueSettings(retry=policy, timeout=0.2))
        async with worker(it.server.url):
            await it.publish("a", key="node.slow", payload=b'{"seconds":60}')
            await it.publish("b", key="node.slow", payload=b'{"seconds":0.01}')
            await it.reaches("node.slow", dead=1, done=1, seconds=30)
        (letter,) = await backend.dead_letters.list("node.slow")
        errors = [failure.error for failure in letter.history]
        assert (letter.task.id, errors) == ("a", ["timeout after 0.2 s"] * 2)


async def test_it_gets_results_of_other_tasks() -> None:
    """U15, U16, U19, E1: steps in Node get results as inputs, and in their payload; Python gets those of Node.

    What a handler in Node streams is read in order, before the end of its task.
    """
    flows = Flows()
    async with running(backend := MemoryBackend()) as it:
        async with worker(it.server.url), working(Worker(flows.tasks, url=it.server.url)):
            steps = [
                *[WorkflowStep.of(f"of-{n}", "node.square", {"n": n}) for n in (3, 4)],
                WorkflowStep.of("sum", "node.sum", after=("of-3", "of-4"), inputs=(0, 1)),
                WorkflowStep.of(
                    "double", "flow.double", {"number": {"$input": 0}}, after=("sum",), inputs=(0,)
                ),
                WorkflowStep.of(
                    "end", "node.square", {"n": {"$input": 0}}, after=("double",), inputs=(0,)
                ),
            ]
            await Queue(backend).workflows.put(steps, id="w")
            await it.publish("a", key="node.count", payload=b'{"to":3}')
            await it.reaches("node.count", done=1, seconds=30)
            await it.reaches("node.sum", done=1, seconds=30)
            await it.reaches("node.square", done=3, seconds=30)
        assert await backend.control.results("node.sum", "w.sum") == (b"25",)
        assert await backend.control.results("node.square", "w.end") == (b"2500",)
        page = await backend.streams.events("node.count", "a")
        assert page is not None
        assert [event.value for event in page.events] == [b"1", b"1", b"2", b"3", b'"done"']


async def test_an_unknown_token_ends_it() -> None:
    """A worker whose token is refused with close code 4401 ends; with a valid token it works."""

    class Plugin:
        @hookimpl
        def authenticate(self, token: str | None, peer: str) -> Identity | None:
            del peer
            return Identity(name="me") if token == "right" else None

    hooks = Hooks()
    hooks.register(Plugin())
    async with running(InstrumentedBackend(MemoryBackend(), hooks)) as it:
        async with worker(it.server.url, TASKQUEUE_TOKEN="wrong") as process:
            assert await asyncio.wait_for(process.wait(), 30) == 1
        async with worker(it.server.url, TASKQUEUE_TOKEN="right"):
            await it.publish("a", key="node.square", payload=b'{"n":2}')
            await it.reaches("node.square", done=1)


async def state(backend: RedisBackend, task: str, wanted: State, key: str = "") -> bool:
    """Return whether a task has reached a state."""
    (status,) = await control_of(backend).statuses(key or f"node.{task}", task)
    return status is not None and status.state is wanted


async def result(backend: RedisBackend, task: str) -> object:
    """Return the result of a task."""
    (found,) = await control_of(backend).results(f"node.{task}", task)
    assert found is not None
    return msgspec.json.decode(found)
