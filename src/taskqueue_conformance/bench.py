"""The test bench, which opens, disturbs and observes the backend under test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from typing import Any, Protocol, TypeVar, cast

import pytest

from taskqueue_conformance.slots.helpers import LONG, PoolSteps, check_pool
from taskqueue_core.backend import Backend, Capability, Subscription
from taskqueue_core.capabilities import (
    Control,
    DeadLetters,
    Order,
    QueueSettings,
    RoomSignal,
    RoomSignals,
    SlotPool,
    control_of,
    dead_lettering_of,
    dead_letters_of,
    handover_of,
    has,
    revocation_of,
    slots_of,
)
from taskqueue_core.clock import ManualClock
from taskqueue_core.errors import BackendUnavailable, InvalidInput, LeaseLost
from taskqueue_core.tasks import (
    Confirmation,
    Delivery,
    Ledger,
    Published,
    Received,
    Settled,
    State,
    Task,
)

KEY = "alpha"
"""name of the queue that most tests use"""
OTHER = "beta"
"""name of the queue for tests that need a second queue"""

T = TypeVar("T")


def ids(deliveries: Iterable[Delivery]) -> list[str]:
    """Return the task ids of deliveries, in the order of the deliveries."""
    return [delivery.task.id for delivery in deliveries]


class _BackendSource(Protocol):
    """The part of `taskqueue_conformance.Harness` that a `Bench` uses."""

    @property
    def manual_clock(self) -> bool: ...
    @property
    def short(self) -> float: ...
    @property
    def patience(self) -> float: ...
    async def open_backend(self, clock: ManualClock) -> Backend: ...
    async def replica(self, backend: Backend) -> Backend: ...
    async def reopen(self, backend: Backend) -> Backend: ...
    def opener(self, backend: Backend) -> Callable[[], Backend]: ...
    async def stored(self, backend: Backend) -> int: ...
    def failing(self, backend: Backend, writes: int) -> AbstractContextManager[None]: ...
    def unanswered(self, backend: Backend) -> AbstractContextManager[None]: ...
    @property
    def silence(self) -> float: ...


class Bench:
    """A fresh backend, its clock, and common test steps.

    A step fails if the backend lacks a capability that the step needs.
    """

    def __init__(self, harness: _BackendSource, backend: Backend, clock: ManualClock) -> None:
        self.backend = backend
        self.clock = clock
        self.short = harness.short
        self.numbers = 0
        """number of task ids generated so far; it makes each new id unique"""
        self.harness = harness
        self._opened: list[Backend] = [backend]
        self._waiting: list[asyncio.Task[Any]] = []

    @classmethod
    @asynccontextmanager
    async def opened(cls, harness: _BackendSource) -> AsyncIterator[Bench]:
        """Open a fresh backend and yield its bench. At the end, check its ledgers and slots, and close all backends."""
        clock = ManualClock()
        bench = cls(harness, await harness.open_backend(clock), clock)
        try:
            yield bench
            await bench.check_books()
        finally:
            await bench.close()

    @property
    def now(self) -> float:
        """The current time on the store's clock, in Unix seconds."""
        return self.backend.now()

    @property
    def control(self) -> Control:
        """The backend's `Control`; access fails if the backend does not declare ``control``."""
        self._require(Capability.CONTROL)
        return control_of(self.backend)

    @property
    def dead_letters(self) -> DeadLetters:
        """The backend's `DeadLetters`; access fails if the backend does not declare ``dead_letters``."""
        self._require(Capability.DEAD_LETTERS)
        return dead_letters_of(self.backend)

    @property
    def slots(self) -> SlotPool:
        """The backend's `SlotPool`; access fails if the backend does not declare ``slots``."""
        self._require(Capability.SLOTS)
        return slots_of(self.backend)

    @property
    def pool(self) -> PoolSteps:
        """Helper methods for tests of slots; access fails if the backend does not declare ``slots``."""
        return PoolSteps(self.slots, self.advance, self.short)

    def task(self, task_id: str, **fields: Any) -> Task:
        """Return a new task. By default, its queue is `KEY`, and its payload is its id."""
        return Task.of(fields.pop("key", KEY), fields.pop("payload", task_id), id=task_id, **fields)

    async def publish(self, *task_ids: str, **fields: Any) -> tuple[Task, ...]:
        """Publish one task per id in one batch; fail unless all tasks are accepted."""
        tasks = tuple(self.task(task_id, **fields) for task_id in task_ids)
        for confirmation in await self.offer(*tasks):
            assert confirmation.status is Published.ACCEPTED, (
                f"a new task must be accepted (laws 6, 7): got {confirmation}"
            )
        return tasks

    async def offer(self, *tasks: Task | str) -> tuple[Confirmation, ...]:
        """Publish tasks in one batch and return the confirmations; a string is the id of a new task."""
        made = (self.task(task) if isinstance(task, str) else task for task in tasks)
        return await self.backend.publisher.publish(*made)

    async def statuses(self, *tasks: Task | str) -> list[Published]:
        """Publish tasks as `offer` does, and return the ``status`` of each confirmation."""
        return [confirmation.status for confirmation in await self.offer(*tasks)]

    async def retry(self, task: Task, delay: float = 0.0, **fields: Any) -> Published:
        """Schedule a retry of a task in ``delay`` seconds, and return the ``status`` of the confirmation."""
        retried = self.backend.publisher.schedule_retry(task, self.now + delay, **fields)
        return (await retried).status

    def subscribe(self, *keys: str, consumer: str = "worker") -> Subscription:
        """Subscribe to ``keys``, or to `KEY` if no key is given."""
        return self.backend.subscribe(keys or (KEY,), consumer)

    async def subscribed(self, *task_ids: str, **fields: Any) -> Subscription:
        """Publish tasks in `KEY`, and return a new subscription to this queue."""
        await self.publish(*task_ids, **fields)
        return self.subscribe()

    async def running(self, *task_ids: str, **fields: Any) -> tuple[Subscription, Delivery]:
        """Publish tasks and receive the first task; return the subscription to `KEY` and the delivery."""
        subscription = await self.subscribed(*task_ids, **fields)
        return subscription, await self.one(subscription)

    async def all_running(self, *task_ids: str, **fields: Any) -> tuple[Any, ...]:
        """Publish tasks and receive all of them; return a tuple of the subscription and the deliveries."""
        subscription = await self.subscribed(*task_ids, **fields)
        return subscription, *await self.take(subscription, len(task_ids))

    async def wakes(
        self, receive: Coroutine[Any, Any, Received], event: Awaitable[object]
    ) -> list[str]:
        """Fail unless ``event`` ends the wait of ``receive``; return the task ids that ``receive`` got."""
        waiting = await self.start(receive)
        assert not waiting.done(), "a receive returned at once: expected it to wait"
        await event
        return ids((await self.outcome(waiting)).deliveries)

    async def stale(self, settlement: Awaitable[object]) -> None:
        """Fail unless ``settlement`` raises `LeaseLost`, because its receipt is stale."""
        try:
            answer = await settlement
        except LeaseLost:
            return
        pytest.fail(f"a stale receipt was accepted (law 2): expected LeaseLost, got {answer}")

    async def invalid(self, field: str, call: Awaitable[object]) -> None:
        """Fail unless ``call`` raises `InvalidInput` for the argument ``field``."""
        with pytest.raises(InvalidInput) as error:
            await call
        assert error.value.field == field

    async def take(self, subscription: Subscription, limit: int = 1) -> list[Delivery]:
        """Receive without waiting, until there are ``limit`` deliveries or no more tasks are available."""
        taken: list[Delivery] = []
        for _ in range(limit + 10 if limit else 0):
            received = await subscription.receive(limit - len(taken), 0)
            taken += received.deliveries
            if len(taken) >= limit or not (received.deliveries or received.again):
                break
        return taken

    async def one(self, subscription: Subscription) -> Delivery:
        """Receive one delivery without waiting; fail if no task is available."""
        taken = await self.take(subscription)
        assert taken, "nothing was delivered: expected one delivery, because a task is available"
        return taken[0]

    async def drain(self, *subscriptions: Subscription, count: int, limit: int = 1) -> list[str]:
        """Receive and ack ``count`` tasks, up to ``limit`` from each subscription in turn; return their ids."""
        taken: list[str] = []
        while len(taken) < count:
            before = len(taken)
            for subscription in subscriptions:
                deliveries = await self.take(subscription, min(limit, count - len(taken)))
                if deliveries:
                    await subscription.ack(*deliveries)
                    taken += ids(deliveries)
            assert len(taken) > before, f"too few deliveries: expected {count}, got {len(taken)}"
        return taken

    async def eventually(self, subscription: Subscription, limit: int) -> list[Delivery]:
        """Receive up to ``limit`` deliveries, with pauses in which the backend may finish background work."""
        taken = await self.take(subscription, limit)
        for _ in range(50):
            if len(taken) >= limit:
                break
            await self.hop(4)
            taken += await self.take(subscription, limit - len(taken))
        return taken

    async def bury(
        self, subscription: Subscription, delivery: Delivery, reason: str = "bad"
    ) -> Settled:
        """Turn the task of a delivery into a dead letter."""
        self._require(Capability.DEAD_LETTERS)
        return await dead_lettering_of(self.backend, subscription).dead_letter(
            delivery, reason, f"{reason}: details"
        )

    async def adopt(
        self, subscription: Subscription, *receipts: str, allowed: Callable[[str], bool] = bool
    ) -> tuple[Delivery | None, ...]:
        """Adopt the deliveries with these receipts; return one delivery per receipt, or ``None`` if it was refused."""
        self._require(Capability.HANDOVER)
        return await handover_of(self.backend, subscription).adopt(*receipts, allowed=allowed)

    async def revoked(self, subscription: Subscription) -> tuple[str, ...]:
        """Wait until deliveries of ``subscription`` are revoked; return their receipts."""
        self._require(Capability.REVOCATION)
        return await revocation_of(self.backend, subscription).revoked()

    async def configure(self, key: str = KEY, **settings: Any) -> QueueSettings:
        """Change the given settings of a queue, keep its other settings, and return all of its settings."""
        present = await self.control.settings(key)
        return await self.control.configure(key, present.model_copy(update=settings))

    async def limit(self, key: str = KEY, **settings: Any) -> None:
        """Change the given settings of a queue. These settings need the capability ``flow``."""
        self._require(Capability.FLOW)
        await self.configure(key, **settings)

    async def arrange(self, key: str = KEY, **settings: Any) -> None:
        """Change the given settings of a queue. These settings determine the order of its deliveries."""
        alone = set(settings) == {"floor_share"}
        self._require(Capability.FLOOR_SHARE if alone else Capability.FAIR_ORDER)
        await self.configure(key, **settings)

    async def fair(self, key: str = KEY, **settings: Any) -> None:
        """Set the order of a queue to ``fair``, and change the given settings."""
        await self.arrange(key, order=Order.FAIR, **settings)

    def room_signal(self, *keys: str) -> RoomSignal:
        """Return a room signal for ``keys``, or for `KEY` if no key is given."""
        self._require(Capability.FLOW)
        return cast("RoomSignals", self.backend.publisher).room_signal(*(keys or (KEY,)))

    async def expect(self, **counts: int) -> None:
        """Fail unless the ledger of `KEY` has ``counts``, and 0 in other states; do nothing without ``control``."""
        if not has(self.backend, Capability.CONTROL):
            return
        ledger = await self.control.ledger(KEY)
        counts.setdefault("published", sum(counts.values()))
        expected = Ledger(**counts)
        assert ledger == expected, f"the ledger of {KEY!r} is wrong (law 1)"

    async def state(self, task_id: str, key: str = KEY) -> State | None:
        """Return the state of a task, or ``None`` if the store does not know the task."""
        (status,) = await self.control.statuses(key, task_id)
        return None if status is None else status.state

    async def advance(self, seconds: float) -> None:
        """Advance the manual clock, or sleep slightly longer than ``seconds`` if the backend has its own clock."""
        if self.harness.manual_clock:
            await self.clock.advance(seconds)
        else:
            await asyncio.sleep(seconds * 1.02 + 0.002)

    async def hop(self, hops: int) -> None:
        """Let other coroutines run for ``hops`` rounds of the event loop. Without a manual clock, sleep briefly."""
        if self.harness.manual_clock:
            for _ in range(hops):
                await asyncio.sleep(0)
        else:
            await asyncio.sleep(hops * self.short / 100)

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until ``condition`` is true; fail if this takes longer than `Harness.patience`."""
        try:
            async with asyncio.timeout(self.harness.patience):
                while not condition():  # noqa: ASYNC110 - no event signals that the condition is true
                    await asyncio.sleep(0.001)
        except TimeoutError:
            pytest.fail(f"timed out while waiting {what}")

    async def start(self, call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a call as an `asyncio.Task`, and give it time to end or to begin to wait."""
        task = asyncio.ensure_future(call)
        self._waiting.append(task)
        await self.hop(20)
        return task

    async def outcome(self, task: asyncio.Task[T]) -> T:
        """Return the result of a started call; fail if it does not end within `Harness.patience`."""
        done, _ = await asyncio.wait({task}, timeout=self.harness.patience)
        if not done:
            pytest.fail("a call still waits: expected it to return")
        return task.result()

    async def silent(self, signal: RoomSignal, timeout: float = LONG) -> asyncio.Task[None]:
        """Start a wait for a signal, and return the wait.

        Start the wait again if the signal fires without cause, and fail if the signal keeps firing.
        """
        waiting = await self.start(signal.wait(timeout))
        for _ in range(5):
            if waiting.done():
                waiting = await self.start(signal.wait(timeout))
        assert not waiting.done(), "the signal fires repeatedly without cause"
        return waiting

    async def fires(self, signal: RoomSignal, event: Awaitable[T]) -> T:
        """Fail unless ``event`` ends a wait for ``signal``; return the result of ``event``."""
        async with signal:
            waiting = await self.silent(signal)
            result = await event
            await self.outcome(waiting)
            return result

    async def replica(self) -> Bench:
        """Open another backend on the same store, as another process would, and return its bench."""
        return self.on(await self.harness.replica(self.backend))

    async def reopen(self) -> Bench:
        """Close the backend, open another backend on the stored data, and return its bench."""
        return self.on(await self.harness.reopen(self.backend))

    def _require(self, capability: Capability) -> None:
        assert has(self.backend, capability), (
            f"the backend does not declare {capability.value!r}: a test that uses it must be marked "
            f"@needs(Capability.{capability.name})"
        )

    def on(self, backend: Backend) -> Bench:
        """Return a bench on another backend, which is closed together with this bench."""
        self._opened.append(backend)
        bench = Bench(self.harness, backend, self.clock)
        bench._waiting = self._waiting
        return bench

    async def check_books(self) -> None:
        """Fail if a ledger or the slot pool does not balance. A backend that the test has closed is not checked."""
        if has(self.backend, Capability.CONTROL):
            with suppress(BackendUnavailable):
                for key in await self.control.queues():
                    ledger = await self.control.ledger(key)
                    assert ledger.balanced, (
                        f"the ledger of {key!r} does not balance: {ledger} (law 1)"
                    )
        if has(self.backend, Capability.SLOTS):
            with suppress(BackendUnavailable):
                check_pool(await self.slots.inspect())

    async def close(self) -> None:
        """Cancel started calls that have not returned, and close every backend that was opened."""
        for task in self._waiting:
            task.cancel()
        await asyncio.gather(*self._waiting, return_exceptions=True)
        for backend in reversed(self._opened):
            await backend.aclose()
