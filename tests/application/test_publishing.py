"""Publishing declared tasks with typed arguments, and their results."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from enum import StrEnum
from typing import Any
from uuid import UUID

import pytest
from pydantic import BaseModel
from pydantic import Field as ModelField

from taskqueue_core import (
    InvalidArguments,
    InvalidResult,
    Queue,
    TaskCancelled,
    TaskDead,
    Tasks,
    UnknownTask,
    as_completed,
    gather,
)
from taskqueue_core.clock import ManualClock
from taskqueue_core.errors import ConfigurationError, InvalidInput, QueueFull, TooLarge
from taskqueue_core.tasks import State
from taskqueue_memory import MemoryBackend
from taskqueue_worker import Context, LocalWorker, Reject
from tests.application.running import working


class Colour(StrEnum):
    """An enumeration as an argument."""

    RED = "red"


class Order(BaseModel):
    """A model as an argument, whose field has another name in JSON."""

    number: int = ModelField(alias="no")


@dataclass
class Place:
    """A dataclass as an argument."""

    name: str


tasks = Tasks()
SEEN: list[Any] = []


@tasks.task
async def record(
    context: Context,
    at: datetime,
    price: Decimal,
    ident: UUID,
    colour: Colour,
    order: Order,
    *,
    places: list[Place],
    data: bytes = b"",
) -> dict[str, Any]:
    """Keep the arguments."""
    SEEN.append((context.attempt, at, price, ident, colour, order, places, data))
    return {"places": len(places)}


@tasks.task
def half(number: int, *, wait: float = 0) -> float:  # noqa: ARG001 - an optional argument
    """Return half of a number."""
    return number / 2


@tasks.task
def fail(reason: str) -> None:
    """Become a dead letter."""
    raise Reject(reason, "it cannot work")


@tasks.task
def version() -> str:
    """Return text."""
    return "x"


@tasks.task
def charge(order: Order) -> int:
    """Take one model as the only argument."""
    return order.number


async def test_arguments_of_many_types() -> None:
    """U1, U2: arguments are encoded by their annotations, and the handler gets equal ones; models by their aliases."""
    backend = MemoryBackend()
    ident, at = UUID(int=7), datetime(2026, 11, 29, tzinfo=UTC)
    order = Order(no=3)
    async with tasks.connect(Queue(backend)) as queue, working(LocalWorker(tasks, backend=backend)):
        handle = await record.publish(
            at, Decimal("1.10"), ident, Colour.RED, order, places=[Place("x")], data=b"\xff"
        )
        assert await handle.result(5) == {"places": 1}
        status = await handle.status()
        assert status is not None
        assert status.state is State.DONE
        assert queue.backend is backend
    assert [(1, at, Decimal("1.10"), ident, Colour.RED, order, [Place("x")], b"\xff")] == SEEN


@tasks.task
def anything(value: Any) -> None:
    """A task whose argument has no type."""


def nested(levels: int) -> list[Any]:
    """Return a list that is nested as deeply as this."""
    value: list[Any] = []
    for _ in range(levels - 1):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("publish", "fault"),
    [
        (half.call, "half: number is missing"),
        (
            lambda: half.call(1, nubmer=2),  # type: ignore[call-arg]
            "half: nubmer is not a parameter; it has number, wait",
        ),
        (
            lambda: half.call(1, delay=5),  # type: ignore[call-arg]
            "half: delay is not a parameter; delay is an option: write using(delay=...).publish(...)",
        ),
        (
            lambda: half.call("secret"),  # type: ignore[arg-type]
            "half: number should be a valid integer, unable to parse string as an integer",
        ),
        (lambda: half.call(1, wait=float("nan")), "half: wait has NaN or an infinity"),
        (
            lambda: half.call(10**4300),
            "half: number has a long whole number; allowed: at most 4300",
        ),
        (lambda: anything.call([{"a": -(10**4300)}]), "anything: value has a long whole number"),
        (lambda: anything.call([float("inf")]), "anything: value has NaN or an infinity"),
        (lambda: anything.call("\ud800"), "anything: value has no equivalent in JSON"),
        (lambda: anything.call(nested(100)), "anything: value is nested too deeply"),
        (lambda: anything.call(nested(10_000)), "anything: value has no equivalent in JSON"),
        (
            lambda: charge.call({"number": 1}),  # type: ignore[arg-type]
            "charge: order.no is missing",
        ),
    ],
)
def test_wrong_arguments(publish: Callable[[], Any], fault: str) -> None:
    """U1: wrong arguments are refused before anything is sent; the error names parameters, never values."""
    with pytest.raises(InvalidArguments) as caught:
        publish()
    assert str(caught.value).startswith(fault)
    assert isinstance(caught.value, InvalidInput)


def test_long_numbers_that_a_worker_can_read() -> None:
    """U1: a whole number of 4300 digits, and a longer text of digits, arrive as they are."""
    for value in (10**4299, "7" * 5000, [1] * 5000, {'\\"' + "7" * 5000: 10**4299}):
        assert anything.arguments.read(anything.call(value).payload) == {"value": value}


def test_arguments_that_are_too_large() -> None:
    """U1: arguments above the limit of a payload are refused with the limit's name."""
    with pytest.raises(TooLarge, match="limit payload"):
        fail.call("x" * 300_000)


