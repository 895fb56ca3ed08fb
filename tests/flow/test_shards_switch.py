"""Shards are off unless they are switched on, and a process without them never works on part of a sharded queue."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import httpx2
import pytest

from taskqueue_core import Queue, Task, connect
from taskqueue_core.assembly import open_backend
from taskqueue_core.capabilities import QueueSettings, control_of
from taskqueue_core.config import Settings
from taskqueue_core.errors import ConfigurationError, InvalidInput
from taskqueue_core.instrumented import InstrumentedBackend
from taskqueue_core.shard_guard import MARKER
from taskqueue_core.sharding.backend import ShardedBackend
from taskqueue_memory import MemoryBackend
from taskqueue_server import ServerProcess, create_app

NEEDED = "needs TASKQUEUE_SHARDING=true in every server, worker and publisher"
_stores: list[MemoryBackend] = []


def create_backend() -> MemoryBackend:
    """Return the store that the processes of a test share."""
    return _stores[-1]


@pytest.fixture(autouse=True)
def store() -> Iterator[MemoryBackend]:
    """Return the empty store of a test."""
    _stores.append(MemoryBackend())
    yield _stores[-1]
    _stores.pop()


def process(*, sharding: bool = False) -> InstrumentedBackend:
    """Open the store as another process would."""
    return open_backend(__name__, Settings(sharding=sharding))


def test_no_shards_unless_switched_on(store: MemoryBackend) -> None:
    """A16: the wrapper for shards is there only where it is asked for."""
    assert process().inner is store
    assert isinstance(process(sharding=True).inner, ShardedBackend)


async def test_shards_are_refused_without_the_setting(store: MemoryBackend) -> None:
    """A16: the error says what to set, and where; nothing is stored."""
    with pytest.raises(InvalidInput, match=f"queue 'frames': shards {NEEDED}"):
        await control_of(process()).configure("frames", QueueSettings(shards=2))
    assert (await store.control.settings("frames")).version == 0
    assert await store.control.queues() == ()


async def test_the_first_shards_leave_a_marker(store: MemoryBackend) -> None:
    """A16: it is written with the first change of shards, before any queue is closed, and operators do not see it."""
    backend = process(sharding=True)
    control = control_of(backend)
    await control.configure("frames", QueueSettings(capacity=5))
    assert (await store.control.settings(MARKER)).version == 0
    await control.configure("frames", QueueSettings(version=1, shards=2))
    assert (await store.control.settings(MARKER)).version == 1
    await control.configure("frames", QueueSettings(version=2, shards=3))
    await control.configure("others", QueueSettings(shards=2))
    assert (await store.control.settings(MARKER)).version == 1
    assert await control.queues() == ("frames", "others")


async def test_a_process_without_shards_does_not_start() -> None:
    """A16: where a queue was sharded before, a publisher, a consumer and a server refuse to work."""
    await control_of(process(sharding=True)).configure("frames", QueueSettings(shards=2))
    with pytest.raises(ConfigurationError, match=NEEDED):
        await Queue(process()).publish("other")
    subscription = process().subscribe(["other"], "w")
    with pytest.raises(ConfigurationError, match=NEEDED):
        await subscription.receive(1, 0)
    server = ServerProcess(process(), Settings(port=0))
    with pytest.raises(ConfigurationError, match=NEEDED):
        await server.run()
    assert not server.ready.is_set()


async def test_a_running_process_turns_unready(caplog: pytest.LogCaptureFixture) -> None:
    """A16: a process that worked before a queue was sharded logs an error once, and is not ready from then on."""
    backend = process()
    await Queue(backend).publish("other")
    app = create_app(backend, Settings())
    app.state.context.started = True
    transport = httpx2.ASGITransport(app=app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        await control_of(backend).maintain()
        assert (await client.get("/ready")).status_code == 200
        await control_of(process(sharding=True)).configure("frames", QueueSettings(shards=2))
        with caplog.at_level(logging.ERROR, logger="taskqueue.sharding"):
            await control_of(backend).maintain()
            await control_of(backend).maintain()
        assert [record.levelname for record in caplog.records] == ["ERROR"]
        assert NEEDED in caplog.text
        answer = await client.get("/ready")
        assert (answer.status_code, answer.json()["reason"]) == (503, "configuration")


async def test_a_refused_publish_says_what_to_set() -> None:
    """A16: a publisher that worked before a queue was sharded learns it with its next task there."""
    backend = process()
    async with connect(backend) as queue:
        await queue.publish("frames")
        await control_of(process(sharding=True)).configure("frames", QueueSettings(shards=2))
        with pytest.raises(ConfigurationError, match=f"queue 'frames': shards {NEEDED}"):
            await queue.publish("frames")


async def test_a_queue_that_moved_elsewhere_is_refused_as_before() -> None:
    """Only shards are a matter of configuration: another ``moved_to`` is a refusal."""
    backend = process()
    await control_of(backend).configure("k", QueueSettings(moved_to="elsewhere"))
    (answer,) = await Queue(backend).publish_many([Task(key="k")])
    assert answer.reason == "the queue has moved to 'elsewhere'"
