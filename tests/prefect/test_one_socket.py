"""Tests of one worker's socket as Prefect's handler uses it, without Prefect: acked and returned runs."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from time import monotonic
from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary

import pytest
from starlette.exceptions import WebSocketException

from taskqueue_core.limits import TASK_RUN_BYTES
from taskqueue_core.tasks import Delivery, State, Task
from taskqueue_prefect import batching
from taskqueue_prefect.delivery import SharedQueueDelivery
from taskqueue_prefect.names import client_of
from tests.prefect.sockets import SAID, STATE, A, B, Odd, Place, place
from tests.prefect.support import KEY, task_run
from tests.redis.backends import until

__all__ = ["place"]


async def test_what_was_not_delivered_is_not_acked(place: Place) -> None:
    """Law 2, row E7: a run that was received but not delivered to the handler is not acked by the handler."""

    async def handler(socket: SharedQueueDelivery) -> None:
        socket.observed("w")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(socket.next(), 0.01)
        await place.publish(A)
        await until(lambda: socket._request is not None and socket._request.done())
        socket.observed("w")  # Prefect's handler calls this before it asks for the next run
        assert await place.state(A) is State.IN_FLIGHT

    await place.handle(handler)
    assert await place.state(A) is State.WAITING


async def test_the_handlers_word_is_the_ack(place: Place) -> None:
    """Row E7: if the handler observes the worker after a delivery, the run is acked. Its result names the worker."""

    async def handler(socket: SharedQueueDelivery) -> None:
        socket.observed("w")
        for name in (A, B):
            await place.publish(name)
            assert (await socket.next()).id == name
            assert await place.state(name) is State.IN_FLIGHT
            socket.observed("w")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(socket.next(), 0.01)

    await place.handle(handler)
    assert [await place.state(name) for name in (A, B)] == [State.DONE, State.DONE]
    (result,) = await place.control.results(KEY, A)
    assert result is not None
    accepted = json.loads(result)
    assert (client_of(accepted["worker"]), accepted["state"]) == ("w", STATE)
    assert accepted["worker"] != "w"  # the worker's name in the result includes this connection


async def test_what_was_lost_meanwhile_is_not_delivered(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault A4: a run whose lease expired while the process was frozen is not delivered.

    Another process has received it.
    """
    read, readings = batching.read_runs, 0

    async def handler(socket: SharedQueueDelivery) -> None:
        async def stand_still(names: Sequence[str]) -> Any:
            nonlocal readings
            readings += 1
            if readings == 1:  # let the lease expire, so that the run goes to the other consumer
                mine = socket._receiver.subscription
                await mine.redeliver(*(one.delivery for one in mine.owned.values()), lost=True)  # type: ignore[attr-defined]
                taken.extend((await other.receive(1, 0)).deliveries)
                monkeypatch.setattr(batching, "monotonic", lambda: monotonic() + 1.0)
            return await read(names)

        monkeypatch.setattr(batching, "read_runs", stand_still)
        await place.publish(A)
        await place.publish(B)
        assert (await socket.next()).id == B

    taken: list[Delivery] = []
    async with place.backend.subscribe([KEY], "other") as other:
        await place.handle(handler)
        assert [(one.task.id, one.losses) for one in taken] == [(A, 1)]
        assert readings == 2


@pytest.mark.parametrize("end", ["return", "raise", "cancel", "retry"])
async def test_however_the_handler_ends(place: Place, end: str) -> None:
    """Row E7, REV-E6: however the handler ends, an unacked run is returned without counting an attempt or a loss."""

    async def handler(socket: SharedQueueDelivery) -> None:
        await place.publish(A)
        await socket.next()
        match end:
            case "raise":
                raise Odd("no JSON")
            case "cancel":
                raise asyncio.CancelledError
            case "retry":
                assert SharedQueueDelivery.of_this_context() is socket
                await asyncio.shield(socket.release())

    await place.handle(handler)
    assert SharedQueueDelivery.of_this_context() is None
    (status,) = await place.control.statuses(KEY, A)
    assert status is not None
    assert (status.state, status.attempt, status.losses) == (State.WAITING, 1, 0)