async def test_a_model_as_the_whole_payload() -> None:
    """U2: the only parameter, if it is a model, may be written without its name; the error names both forms."""
    backend = MemoryBackend()
    queue = Queue(backend)
    async with tasks.connect(queue), working(LocalWorker(tasks, backend=backend)):
        assert await (await charge.publish(Order(no=1))).result(5) == 1
        for payload, number in (({"order": {"no": 2}}, 2), ({"no": 3}, 3)):
            confirmation = await queue.publish("charge", payload)
            assert await charge.handle(confirmation.task_id).result(5) == number
        wrong = await queue.publish("charge", {"amount": 1})
        with pytest.raises(TaskDead, match="invalid_payload"):
            await charge.handle(wrong.task_id).result(5)
        (letter,) = await backend.dead_letters.list("charge")
        assert "neither an object with the argument 'order'" in letter.history[-1].error


async def test_options() -> None:
    """U1: options of a publish; times may be datetimes with a time zone."""
    backend = MemoryBackend(clock=ManualClock())
    now = backend.now()
    async with tasks.connect(Queue(backend)):
        await half.using(id="a", delay=5, priority=9, tenant="t", headers={"x": "y"}).publish(2)
        await half.using(
            id="b", not_before=datetime.fromtimestamp(now, UTC) + timedelta(60)
        ).publish(2)
        with pytest.raises(InvalidInput, match="not_before: got a datetime without a time zone"):
            await half.using(not_before=datetime(2026, 1, 1)).publish(2)  # noqa: DTZ001 - that is the case
        status = await half.handle("a").status()
        assert status is not None
        assert status.state is State.SCHEDULED


@pytest.mark.parametrize(
    ("tags", "fault"),
    [
        ("user:42", "tags: got str of length 7; allowed: a tuple of at most 8 texts"),
        (["user:42"], "a tuple of at most 8 texts"),
        (("x" * 101,), "printable text of 1 to 100 characters"),
        ((" x",), "without a blank at its start or end"),
        (("a\n",), "printable text"),
        (("x", "x"), "got the same tag twice"),
        (tuple("abcdefghi"), "at most 8 texts"),
    ],
    ids=range(7),
)
async def test_wrong_tags(tags: Any, fault: str) -> None:
    """U18: a tag that is not allowed is an error at the declaration, or at the publish, before anything is stored."""
    with pytest.raises(ConfigurationError, match=fault):
        Tasks().task(tags=tags)
    backend = MemoryBackend()
    queue = Queue(backend)
    async with tasks.connect(queue):
        for publish in (half.using(tags=tags).publish(1), queue.publish("half", 1, tags=tags)):
            with pytest.raises(InvalidInput, match=fault):
                await publish
    assert await backend.control.queues() == ()


async def test_tags_of_both_are_counted_together() -> None:
    """U18: a task has at most eight tags, those of its declaration among them."""
    backend, tasks = MemoryBackend(), Tasks()
    many = tasks.task("many", tags=tuple("abcde"))(version.function)
    async with tasks.connect(Queue(backend)):
        handle = await many.using(tags=("e", "f", "g", "h")).publish()
        with pytest.raises(
            InvalidInput, match="tags: got tuple of length 9; allowed: a tuple of at most 8"
        ):
            await many.using(tags=("f", "g", "h", "i")).publish()
    detail = await backend.listing.task("many", handle.id)
    assert detail is not None
    assert detail.task.tags == tuple("abcdefgh")


async def test_many_calls() -> None:
    """U1: calls are published in batches; the handle of a refused one says why, and its result raises that."""
    backend = MemoryBackend()
    settings = await backend.control.settings("half")
    await backend.control.configure("half", settings.model_copy(update={"capacity": 2}))
    async with tasks.connect(Queue(backend)):
        handles = await tasks.publish_many(half.using(tenant="x").call(n) for n in range(3))
        assert [handle.confirmation.stored for handle in handles if handle.confirmation] == [
            True,
            True,
            False,
        ]
        with pytest.raises(QueueFull):
            await handles[2].result()
        async with working(LocalWorker(tasks, backend=backend)):
            assert await gather(*handles[:2], timeout=5) == [0.0, 0.5]
            ended = [handle.id async for handle in as_completed(handles[:2], timeout=5)]
            assert sorted(ended) == sorted(handle.id for handle in handles[:2])


