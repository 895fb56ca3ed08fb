"""Many light workers in one process; each has only a socket and the client side of the protocol."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random

import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException
from websockets.typing import Subprotocol

from taskqueue_core.protocol.client_session import ClientSession, Delivered
from taskqueue_core.protocol.frames import SUBPROTOCOL, WireDelivery
from taskqueue_core.retry import Outcome, Rejected, RetryLater, Success
from tests.chaos.history import Log, What
from tests.chaos.programs.common import Setup

_CAPACITY = 2
_LONGEST_PAUSE = 0.5


class _Light:
    def __init__(self, setup: Setup, log: Log, number: int) -> None:
        self._hold = setup.hold
        self._log = log
        self._chance = random.Random(f"{setup.seed} {setup.name} {number}")
        self._url = os.environ["TASKQUEUE_SERVER_URL"].replace("http", "ws") + "/v1/socket"
        self._session = ClientSession(f"{setup.name}.{number}", setup.keys, _CAPACITY)
        self._said = asyncio.Event()
        self._running: set[asyncio.Task[None]] = set()

    async def work(self, over: asyncio.Event) -> None:
        """Work, reconnecting whenever the connection breaks: at first immediately, then after growing pauses."""
        pause = 0.0
        while not over.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), self._chance.uniform(pause / 2, pause))
            pause = min(2 * pause + 0.05, _LONGEST_PAUSE)
            with contextlib.suppress(OSError, WebSocketException, TimeoutError):
                async with connect(
                    self._url,
                    subprotocols=[Subprotocol(SUBPROTOCOL)],
                    compression=None,
                    proxy=None,
                    ping_interval=None,
                    open_timeout=3,
                    close_timeout=1,
                ) as socket:
                    self._session.connected()
                    try:
                        await self._converse(socket, over)
                        pause = 0.0
                    finally:
                        self._session.disconnected()
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _converse(self, socket: ClientConnection, over: asyncio.Event) -> None:
        jobs = [
            asyncio.create_task(one)
            for one in (self._hear(socket), self._speak(socket), over.wait())
        ]
        try:
            await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
            if over.is_set():
                self._session.bye()
                for text in self._session.outgoing():
                    await socket.send(text)
        finally:
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)

    async def _hear(self, socket: ClientConnection) -> None:
        async for text in socket:
            for event in self._session.receive(text):
                if isinstance(event, Delivered):
                    for delivery in event.deliveries:
                        task = asyncio.create_task(self._handle(delivery))
                        self._running.add(task)
                        task.add_done_callback(self._running.discard)
            self._said.set()

    async def _speak(self, socket: ClientConnection) -> None:
        while True:
            self._said.clear()
            for text in self._session.outgoing():
                await socket.send(text)
            await self._said.wait()

    async def _handle(self, delivery: WireDelivery) -> None:
        self._log.note(
            What.EXECUTED,
            key=delivery.task.key,
            task=delivery.task.id,
            attempt=delivery.attempt,
            losses=delivery.losses,
            receipt=delivery.receipt,
        )
        await asyncio.sleep(self._chance.uniform(0, self._hold))
        self._session.finish(delivery.receipt, self._outcome(delivery))
        self._said.set()

    def _outcome(self, delivery: WireDelivery) -> Outcome:
        will = msgspec.json.decode(delivery.task.payload)["will"]
        if will == "retry" and delivery.attempt == 1:
            return RetryLater(self._chance.uniform(0.05, 0.3), "on purpose")
        if will == "bury" and delivery.prior == 0:
            return Rejected("on purpose", None)
        return Success(msgspec.json.encode(delivery.task.id))


async def run(setup: Setup, log: Log, over: asyncio.Event) -> None:
    """Run all workers until told to stop."""
    async with asyncio.TaskGroup() as crowd:
        for number in range(setup.crowd):
            crowd.create_task(_Light(setup, log, number).work(over))
