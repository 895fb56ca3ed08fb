"""What a GPU server streams: it becomes events of the job while it runs, and the last value is the answer (U19)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import msgspec
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import Event, streams_of
from taskqueue_core.consumer.event_queue import EventQueue
from taskqueue_core.consumer.outage import OutageRetry
from taskqueue_core.limits import LIMITS
from taskqueue_core.protocol.outgoing_events import MOST_EVENTS
from taskqueue_core.tasks import Task
from taskqueue_dispatch.endpoint_client.streamed import READERS, StreamedValue, TooLongError
from taskqueue_dispatch.job_events import JobEvents
from taskqueue_dispatch.models import ModelConfig
from taskqueue_dispatch.names import queue_of
from taskqueue_dispatch.service import Dispatcher
from taskqueue_dispatch.status import JobState
from taskqueue_memory import MemoryBackend
from tests.dispatch.gpu_support import served
from tests.dispatch.patience import PATIENCE, until
from tests.dispatch.support import dispatching, ended, send

SSE = (
    b'event: token\r\ndata: "as"\r\n\r\n',
    b'data: {"text": \ndata: "you"}\n\n: a comment\n\nid: 7\ndata: like it\n\n',
    b'event: no channel\ndata: {"status": "success", "result": 7}\n\ndata: [DONE]\n\n',
)
LINES = (b'"as"\n', b'{"text": "you"}\r\nlike it\n\n', b'{"status": "success", "result": 7}')
VALUES = [b'"as"', b'{"text": "you"}', b'"like it"', b'{"status": "success", "result": 7}']
KINDS = {"text/event-stream; charset=utf-8": SSE, "application/x-ndjson": LINES}
ONCE = ModelConfig(max_retries=0)


def gpu(kind: str, parts: Sequence[bytes], gate: asyncio.Event | None = None) -> Starlette:
    """Return a GPU server that streams these parts to each job; before the last one, it waits for the gate."""

    async def body() -> AsyncIterator[bytes]:
        for part in parts[:-1]:
            yield part
        if gate is not None:
            await gate.wait()
        yield parts[-1]

    async def generate(_: Request) -> StreamingResponse:
        return StreamingResponse(body(), media_type=kind)

    return Starlette(routes=[Route("/generate", generate, methods=["POST"])])


async def register(dispatcher: Dispatcher, origin: str, config: ModelConfig = ONCE) -> None:
    """Register a server without reports."""
    await dispatcher.registry.configure("flux", config)
    url = f"{origin}/generate"
    await dispatcher.registry.register("flux", "one", url, 1, reports=False)


async def events_of(backend: Backend, job: str) -> list[Event]:
    """Return the events of a job, without those of the store."""
    page = await streams_of(backend).events(queue_of("flux"), job)
    return [event for event in page.events if event.kind == "data"] if page else []


@pytest.mark.parametrize("kind", KINDS, ids=["sse", "lines"])
async def test_tokens_reach_the_caller(backend: Backend, kind: str) -> None:
    """U19, C3: values are events of the job while it runs, in order, each once; the last one is the answer."""
    gate = asyncio.Event()
    async with served(gpu(kind, KINDS[kind], gate)) as origin, dispatching(backend) as dispatcher:
        await register(dispatcher, origin)
        (job,) = await send(dispatcher, "flux")

        async def read() -> bool:
            return len(await events_of(backend, job)) == 3

        await until(read, "the first events are there while the job runs")
        gate.set()
        await ended(dispatcher, [job])
        events = await events_of(backend, job)
        assert [msgspec.json.decode(event.value) for event in events] == [
            msgspec.json.decode(value) for value in VALUES
        ]
        first = "token" if kind.startswith("text/") else "data"
        assert [event.channel for event in events] == [first, "data", "data", "data"]
        assert await dispatcher.control.results(queue_of("flux"), job) == (b"7",)
        page = await streams_of(backend).events(queue_of("flux"), job)
        assert page is not None
        assert page.ended


@pytest.mark.parametrize(
    ("last", "result", "error"),
    [
        (b'{"choices": []}', b'{"choices": []}', ""),
        (b'{"error": {"message": "out of memory"}}', None, "out of memory"),
        (b'{"status": "failed", "error": "no"}', None, "no"),
        (b'"' + b"x" * 70_000 + b'"', b'"' + b"x" * 70_000 + b'"', ""),
    ],
    ids=["result", "error", "failed", "no event"],
)
async def test_the_last_value(last: bytes, result: bytes | None, error: str) -> None:
    """U19, C3, C4: the last value is read as any other answer; one too large for an event may be the result."""
    backend, parts = MemoryBackend(), (b"1\n", last + b"\n")
    app = gpu("application/x-ndjson", parts)
    async with served(app) as origin, dispatching(backend) as dispatcher:
        await register(dispatcher, origin)
        (job,) = await send(dispatcher, "flux")
        await ended(dispatcher, [job], JobState.FAILED if error else JobState.DONE)
        assert await backend.control.results(queue_of("flux"), job) == (result,)
        (status,) = await backend.control.statuses(queue_of("flux"), job)
        assert status is not None
        failure = status.last_failure
        assert (failure.error if failure else "") == error
        assert len(await events_of(backend, job)) == (1 if len(last) > LIMITS.event else 2)


@pytest.mark.parametrize("kind", KINDS, ids=["sse", "lines"])
def test_any_part(kind: str) -> None:
    """U19: values do not depend on where the network divides the response."""
    media_type, body = kind.partition(";")[0], b"".join(KINDS[kind])

    def read(*parts: bytes) -> list[StreamedValue]:
        reader = READERS[media_type](1000)
        found = [value for part in parts for value in reader.feed(part)]
        return found + list(reader.feed(b"", last=True))

    whole = read(body)
    assert [msgspec.json.decode(each.value) for each in whole] == [
        msgspec.json.decode(value) for value in VALUES
    ]
    assert read(*(body[at : at + 1] for at in range(len(body)))) == whole
    for at in range(len(body)):
        assert read(body[:at], body[at:]) == whole
    long = {"text/event-stream": b"data: a\n" * 501}.get(media_type, b"1" * 1001)
    for parts in ((long,), (b"x" * 600, b"x" * 600)):
        with pytest.raises(TooLongError):
            read(*parts)


async def test_a_slow_store() -> None:
    """U19: while events wait for the store, the next value waits, and with it the server; nothing is left out."""
    backend = MemoryBackend()
    await backend.publisher.publish(Task(key="k", id="t"))
    async with asyncio.timeout(PATIENCE), backend.subscribe(["k"], "w") as consumer:
        (delivery,) = (await consumer.receive(1, 5)).deliveries
        queue = EventQueue(backend.streams, OutageRetry(_report), on_stale=_fail, pause=0)
        events = JobEvents(queue, delivery)
        value = StreamedValue("data", b"1")

        async def put() -> None:
            for _ in range(MOST_EVENTS + 5):
                await events.put(value)

        putting = asyncio.create_task(put())
        await until(lambda: queue._count > MOST_EVENTS)
        await asyncio.sleep(0)
        assert not putting.done()
        storing = asyncio.create_task(queue.run())
        await putting
        await events.stored()
        storing.cancel()
        page = await backend.streams.events("k", "t", limit=1)
        assert page is not None
        last = await backend.streams.events("k", "t", after=f"1-{MOST_EVENTS + 5}")
        assert last is not None
        assert [event.id for event in last.events] == [f"1-{MOST_EVENTS + 6}"]


async def test_a_store_that_refuses_events() -> None:
    """U19: if the store raises an unexpected error, events are dropped, and jobs are settled all the same."""
    backend = MemoryBackend()

    async def refuse(*_: object) -> tuple[bool, ...]:
        raise ValueError

    backend.streams.append = refuse  # type: ignore[method-assign]
    app = gpu("application/x-ndjson", (b"1\n", b"2\n"))
    async with served(app) as origin, dispatching(backend) as dispatcher:
        await register(dispatcher, origin)
        (job,) = await send(dispatcher, "flux")
        await ended(dispatcher, [job])
        assert await events_of(backend, job) == []


async def _report(ok: bool, reason: str) -> None:  # noqa: FBT001 - `OutageRetry` passes ``ok`` by position
    raise AssertionError(ok, reason)


async def _fail(receipts: Sequence[str]) -> None:
    raise AssertionError(receipts)