async def test_errors_of_results() -> None:
    """U6: a result that will never come is an error that says what happened, and never a wait without end."""
    backend = MemoryBackend()
    earlier = Tasks()

    @earlier.task("version")
    def earlier_version() -> int:
        return 1

    async with tasks.connect(Queue(backend)), earlier.connect(Queue(backend)):
        cancelled = await half.publish(1)
        assert await cancelled.cancel()
        assert not await cancelled.cancel()
        with pytest.raises(TaskCancelled, match=rf"task {cancelled.id} of half is cancelled"):
            await cancelled.result()
        with pytest.raises(UnknownTask, match="never published"):
            await half.handle("unknown").result()
        waiting = await half.publish(1)
        later = await half.using(delay=60).publish(1)
        text = rf"^task {waiting.id} of half has not ended after 0.02 s: waiting, no worker has taken it"
        with pytest.raises(TimeoutError, match=text + "$") as late:
            await waiting.result(0.02)
        assert late.value.__context__ is None
        with pytest.raises(TimeoutError, match=text + "; and 1 more$"):
            await gather(waiting, later, timeout=0.02)
        with pytest.raises(TimeoutError, match=r"after 0.02 s: scheduled, it is not due$"):
            assert [one async for one in as_completed([later], timeout=0.02)] == []
        await waiting.cancel()
        async with working(LocalWorker(tasks, backend=backend)):
            dead = await fail.publish("broken")
            with pytest.raises(TaskDead) as caught:
                await dead.result(5)
            assert (caught.value.reason, caught.value.attempts) == ("broken", 1)
            with pytest.raises(
                TimeoutError, match=r"s: dead, it was not redriven; .* failed: broken"
            ):
                await dead.result(0.05, wait_for_redrive=True)
            with pytest.raises(InvalidResult, match="int_parsing"):
                await earlier_version.handle((await version.publish()).id).result(5)


@pytest.mark.parametrize(
    ("calls", "got"),
    [
        (lambda: [half], "TaskFunction"),
        (lambda: [half.publish(1)], "coroutine"),
        (lambda: half.call(1), "one call"),
    ],
)
async def test_what_is_no_list_of_calls(calls: Callable[[], Any], got: str) -> None:
    """U1: `publish_many` of functions, of publishes or of a single call says what to write."""
    async with tasks.connect("memory"):
        with pytest.raises(InvalidInput, match=rf"calls: got {got}; allowed: .*resize\.call\("):
            await tasks.publish_many(calls())


async def test_a_connection_of_a_wrong_kind() -> None:
    """U1, U6: a connection of the other kind is refused by name."""
    with pytest.raises(InvalidInput, match="on: got str of length 6; allowed: a Queue"):
        await half.using(on="server").publish(1)  # type: ignore[arg-type]  # that is the case
    with pytest.raises(InvalidInput, match="allowed: a SyncQueue"):
        half.using(on=Queue(MemoryBackend())).publish_sync(1)


def test_blocking_calls() -> None:
    """U1, U6: every call has a blocking counterpart, for code without an event loop."""
    with tasks.connect_sync("taskqueue_memory") as queue:
        handle = half.using(id="x").publish_sync(3)
        (other,) = tasks.publish_many_sync([half.call(4)])
        assert (handle.id, handle.confirmation is not None, other.key) == ("x", True, "half")
        status = other.status()
        assert status is not None
        assert status.state is State.WAITING
        worker = LocalWorker(tasks, backend=queue.queue.backend)

        async def run() -> None:
            async with working(worker):
                await half.using(on=queue.queue).handle("x").result(5)
                await half.using(on=queue.queue).handle(other.id).result(5)

        queue.run(run())
        assert (handle.result(5), other.result(5)) == (1.5, 2.0)
        third = half.publish_sync(5)
        assert third.cancel()


async def _calls(publish: Callable[[], Awaitable[Any]]) -> int:
    """Return how many functions one publish calls."""
    await publish()
    events: list[str] = []
    sys.setprofile(lambda _frame, event, _function: events.append(event))
    try:
        await publish()
    finally:
        sys.setprofile(None)
    return events.count("call") + events.count("c_call")


async def test_a_typed_publish_costs_little() -> None:
    """U1: a typed publish calls at most a quarter more functions than `Queue.publish`."""
    queue = Queue(MemoryBackend())
    plain = await _calls(lambda: queue.publish("half", {"number": 3}))
    async with tasks.connect(queue):
        assert await _calls(lambda: half.publish(3)) <= 1.25 * plain


def test_schemas() -> None:
    """U2: the JSON Schema of the arguments, for publishers in other languages."""
    schema = half.schema()
    assert schema["required"] == ["number"]
    assert schema["properties"]["number"] == {"title": "Number", "type": "integer"}
    assert schema["additionalProperties"] is False
