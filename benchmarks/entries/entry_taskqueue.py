"""The Redis backend of this project, used only through the public API.

Modes: ``subscription`` receives and acks batches of 100; ``handler`` is a local worker that calls a coroutine for each
task; ``batch`` is a local worker that calls a coroutine for each batch of up to 100 tasks.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

import msgspec
import uvloop
from adapter import BATCH, Book, batches, serve
from adapter import payload as payload_of

from taskqueue_core import Task
from taskqueue_core.backend import Subscription
from taskqueue_core.capabilities import QueueSettings, control_of
from taskqueue_core.loading import load_backend
from taskqueue_core.tasks import Delivery, Published
from taskqueue_worker import LocalWorker

BULK = 1000
"""number of tasks in one publish call, which is the maximum of the contract"""
CONCURRENCY = 200
_payload = msgspec.json.Decoder()


class Handlers:
    """The handlers that an application would write: for one task per call, or for a batch."""

    def __init__(self, book: Book) -> None:
        self._book = book

    async def one(self, number: int, sent: float, note: str) -> None:  # noqa: ARG002 - part of the payload
        """Handle one task."""
        self._book.note(number, sent)

    async def batch(self, payloads: list[dict[str, Any]]) -> None:
        """Handle a batch."""
        for payload in payloads:
            self._book.note(payload["number"], payload["sent"])


_PRIORITIES = (1, 5, 9)


class Ours:
    """An entry for this project. The producer and the worker are two processes, each with its own backend object."""

    packages = ("redis", "hiredis", "uvloop", "msgspec", "taskqueue-backends")

    def __init__(self, mode: str, url: str) -> None:
        os.environ["TASKQUEUE_REDIS_URL"] = url
        self._mode = mode
        self._backend = load_backend("redis")

    async def publish(self, number: int, sent: float) -> None:
        """Publish one task, and check its confirmation."""
        (answer,) = await self._backend.publisher.publish(Task.of("k0", payload_of(number, sent)))
        assert answer.status is Published.ACCEPTED, answer

    async def publish_many(self, numbers: range, busy: int = 1, tenants: int = 0) -> None:
        """Publish `BULK` tasks per call, to ``busy`` keys in turn, and check all confirmations.

        With ``tenants``, the tasks belong to that number of tenants and have three priorities.
        """
        for batch in batches(numbers, BULK):
            tasks = [
                Task.of(f"k{number % busy}", payload_of(number), **_whose(number, tenants))
                for number in batch
            ]
            for answer in await self._backend.publisher.publish(*tasks):
                assert answer.status is Published.ACCEPTED, answer

    async def work(self, book: Book) -> None:
        """Receive and ack all tasks of one key."""
        if self._mode == "subscription":
            async with self._backend.subscribe(["k0"], "bench") as subscription:
                await _drain(subscription, book)
            return
        handlers = Handlers(book)
        worker = LocalWorker(backend=self._backend, concurrency=CONCURRENCY)
        if self._mode == "batch":
            worker.task("k0", batch=BATCH)(handlers.batch)
        else:
            worker.task("k0")(handlers.one)
        book.when_full(worker.stop)
        await worker.serve()
        book.end()  # the last acknowledgement belongs to the measurement

    async def idle_many(self, seconds: float, subscriptions: int) -> dict[str, float]:
        """Let the given number of subscriptions wait for tasks, each with a key of its own, and return the costs."""

        async def wait(number: int) -> None:
            async with self._backend.subscribe([f"idle{number}"], f"bench{number}") as open_one:
                await open_one.receive(BATCH, seconds)

        await asyncio.gather(*(wait(number) for number in range(subscriptions)))
        return {}

    async def cycles(
        self, count: int, per_cycle: int, keys: int, busy: int, tenants: int = 0
    ) -> dict[str, float]:
        """Publish and drain repeatedly; return the total time of the drains."""
        seconds = cpu = 0.0
        names = [f"k{number}" for number in range(keys)]
        async with self._backend.subscribe(names, "bench") as subscription:
            for _ in range(count):
                await self.publish_many(range(per_cycle), busy, tenants)
                book = Book(per_cycle)
                await _drain(subscription, book)
                figures = book.figures()
                seconds, cpu = seconds + figures["seconds"], cpu + figures["cpu"]
        return {"seconds": seconds, "cpu": cpu, "handled": count * per_cycle}

    async def left(self) -> int:
        """Return the number of entries that have not ended, according to the ledger, which must balance."""
        control, live = control_of(self._backend), 0
        for key in await control.queues():
            ledger = await control.ledger(key)
            assert ledger.balanced, ledger
            live += ledger.waiting + ledger.scheduled + ledger.in_flight
        return live

    async def configure(self, **changed: Any) -> None:
        """Change settings of the queue."""
        control = control_of(self._backend)
        settings = await control.settings("k0")
        wanted = QueueSettings.model_validate(settings.model_dump() | changed)
        await control.configure("k0", wanted)

    async def forget(self) -> int:
        """Run maintenance until nothing is left to delete; return the number of deleted records."""
        total = 0
        while forgotten := (await control_of(self._backend).maintain()).forgotten:
            total += forgotten
        return total

    async def close(self) -> None:
        """Close the backend."""
        await self._backend.aclose()


def _whose(number: int, tenants: int) -> dict[str, Any]:
    if not tenants:
        return {}
    return {"tenant": f"t{number % tenants}", "priority": _PRIORITIES[number // tenants % 3]}


async def _drain(subscription: Subscription, book: Book) -> None:
    book.begin()
    while len(book.numbers) < book.expected:
        deliveries = (await subscription.receive(BATCH, None)).deliveries
        for delivery in deliveries:
            payload = _payload.decode(delivery.task.payload)
            book.note(payload["number"], payload["sent"])
        await _ack(subscription, deliveries)
    book.end()  # the last acknowledgement belongs to the measurement


async def _ack(subscription: Subscription, deliveries: Sequence[Delivery]) -> None:
    if deliveries:
        answers = await subscription.ack(*deliveries)
        assert all(answer.ok for answer in answers), answers


if __name__ == "__main__":
    serve(Ours, uvloop.new_event_loop)
