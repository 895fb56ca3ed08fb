"""Sharding is off by default; a process without it never works on a sharded queue as if it were a plain one."""

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

NEEDED = "need TASKQUEUE_SHARDING=true in every server, worker and publisher"
_stores: list[MemoryBackend] = []


def create_backend() -> MemoryBackend:
    """Return the store that the processes of a test share (the backend's entry point)."""
    return _stores[-1]


@pytest.fixture(autouse=True)
def store() -> Iterator[MemoryBackend]:
    """Provide the empty store of a test."""
    _stores.append(MemoryBackend())
    yield _stores[-1]
    _stores.pop()


def process(*, sharding: bool = False) -> InstrumentedBackend:
    """Open the store as another process would."""
    return open_backend(__name__, Settings(sharding=sharding))


def test_no_shards_unless_switched_on(store: MemoryBackend) -> None:
    """A16: the wrapper for shards is used only if the setting switches it on."""
    assert process().inner is store
    assert isinstance(process(sharding=True).inner, ShardedBackend)


async def test_shards_are_refused_without_the_setting(store: MemoryBackend) -> None:
    """A16: without the setting, shards are refused; the error says what to set and where, and nothing is stored."""
    with pytest.raises(InvalidInput, match=f"queue 'frames', because shards {NEEDED}"):
        await control_of(process()).configure("frames", QueueSettings(shards=2))
    assert (await store.control.settings("frames")).version == 0
    assert await store.control.queues() == ()


async def test_the_first_shards_leave_a_marker(store: MemoryBackend) -> None:
    """A16: the first change of shards writes a marker before it closes any queue; operators do not see the marker."""
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
    """A16: if the store has a sharded queue, publishers, consumers and servers without the setting refuse to work."""
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
    """A16: if a queue is sharded while a process without the setting runs, it logs one error and reports not ready."""
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
    """A16: if a queue is sharded after a publisher without the setting started, its next publish raises an error."""
    backend = process()
    async with connect(backend) as queue:
        await queue.publish("frames")
        await control_of(process(sharding=True)).configure("frames", QueueSettings(shards=2))
        with pytest.raises(ConfigurationError, match=f"queue 'frames' has shards, which {NEEDED}"):
            await queue.publish("frames")


async def test_a_queue_that_moved_elsewhere_is_refused_as_before() -> None:
    """A queue whose ``moved_to`` names something else than shards refuses tasks; that is not a configuration error."""
    backend = process()
    await control_of(backend).configure("k", QueueSettings(moved_to="elsewhere"))
    (answer,) = await Queue(backend).publish_many([Task(key="k")])
    assert answer.reason == "the queue has moved to 'elsewhere'"
