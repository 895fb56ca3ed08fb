"""Events that handlers stream: through workers, sockets, child processes and HTTP, to handles and browsers (U19)."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from taskqueue_core import Context, Event, EventsGone, Tasks, UnknownTask, Zlib
from taskqueue_core.application.handles import Handle
from taskqueue_core.capabilities import NewEvent, NewEvents, QueueSettings
from taskqueue_core.consumer.event_queue import EventQueue
from taskqueue_core.consumer.outage import OutageRetry
from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import LIMITS
from taskqueue_core.protocol.frames import (
    AckFrame,
    Deliver,
    EventFrame,
    Feature,
    SettledFrame,
    StoredFrame,
)
from taskqueue_core.protocol.outgoing_events import MOST_IN_ALL, OutgoingEvents
from taskqueue_core.retry import RetryPolicy, Success
from taskqueue_core.tasks import Delivery, Task
from taskqueue_memory import MemoryBackend
from taskqueue_worker import LocalWorker, Worker
from taskqueue_worker.testing import TestQueue
from tests.application.running import working
from tests.remote.test_real_server import serving as served
from tests.worker.fake import work
from tests.worker.local import publish, serving
from tests.worker.sessions import get, ready, sent, welcome

tasks = Tasks(prefix="events.")


@tasks.task
async def talk(context: Context, words: list[str]) -> str:
    """Stream words, and others after the store has them."""
    for word in words:
        context.stream(word)
    await context.drained()
    context.stream({"last": True}, channel="log")
    return "said"


@tasks.task
def count(context: Context, most: int) -> int:
    """Stream numbers from a thread."""
    for number in range(most):
        context.stream(number)
    return most


@tasks.task
async def listen(context: Context, name: str) -> None:
    """Stream a word, and wait until the test lets it end."""
    context.stream("began")
    await GATES[name].wait()
    context.stream("ends")


@tasks.task(retry=RetryPolicy(base=0.001, jitter=0))
async def twice(context: Context) -> None:
    """Fail once."""
    context.stream(context.attempt)
    if context.attempt == 1:
        raise ValueError


GATES: dict[str, asyncio.Event] = {}


def short(event: Event) -> str:
    """Return an event as text: its id, its kind and its value."""
    return f"{event.id} {event.kind} {event.value}"


async def shorts(handle: Handle[Any], **options: Any) -> list[str]:
    """Return the events of a task until its end."""
    return [short(event) async for event in handle.events(**options)]


SAID = [
    "1-1 attempt 1",
    "1-2 data as",
    "1-3 data you",
    "1-4 data like",
    "1-5 data {'last': True}",
    "1-6 end done",
]


async def test_local_worker() -> None:
    """U19: coroutines and threads stream in order, the last event before the outcome; attempts are told apart."""
    backend = MemoryBackend()
    async with tasks.connect(backend), serving(LocalWorker(tasks, backend=backend)):
        handle = await talk.publish(["as", "you", "like"])
        assert await shorts(handle) == SAID
        assert await shorts(handle, after="1-4") == SAID[4:]
        assert await shorts(handle, channels=["log"]) == ["1-5 data {'last': True}"]
        numbers = await count.publish(500)
        values = [event.value async for event in numbers.events(channels=["data"])]
        assert values == list(range(500))
        again = await twice.publish()
        assert await shorts(again) == [
            "1-1 attempt 1",
            "1-2 data 1",
            "2-3 attempt 2",
            "2-4 data 2",
            "2-5 end done",
        ]
        with pytest.raises(UnknownTask):
            await shorts(talk.handle("missing"))


async def test_while_it_runs() -> None:
    """U19: events are read while the task runs; a task that streams nothing has an end; cut events are reported."""
    backend = MemoryBackend()
    GATES["a"] = asyncio.Event()
    await backend.control.configure("events.count", QueueSettings(stream_events=2))
    async with tasks.connect(backend), serving(LocalWorker(tasks, backend=backend)):
        events = (await listen.publish("a")).events()
        assert [short(await anext(events)) for _ in range(2)] == ["1-1 attempt 1", "1-2 data began"]
        GATES["a"].set()
        assert [short(event) async for event in events] == ["1-3 data ends", "1-4 end done"]
        assert await shorts(await count.publish(0)) == ["0-1 end done"]
        cut = await count.publish(9)
        await cut.result(10)
        assert await shorts(cut) == ["1-9 trimmed 9", "1-10 data 8", "1-11 end done"]
        with pytest.raises(EventsGone, match="9 events"):
            await shorts(cut, strict=True)


async def test_for_tests_and_with_a_codec() -> None:
    """U19, U17: events in a `TestQueue`; a codec encodes their values; what has no JSON is refused in the handler."""
    secret = Tasks(codec=Zlib(above=0))
    found: list[str] = []

    @secret.task
    async def tell(context: Context) -> None:
        context.stream("x" * 100_000)
        for value, channel in ((b"bytes", "data"), (1, "no channel"), (float("nan"), "data")):
            with pytest.raises(InvalidInput) as refused:
                context.stream(value, channel=channel)
            found.append(refused.value.field)

    with TestQueue(secret) as queue:
        handle = await tell.publish()
        await queue.drain()
        kept = [event async for event in handle.events()]
        assert [event.kind for event in kept] == ["attempt", "data", "end"]
        assert kept[1].value == "x" * 100_000
    assert found == ["value", "channel", "value"]


async def test_through_a_server() -> None:
    """U19: a worker streams over its socket; a handle of a client, and a browser with ``Last-Event-ID``, read it."""
    store = MemoryBackend()
    GATES["b"] = asyncio.Event()
    async with served(store) as remote:
        url = remote._client.address.shown
        async with tasks.connect(remote), working(Worker(tasks, url=url)):
            handle = await talk.publish(["as", "you", "like"])
            assert await shorts(handle) == SAID
            slow = await listen.publish("b")
            events = slow.events()
            assert [short(await anext(events)) for _ in range(2)] == [
                "1-1 attempt 1",
                "1-2 data began",
            ]
            GATES["b"].set()
            assert [short(event) async for event in events] == ["1-3 data ends", "1-4 end done"]
            path = f"/v1/tasks/{slow.key}/{slow.id}/events"
            client = remote._client
            page = await client.ask("GET", path, dict[str, Any], query={"limit": 2})
            assert [event["id"] for event in page["events"]] == ["1-1", "1-2"]
            assert page["next"] == "1-2"
            assert client._client is not None
            sse = {"accept": "text/event-stream"}
            raw = await client._client.get(path, headers={**sse, "last-event-id": "1-2"})
            blocks = raw.text.split("\n\n")
            assert blocks[0].startswith("id: 1-3\nevent: data\ndata: {")
            assert blocks[1].startswith("id: 1-4\nevent: end\n")
            raw = await client._client.get(path, headers={**sse, "last-event-id": "1-4"})
            assert raw.status_code == 204
            raw = await client._client.get(path, headers=sse, params={"channels": "other"})
            assert re.findall("event: (.*)", raw.text) == ["attempt", "end"]
            for wrong in ({"after": "x"}, {"channels": "a b"}, {"limit": 0}, {"wait": 31}):
                answer = await client.fetch("GET", path, query=wrong)
                assert answer.status == 422, wrong
            assert (await client.fetch("GET", "/v1/tasks/events.talk/none/events")).status == 404


def streamed(frames: list[Any]) -> list[tuple[str, int, list[bytes]]]:
    """Return the events in frames: receipt, number of the first, values."""
    return [
        (each.receipt, each.first, [bytes(event.value) for event in each.events])
        for frame in frames
        if isinstance(frame, EventFrame)
        for each in frame.streams
    ]


def test_events_of_a_session() -> None:
    """U19, fault A2: events are sent before the outcome, and again on another connection until they are confirmed."""
    session = ready()
    session.features = frozenset({Feature.EVENTS})
    delivery = work(receipt="r1")
    get(session, deliver_of(delivery))
    sent(session)
    session.stream("r1", b"1", "data")
    assert streamed(sent(session)) == [("r1", 1, [b"1"])]
    session.stream("r1", b"2", "data")
    session.settle("r1", Success())
    frames = sent(session)
    assert streamed(frames) == [("r1", 2, [b"2"])]
    assert [type(each) for each in frames[:2]] == [EventFrame, AckFrame]
    get(session, StoredFrame(numbers={"r1": 1, "unknown": 7}))
    done: list[str] = []
    session.drained("r1", lambda: done.append("r1"))
    session.disconnected()
    session.connected()
    sent(session)
    again = msgspec.structs.replace(welcome("r1"), features=["events"])
    get(session, again)
    assert streamed(sent(session)) == [("r1", 2, [b"2"])]
    assert done == []
    get(session, StoredFrame(numbers={"r1": 2}))
    assert done == ["r1"]
    get(session, SettledFrame(ok=["r1"]))
    assert not session._events


def test_events_travel_together() -> None:
    """U19: a worker sends events while the server stores those before, and others together a moment later."""
    time = 0.0
    session = ready()
    session._events = OutgoingEvents(lambda: time)
    session.features = frozenset({Feature.EVENTS})
    get(session, deliver_of(work(receipt="r1"), work(receipt="r2")))
    session.stream("r1", b"1", "data")
    assert streamed(sent(session)) == [("r1", 1, [b"1"])]
    session.stream("r1", b"2", "data")
    session.stream("r2", b"3", "data")
    assert streamed(sent(session)) == [("r1", 2, [b"2"]), ("r2", 1, [b"3"])]
    for value in (b"4", b"5"):
        session.stream("r1", value, "data")
        assert streamed(sent(session)) == []
    get(session, StoredFrame(numbers={"r1": 1}))
    assert streamed(sent(session)) == [("r1", 3, [b"4", b"5"])]
    session.stream("r2", b"6", "data")
    get(session, StoredFrame(numbers={"r1": 2}))
    assert streamed(sent(session)) == []
    get(session, SettledFrame(lease_lost=["r1"]))
    assert streamed(sent(session)) == [("r2", 2, [b"6"])]
    get(session, StoredFrame(numbers={"r2": 2}))
    for value in (b"7", b"8", b"9"):  # none of them is confirmed
        assert session.pause is None
        session.stream("r2", value, "data")
        assert len(streamed(sent(session))) == (value != b"9")
    assert session.pause == pytest.approx(0.005)
    time += 0.006
    assert streamed(sent(session)) == [("r2", 5, [b"9"])]
    assert session.pause is None


def test_few_events_are_under_way() -> None:
    """U19: events of which a server confirms none are not followed by others after a time."""
    time = 0.0
    events = OutgoingEvents(lambda: time)
    for receipt in ("r1", "r2", "r3"):
        for _ in range(500):
            events.add(receipt, b"1", "data")
        assert len(events.frames()) == 1
        time += 1.0
    assert events.pause == math.inf
    events.confirm({"r1": 500, "r2": 500})
    assert events.pause == 0.0


def test_a_lease_is_lost_between_two_frames() -> None:
    """U19, fault A4: what the server sends while a worker writes many events does not stop the other events."""
    session = ready()
    session.features = frozenset({Feature.EVENTS})
    get(session, deliver_of(work(receipt="r1"), work(receipt="r2"), work(receipt="r3")))
    for number in range(LIMITS.batch):
        for receipt in ("r1", "r2"):
            session.stream(receipt, b"%d" % number, "data")
    outgoing = session.outgoing()
    next(outgoing)
    get(session, SettledFrame(lease_lost=["r1", "r2"]))
    assert len(list(outgoing)) > 0
    session.stream("r3", b"1", "data")
    assert streamed(sent(session)) == [("r3", 1, [b"1"])]
    assert session._events.pause == 0.0


def test_events_for_an_older_server() -> None:
    """U19: a server without the feature gets no events, and nothing waits for it."""
    session = ready()
    get(session, deliver_of(work(receipt="r1")))
    session.stream("r1", b"1", "data")
    assert streamed(sent(session)) == []
    done: list[int] = []
    session.drained("r1", lambda: done.append(1))
    assert done == [1]


def test_events_of_all_deliveries() -> None:
    """U19, fault A1: what waits for a server is limited for all deliveries together; each keeps its newest event."""
    events, value = OutgoingEvents(), b'"' + b"x" * 60_000 + b'"'
    for number in range(20 * MOST_IN_ALL // len(value)):
        events.add(f"r{number % 400}", value, "data")
    kept = streamed(events.frames())
    assert {receipt for receipt, _, _ in kept} == {f"r{number}" for number in range(400)}
    size = sum(len(each) for _, _, values in kept for each in values)
    assert size <= max(MOST_IN_ALL + len(value), 400 * len(value))
    events.confirm({f"r{number}": 10**6 for number in range(400)})
    assert events._size == 0


async def test_events_that_wait_for_the_store() -> None:
    """U19, law 12: a queue keeps a limited number of bytes, and drops what a stale delivery has streamed."""
    backend, stale = MemoryBackend(), list[str]()

    async def note(receipts: Sequence[str]) -> None:
        stale.extend(receipts)

    await publish(backend, *range(40))
    async with backend.subscribe(["work"], "w") as subscription:
        deliveries = (await subscription.receive(40, 5)).deliveries
        queue = EventQueue(backend.streams, OutageRetry(_report), on_stale=note, pause=0)
        # 1000 of these are too large for one call, with their channels
        event = NewEvent(value=b'"' + b"x" * 1046 + b'"', channel="c" * 50)
        for delivery in deliveries:
            queue.put(delivery, *[event] * 1200)
        assert queue._bytes <= MOST_IN_ALL + 40 * event.size
        await subscription.redeliver(deliveries[0])
        done = asyncio.Event()
        queue.end(deliveries[0].receipt, done.set)
        storing = asyncio.create_task(queue.run())
        await queue.finish()
        await done.wait()
        storing.cancel()
        assert (stale, queue._bytes, queue._count) == ([deliveries[0].receipt], 0, 0)
        page = await backend.streams.events("work", deliveries[-1].task.id, limit=1000)
        assert page is not None
        assert page.events[-1].id == "1-1201"  # those that were left out are counted


async def test_rounds_of_many_deliveries() -> None:
    """U19: a call to the store takes a part of the deliveries, so that readers of the others wait less."""
    calls: list[list[str]] = []

    class Counting:
        async def append(self, *items: NewEvents) -> tuple[bool, ...]:
            calls.append([item.delivery.receipt for item in items])
            return tuple(True for _ in items)

    streams: Any = Counting()
    queue = EventQueue(streams, OutageRetry(_report), on_stale=_never, pause=0)
    receipts = [f"r{number}" for number in range(120)]
    for receipt in receipts:
        delivery = Delivery(task=Task(key="work"), receipt=receipt, attempt=1, delivered_at=1.0)
        queue.put(delivery, NewEvent(value=b"1", channel="data"))
    storing = asyncio.create_task(queue.run())
    await queue.finish()
    storing.cancel()
    assert [len(call) for call in calls] == [50, 50, 20]
    assert [receipt for call in calls for receipt in call] == receipts


async def _never(receipts: Sequence[str]) -> None:
    raise AssertionError(receipts)


async def _report(ok: bool, reason: str) -> None:  # noqa: FBT001 - `OutageRetry` passes ``ok`` by position
    raise AssertionError(ok, reason)


def deliver_of(*deliveries: Any) -> Any:
    """Return a frame with deliveries."""
    return Deliver(deliveries=list(deliveries))
