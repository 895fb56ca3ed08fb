"""Our backend, through its public contract alone.

Modes: ``subscription`` receives and acknowledges batches of 100; ``handler`` is a local worker with one
coroutine call per task, ``batch`` one with a call per batch of up to 100.
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
"""tasks of one publish call, the contract's limit"""
CONCURRENCY = 200
_payload = msgspec.json.Decoder()


class Handlers:
    """What an application would write: one coroutine per task, or one per batch."""

    def __init__(self, book: Book) -> None:
        self._book = book

    async def one(self, number: int, sent: float, note: str) -> None:  # noqa: ARG002 - a task's payload
        """Handle one task."""
        self._book.note(number, sent)

    async def batch(self, payloads: list[dict[str, Any]]) -> None:
        """Handle a batch."""
        for payload in payloads:
            self._book.note(payload["number"], payload["sent"])


_PRIORITIES = (1, 5, 9)


class Ours:
    """The redis backend; a producer and a worker are two processes, each with a backend of its own."""

    packages = ("redis", "hiredis", "uvloop", "msgspec", "taskqueue-backends")

    def __init__(self, mode: str, url: str) -> None:
        os.environ["TASKQUEUE_REDIS_URL"] = url
        self._mode = mode
        self._backend = load_backend("redis")

    async def publish(self, number: int, sent: float) -> None:
        """Publish one task and look at its confirmation."""
        (answer,) = await self._backend.publisher.publish(Task.of("k0", payload_of(number, sent)))
        assert answer.status is Published.ACCEPTED, answer

    async def publish_many(self, numbers: range, busy: int = 1, tenants: int = 0) -> None:
        """Publish in calls of `BULK` tasks, over ``busy`` keys in turn; look at every confirmation.

        With ``tenants`` each has tasks of three priorities.
        """
        for batch in batches(numbers, BULK):
            tasks = [
                Task.of(f"k{number % busy}", payload_of(number), **_whose(number, tenants))
                for number in batch
            ]
            for answer in await self._backend.publisher.publish(*tasks):
                assert answer.status is Published.ACCEPTED, answer

    async def work(self, book: Book) -> None:
        """Drain one key."""
        if self._mode == "subscription":
            async with self._backend.subscribe(["k0"], "bench") as subscription:
                await _drain(subscription, book)
            return
        handlers = Handlers(book)
        worker = LocalWorker(self._backend, concurrency=CONCURRENCY)
        if self._mode == "batch":
            worker.task("k0", batch=BATCH)(handlers.batch)
        else:
            worker.task("k0")(handlers.one)
        book.when_full(worker.stop)
        await worker.serve()
        book.end()  # we pay for the last acknowledgement

    async def idle_many(self, seconds: float, subscriptions: int) -> dict[str, float]:
        """Let subscriptions wait, each on a key of its own."""

        async def wait(number: int) -> None:
            async with self._backend.subscribe([f"idle{number}"], f"bench{number}") as open_one:
                await open_one.receive(BATCH, seconds)

        await asyncio.gather(*(wait(number) for number in range(subscriptions)))
        return {}

    async def cycles(
        self, count: int, per_cycle: int, keys: int, busy: int, tenants: int = 0
    ) -> dict[str, float]:
        """Publish and drain, over and over; return the time that draining took."""
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
        """Live entries by the ledger, which must balance."""
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
    book.end()  # we pay for the last acknowledgement


async def _ack(subscription: Subscription, deliveries: Sequence[Delivery]) -> None:
    if deliveries:
        answers = await subscription.ack(*deliveries)
        assert all(answer.ok for answer in answers), answers


if __name__ == "__main__":
    serve(Ours, uvloop.new_event_loop)
