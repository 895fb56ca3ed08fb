"""Tests of reading from an idle worker's socket, without Prefect: a disconnect, and messages at the wrong time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from taskqueue_core.tasks import State
from taskqueue_prefect.delivery import SharedQueueDelivery
from tests.prefect.sockets import A, Place, place
from tests.redis.backends import until

__all__ = ["place"]

GONE = {"type": "websocket.disconnect", "code": 1006}
ACK = {"type": "websocket.receive", "text": '{"type": "ack"}'}


class Wire:
    """Imitates the handler's WebSocket, with a queue of the worker's messages."""

    def __init__(self) -> None:
        self.said: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.listeners = 0

    async def receive(self) -> dict[str, Any]:
        """Return the next message; only one reader at a time is allowed."""
        self.listeners += 1
        assert self.listeners == 1
        try:
            return await self.said.get()
        finally:
            self.listeners -= 1


async def idle(socket: SharedQueueDelivery, wire: Wire) -> bool:
    """Let a wait for a run time out, as Prefect's handler does each second.

    Return whether the worker is still connected.
    """
    socket.observed("w")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(socket.next(), 0.01)
    return socket.is_connected(wire)


async def test_an_idle_worker_goes(place: Place) -> None:
    """Row REV-E3, E7: the disconnect of an idle worker is noticed at once, and no run is delivered to it."""

    async def handler(socket: SharedQueueDelivery) -> None:
        wire = Wire()
        assert await idle(socket, wire)
        asking = asyncio.create_task(socket.next())
        await asyncio.sleep(0)
        wire.said.put_nowait(GONE)
        with pytest.raises(TimeoutError):
            await asking
        await place.publish(A)
        with pytest.raises(TimeoutError):
            await socket.next()
        assert not socket.is_connected(wire)

    await place.handle(handler)
    assert await place.state(A) is State.WAITING


async def test_a_run_and_the_end_at_once(place: Place) -> None:
    """Law 2, row E7: a run that was received while the worker disconnected is returned, not delivered."""

    async def handler(socket: SharedQueueDelivery) -> None:
        wire = Wire()
        assert await idle(socket, wire)
        await place.publish(A)
        await until(lambda: socket._request is not None and socket._request.done())
        wire.said.put_nowait(GONE)
        await until(lambda: socket._listener.is_down)
        with pytest.raises(TimeoutError):
            await socket.next()
        assert not socket.is_connected(wire)

    await place.handle(handler)
    assert await place.state(A) is State.WAITING


async def test_only_the_handler_receives_answers(place: Place) -> None:
    """Row E7: once a run is delivered, only Prefect's handler reads the worker's answers.

    Earlier messages are dropped.
    """

    async def handler(socket: SharedQueueDelivery) -> None:
        wire = Wire()
        for _ in range(3):
            assert await idle(socket, wire)
            await asyncio.sleep(0)
            assert wire.listeners == 1
        wire.said.put_nowait(ACK)  # sent at the wrong time
        assert await idle(socket, wire)
        assert await idle(socket, wire)
        await place.publish(A)
        assert (await socket.next()).id == A
        assert wire.listeners == 0
        assert wire.said.empty()
        wire.said.put_nowait(ACK)
        assert await wire.receive() == ACK
        socket.observed("w")

    await place.handle(handler)
    assert await place.state(A) is State.DONE


async def test_the_handler_ends_while_it_is_listened(place: Place) -> None:
    """Row E7: when the handler of an idle worker ends, the reading of its socket ends too."""
    wire = Wire()

    async def handler(socket: SharedQueueDelivery) -> None:
        assert await idle(socket, wire)
        await asyncio.sleep(0)
        assert wire.listeners == 1

    await place.handle(handler)
    assert wire.listeners == 0


async def test_a_socket_that_cannot_be_read(place: Place) -> None:
    """Row E7: if reading a socket fails, the worker counts as disconnected."""

    async def handler(socket: SharedQueueDelivery) -> None:
        wire = Wire()
        wire.listeners = 1
        assert await idle(socket, wire)
        with pytest.raises(TimeoutError):
            await socket.next()
        assert not socket.is_connected(wire)

    await place.handle(handler)
