"""One backend under test, with the steps that most tests share."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol, TypeVar, cast

import pytest

from taskqueue_core.backend import Backend, Capability, Subscription
from taskqueue_core.capabilities import (
    Control,
    DeadLetters,
    Order,
    Permit,
    PoolView,
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
from taskqueue_core.errors import BackendUnavailable, LeaseLost
from taskqueue_core.tasks import Delivery, Ledger, Published, Received, Settled, State, Task

KEY = "alpha"
"""the queue that tests use unless they need two"""
OTHER = "beta"
"""the second queue"""

T = TypeVar("T")


def ids(deliveries: Iterable[Delivery]) -> list[str]:
    """Return the task ids of deliveries, in their order."""
    return [delivery.task.id for delivery in deliveries]


def check_pool(view: PoolView) -> None:
    """Fail where a pool's books do not balance, or where it shows what is its holders' alone."""
    assert all(lease.token == "" for lease in view.leases), "the pool shows a token to every client"
    assert all(lease.note is None for lease in view.leases), "the pool shows a note to every client"
    fences = [lease.fence for lease in view.leases]
    assert fences == sorted(set(fences)), f"fences must be unique and rise: got: {fences}"
    jobs = Counter((lease.model, lease.job) for lease in view.leases if lease.job is not None)
    assert not jobs or max(jobs.values()) == 1, f"a job has several slots: {jobs}"
    held = Counter((lease.model, lease.server, lease.state) for lease in view.leases)
    for info in view.endpoints:
        fields = {
            Permit.UNASSIGNED: info.unassigned,
            Permit.ASSIGNED: info.assigned,
            Permit.DETACHED: info.detached,
        }
        name = (info.endpoint.model, info.endpoint.server)
        true = {state: held.pop((*name, state), 0) for state in Permit}
        assert fields == true, f"the endpoint counts {fields}, its leases are {true}"
        assert info.held + info.free == max(info.endpoint.slots, info.held)
        assert info.overdue <= info.assigned + info.detached
    assert not held, f"leases of endpoints that are not there: {list(held)}"


class _BackendSource(Protocol):
    """What a bench needs of the class of a test: see `taskqueue_conformance.Harness`."""

    @property
    def manual_clock(self) -> bool: ...
    @property
    def short(self) -> float: ...
    @property
    def patience(self) -> float: ...
    async def open_backend(self, clock: ManualClock) -> Backend: ...
    async def replica(self, backend: Backend) -> Backend: ...
    async def reopen(self, backend: Backend) -> Backend: ...


class Bench:
    """A fresh backend, its clock, and moves on it. What the backend does not declare fails."""

    def __init__(self, harness: _BackendSource, backend: Backend, clock: ManualClock) -> None:
        """Work on ``backend``; `close` closes it and all that was opened here."""
        self.backend = backend
        self.clock = clock
        self.short = harness.short
        self.numbers = 0
        """how many ids were made up"""
        self._harness = harness
        self._opened: list[Backend] = [backend]
        self._waiting: list[asyncio.Task[Any]] = []

    @classmethod
    @asynccontextmanager
    async def opened(cls, harness: _BackendSource) -> AsyncIterator[Bench]:
        """Open a fresh backend; at the end its books must balance, and everything is closed."""
        clock = ManualClock()
        bench = cls(harness, await harness.open_backend(clock), clock)
        try:
            yield bench
            await bench.check_books()
        finally:
            await bench.close()

    @property
    def now(self) -> float:
        """The store's time."""
        return self.backend.now()

    @property
    def control(self) -> Control:
        """The operator's side."""
        self._require(Capability.CONTROL)
        return control_of(self.backend)

    @property
    def dead_letters(self) -> DeadLetters:
        """The dead letters."""
        self._require(Capability.DEAD_LETTERS)
        return dead_letters_of(self.backend)

    @property
    def slots(self) -> SlotPool:
        """The pool of slots."""
        self._require(Capability.SLOTS)
        return slots_of(self.backend)

    def task(self, task_id: str, **fields: Any) -> Task:
        """Make a task, on `KEY` and with its id as the payload unless ``fields`` say otherwise."""
        return Task.of(fields.pop("key", KEY), fields.pop("payload", task_id), id=task_id, **fields)

    async def publish(self, *task_ids: str, **fields: Any) -> tuple[Task, ...]:
        """Publish one task per id in one batch; all must be accepted."""
        tasks = tuple(self.task(task_id, **fields) for task_id in task_ids)
        for confirmation in await self.backend.publisher.publish(*tasks):
            assert confirmation.status is Published.ACCEPTED, (
                f"a new task must be accepted (laws 6, 7): got {confirmation}"
            )
        return tasks

    def subscribe(self, *keys: str, consumer: str = "worker") -> Subscription:
        """Subscribe to ``keys``, or to `KEY`."""
        return self.backend.subscribe(keys or (KEY,), consumer)

    async def subscribed(self, *task_ids: str, **fields: Any) -> Subscription:
        """Publish tasks, and subscribe to `KEY`."""
        await self.publish(*task_ids, **fields)
        return self.subscribe()

    async def running(self, *task_ids: str, **fields: Any) -> tuple[Subscription, Delivery]:
        """Publish tasks, and receive the first of them through a subscription to `KEY`."""
        subscription = await self.subscribed(*task_ids, **fields)
        return subscription, await self.one(subscription)

    async def all_running(self, *task_ids: str, **fields: Any) -> tuple[Any, ...]:
        """Publish tasks and receive them all; return the subscription, then the deliveries."""
        subscription = await self.subscribed(*task_ids, **fields)
        return subscription, *await self.take(subscription, len(task_ids))

    async def wakes(
        self, receive: Coroutine[Any, Any, Received], event: Awaitable[object]
    ) -> list[str]:
        """Fail unless a receive waits until an event, and then returns; return the ids of its deliveries."""
        waiting = await self.start(receive)
        assert not waiting.done(), "a receive returned at once: expected it to wait"
        await event
        return ids((await self.outcome(waiting)).deliveries)

    async def stale(self, settlement: Awaitable[object]) -> None:
        """Fail unless a settlement raises `LeaseLost`, because its receipt is stale."""
        try:
            answer = await settlement
        except LeaseLost:
            return
        pytest.fail(f"a stale receipt was accepted (law 2): expected LeaseLost, got {answer}")

    async def take(self, subscription: Subscription, limit: int = 1) -> list[Delivery]:
        """Receive without waiting, until there are ``limit`` deliveries or nothing more is to be had."""
        taken: list[Delivery] = []
        for _ in range(limit + 10 if limit else 0):
            received = await subscription.receive(limit - len(taken), 0)
            taken += received.deliveries
            if len(taken) >= limit or not (received.deliveries or received.again):
                break
        return taken

    async def one(self, subscription: Subscription) -> Delivery:
        """Receive the one delivery that must be available."""
        taken = await self.take(subscription)
        assert taken, "nothing was delivered: expected one delivery, because a task is available"
        return taken[0]

    async def drain(self, *subscriptions: Subscription, count: int, limit: int = 1) -> list[str]:
        """Take up to ``limit`` each in turn and ack them, until there are ``count``; return the ids."""
        taken: list[str] = []
        while len(taken) < count:
            before = len(taken)
            for subscription in subscriptions:
                deliveries = await self.take(subscription, min(limit, count - len(taken)))
                if deliveries:
                    await subscription.ack(*deliveries)
                    taken += ids(deliveries)
            assert len(taken) > before, f"{len(taken)} delivered, {count} are available"
        return taken

    async def eventually(self, subscription: Subscription, limit: int) -> list[Delivery]:
        """Take ``limit`` deliveries, giving a backend that works in the background time to bring them."""
        taken = await self.take(subscription, limit)
        for _ in range(50):
            if len(taken) >= limit:
                break
            await self.hop(4)
            taken += await self.take(subscription, limit - len(taken))
        return taken

    async def redeliver_until_dead(self, subscription: Subscription) -> None:
        """Lose the one available task until it is dead."""
        for _ in range(1001):
            outcome = await subscription.redeliver(await self.one(subscription), lost=True)
            if outcome == (Settled.DEAD,):
                return
        pytest.fail(
            "a task that was lost 1001 times is not dead: expected Settled.DEAD after max_losses losses (law 3)"
        )

    async def bury(
        self, subscription: Subscription, delivery: Delivery, reason: str = "bad"
    ) -> Settled:
        """Put a delivery among the dead letters."""
        self._require(Capability.DEAD_LETTERS)
        return await dead_lettering_of(self.backend, subscription).dead_letter(
            delivery, reason, f"{reason}: details"
        )

    async def adopt(
        self, subscription: Subscription, *receipts: str
    ) -> tuple[Delivery | None, ...]:
        """Move deliveries to ``subscription``."""
        self._require(Capability.HANDOVER)
        return await handover_of(self.backend, subscription).adopt(*receipts)

    async def revoked(self, subscription: Subscription) -> tuple[str, ...]:
        """Wait for the next revoked receipts of ``subscription``."""
        self._require(Capability.REVOCATION)
        return await revocation_of(self.backend, subscription).revoked()

    async def configure(self, key: str = KEY, **settings: Any) -> QueueSettings:
        """Change settings of a queue."""
        present = await self.control.settings(key)
        return await self.control.configure(key, present.model_copy(update=settings))

    async def limit(self, key: str = KEY, **settings: Any) -> None:
        """Change what limits the flow of a queue."""
        self._require(Capability.FLOW)
        await self.configure(key, **settings)

    async def arrange(self, key: str = KEY, **settings: Any) -> None:
        """Change in which order the tasks of a queue are delivered."""
        self._require(Capability.ORDER)
        await self.configure(key, **settings)

    async def fair(self, key: str = KEY, **settings: Any) -> None:
        """Have the tenants of a queue take turns."""
        await self.arrange(key, order=Order.FAIR, **settings)

    def room_signal(self, *keys: str) -> RoomSignal:
        """Make a signal for room in ``keys``, or in `KEY`."""
        self._require(Capability.FLOW)
        return cast("RoomSignals", self.backend.publisher).room_signal(*(keys or (KEY,)))

    async def expect(self, **counts: int) -> None:
        """Compare the ledger of `KEY`: states that are not named must be 0. Does nothing without ``control``."""
        if not has(self.backend, Capability.CONTROL):
            return
        ledger = await self.control.ledger(KEY)
        counts.setdefault("published", sum(counts.values()))
        expected = Ledger(**counts)
        assert ledger == expected, f"the ledger of {KEY!r} is wrong (law 1)"

    async def state(self, task_id: str, key: str = KEY) -> State | None:
        """Return a task's state, ``None`` where it is not known."""
        (status,) = await self.control.statuses(key, task_id)
        return None if status is None else status.state

    async def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass for the store, and a little more where they are real ones."""
        if self._harness.manual_clock:
            await self.clock.advance(seconds)
        else:
            await asyncio.sleep(seconds * 1.02 + 0.002)

    async def hop(self, hops: int) -> None:
        """Let other coroutines run: ``hops`` rounds of the event loop, or the time a store far away takes for them."""
        if self._harness.manual_clock:
            for _ in range(hops):
                await asyncio.sleep(0)
        else:
            await asyncio.sleep(hops * self.short / 100)

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until something has happened, within the patience."""
        try:
            async with asyncio.timeout(self._harness.patience):
                while not condition():  # noqa: ASYNC110 - a condition of any kind has no event
                    await asyncio.sleep(0.001)
        except TimeoutError:
            pytest.fail(f"timed out, still waiting: {what}")

    async def start(self, call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a call and let it come to where it waits."""
        task = asyncio.ensure_future(call)
        self._waiting.append(task)
        await self.hop(20)
        return task

    async def outcome(self, task: asyncio.Task[T]) -> T:
        """Return what a started call answers; fail where it hangs."""
        done, _ = await asyncio.wait({task}, timeout=self._harness.patience)
        if not done:
            pytest.fail("a call still waits: expected it to return after the event")
        return task.result()

    async def replica(self) -> Bench:
        """Open another backend on the same store, as another process would."""
        return self._sibling(await self._harness.replica(self.backend))

    async def reopen(self) -> Bench:
        """Close the backend and open another one on what it left behind."""
        return self._sibling(await self._harness.reopen(self.backend))

    def _require(self, capability: Capability) -> None:
        assert has(self.backend, capability), (
            f"the backend does not declare {capability.value!r}: a test that uses it is to be marked "
            f"@needs(Capability.{capability.name})"
        )

    def _sibling(self, backend: Backend) -> Bench:
        self._opened.append(backend)
        bench = Bench(self._harness, backend, self.clock)
        bench._waiting = self._waiting
        return bench

    async def check_books(self) -> None:
        """Fail where a ledger or the pool does not balance. A backend that the test has closed may refuse to tell."""
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
        """End what still waits and close every backend."""
        for task in self._waiting:
            task.cancel()
        await asyncio.gather(*self._waiting, return_exceptions=True)
        for backend in reversed(self._opened):
            await backend.aclose()