async def test_a_run_that_was_never_committed(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row E8: a run that is missing in the database is looked up several times, and then dropped without a delivery."""
    looks: list[str] = []

    async def read(names: Sequence[str]) -> list[None]:
        looks.extend(names)
        return [None] * len(names)

    monkeypatch.setattr(batching, "read_runs", read)
    monkeypatch.setattr(batching, "_COMMIT_POLL_SECONDS", ())
    monkeypatch.setattr(batching, "_MAX_CHECKS", 2)

    async def handler(socket: SharedQueueDelivery) -> None:
        await place.publish(A)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(socket.next(), 0.1)
        assert await place.state(A) is State.SCHEDULED
        await until(lambda: len(looks) == 2)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(socket.next(), 0.1)

    await place.handle(handler)
    assert looks == [A, A]
    assert await place.state(A) is State.DONE


@pytest.mark.parametrize("odd", ["name", "payload", "state"])
async def test_what_is_no_run(place: Place, odd: str) -> None:
    """Row E8: a task in the queue that is not a valid run becomes a dead letter, and the next run is delivered."""
    name = "no-run" if odd == "name" else B
    payload: dict[str, Any] = {} if odd == "payload" else task_run(KEY, id=B)
    await place.backend.publisher.publish(
        Task(key=KEY, id=name, payload=json.dumps(payload).encode())
    )
    await place.publish(A)

    async def handler(socket: SharedQueueDelivery) -> None:
        assert (await asyncio.wait_for(socket.next(), 5)).id == A

    await place.handle(handler)
    assert await place.state(name) is State.DEAD


async def test_a_run_that_is_too_large(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row E8: a run that is too large for a worker becomes a dead letter, instead of being sent again and again."""
    monkeypatch.setitem(SAID, "name", "x" * TASK_RUN_BYTES)
    await place.publish(A)

    async def handler(socket: SharedQueueDelivery) -> None:
        socket.observed("w")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(socket.next(), 0.1)

    await place.handle(handler)
    assert await place.state(A) is State.DEAD


@pytest.mark.parametrize("keys", [None, "k", [], [1], [None], ["k"] * 1001, {"k": 1}])
async def test_what_are_no_keys(place: Place, keys: object) -> None:
    """Row E8: a subscription with invalid keys closes the connection as a protocol violation."""
    with pytest.raises(WebSocketException) as caught:
        SharedQueueDelivery(place, keys)  # type: ignore[arg-type] # as much of a host as it takes
    assert caught.value.code == 4001
    assert "must be " in caught.value.reason
    assert not place.begun


@pytest.mark.parametrize("client_id", [7, None, ["w"]])
async def test_what_is_no_client_id(place: Place, client_id: object) -> None:
    """Row E8: a worker with an invalid client id is disconnected."""

    async def handler(socket: SharedQueueDelivery) -> None:
        with pytest.raises(WebSocketException) as caught:
            socket.observed(client_id)
        assert caught.value.code == 4001

    await place.handle(handler)


async def test_sockets_share_calls_of_the_store(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row U26: 40 sockets receive, look up and ack 40 runs with at most 4 calls each, and check no lease again."""
    sockets, calls, seen = 40, Counter[str](), Counter[str]()
    ready = asyncio.Barrier(sockets)

    def count(owner: Any, name: str) -> None:
        call = getattr(owner, name)

        async def counted(*args: Any, **more: Any) -> Any:
            calls[name] += 1
            return await call(*args, **more)

        monkeypatch.setattr(owner, name, counted)

    subscription = place.backend.subscribe([KEY], "other")
    count(type(subscription), "receive")
    count(type(subscription), "ack")
    await subscription.close()
    names = [str(uuid4()) for _ in range(sockets)]
    for name in names:
        await place.publish(name)
    count(place.control, "statuses")
    count(batching, "read_runs")
    monkeypatch.setattr(batching, "monotonic", lambda: 0.0)  # no lease can expire

    async def handler(socket: SharedQueueDelivery) -> None:
        socket.observed("w")
        seen[str((await socket.next()).id)] += 1
        await ready.wait()  # each of the sockets has a run
        socket.observed("w")

    await asyncio.gather(*(place.handle(handler) for _ in range(sockets)))
    assert seen == Counter(names)
    assert calls.keys() == {"receive", "ack", "read_runs"}
    assert max(calls.values()) <= 4, calls
    assert [await place.state(name) for name in names] == [State.DONE] * sockets


async def test_equal_workers_take_turns(place: Place) -> None:
    """Row U26 (D5): two workers that are equally fast receive waiting runs in turns."""
    order = ""

    async def handler(name: str, socket: SharedQueueDelivery) -> None:
        nonlocal order
        for _ in range(20):
            socket.observed(name)
            await socket.next()
            order += name
        socket.observed(name)

    for _ in range(40):
        await place.publish(str(uuid4()))
    await asyncio.gather(*(place.handle(partial(handler, name)) for name in "ab"))
    counts = [order[:end].count("a") - order[:end].count("b") for end in range(41)]
    assert max(map(abs, counts)) <= 1, order


async def test_sockets_share_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row U26: 40 sockets that look up runs at once use two queries, and an error reaches each of them."""
    queries: list[int] = []

    async def read_many(run_ids: Sequence[str]) -> list[Any]:
        queries.append(len(run_ids))
        await asyncio.sleep(0)
        if "bad" in run_ids:
            raise OSError
        return [None if run == "39" else run for run in run_ids]

    monkeypatch.setattr(batching, "_connected", lambda: nullcontext(read_many))
    monkeypatch.setattr(batching, "_readers", WeakKeyDictionary())
    first: asyncio.Task[list[Any]] = asyncio.create_task(batching.read_runs(["0"]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    rest: list[Any] = await asyncio.gather(
        *(batching.read_runs([str(number)]) for number in range(1, 40))
    )
    assert await first == ["0"]
    assert rest == [*([str(number)] for number in range(1, 39)), [None]]
    assert queries == [1, 39]
    failed = await asyncio.gather(
        batching.read_runs(["bad"]), batching.read_runs(["good"]), return_exceptions=True
    )
    assert [type(error) for error in failed] == [OSError, OSError]
