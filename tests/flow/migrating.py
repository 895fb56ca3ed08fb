"""A complete migration between any two stores, under load, in which processes are killed.

`migration(seed, old, new)` publishes from several processes, one of which is not configured for the migration. Workers
consume from both backends. The operator is killed in the middle of each command, and other processes from time to time;
some seeds also roll the migration back. The result contains the final ledgers of both backends. `Story.check` compares
them with the confirmed publishes.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import msgspec

from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.errors import BackendUnavailable, PublishUnconfirmed
from taskqueue_core.migration import (
    MigratingBackend,
    MigrationMode,
    finish,
    rollback,
    start,
    status,
)
from taskqueue_core.tasks import Published, State, Task
from taskqueue_memory import MemoryBackend

KEYS = ("alpha", "beta", "gamma")


class StoreHome(Protocol):
    """A store that several simulated processes open and leave."""

    def enter(self) -> Backend:
        """Open a backend on the store, as another process would."""

    async def kill(self, backend: Backend) -> None:
        """End the process that uses ``backend`` without a clean shutdown; return once its deliveries are free again."""


class _Visitor:
    """One process's view of a memory store: closing it ends its subscriptions but keeps the tasks."""

    def __init__(self, store: MemoryBackend) -> None:
        self._store = store
        self.subscriptions: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def subscribe(self, keys: Any, consumer: str) -> Any:
        self.subscriptions.append(self._store.subscribe(keys, consumer))
        return self.subscriptions[-1]

    async def aclose(self) -> None:
        for subscription in self.subscriptions:
            await subscription.close()


class MemoryHome:
    """A memory store that keeps its tasks when the simulated processes that use it end."""

    def __init__(self, store: MemoryBackend | None = None) -> None:
        self.store = store or MemoryBackend()

    def enter(self) -> Backend:
        """Open a view of the store for one process."""
        return _Visitor(self.store)

    async def kill(self, backend: Backend) -> None:
        """Close the process's subscriptions, which returns its deliveries to the store."""
        await backend.aclose()


class KilledError(BaseException):
    """Stands for the death of a process in the middle of a command."""


def cut_after(side: Any, changes: int, *, before: bool) -> None:
    """Raise `KilledError` at the given number of settings changes on ``side``, before or after the last one."""
    control, count = side.control, 0

    async def configure(key: str, settings: QueueSettings) -> QueueSettings:
        nonlocal count
        count += 1
        if count >= changes and before:
            raise KilledError
        told: QueueSettings = await control.configure(key, settings)
        if count >= changes:
            raise KilledError
        return told

    class Cut:
        def __getattr__(self, name: str) -> Any:
            return configure if name == "configure" else getattr(control, name)

    side.control = Cut()


class Story(msgspec.Struct):
    """What was confirmed and executed during a migration, and the final ledgers of both backends."""

    accepted: Counter[tuple[str, str]] = msgspec.field(default_factory=Counter)
    stored: set[tuple[str, str]] = msgspec.field(default_factory=set)
    tried: set[tuple[str, str]] = msgspec.field(default_factory=set)
    acked: Counter[tuple[str, str]] = msgspec.field(default_factory=Counter)
    """number of times that a worker's ack of a task was confirmed"""
    done: Counter[tuple[str, str]] = msgspec.field(default_factory=Counter)
    """number of backends in which the task ended as done"""
    old: dict[str, Any] = {}
    new: dict[str, Any] = {}
    kills: int = 0

    def check(self) -> None:
        """Assert that each stored task is done exactly once, in one of the backends, and that both ledgers balance."""
        twice = [name for name, times in self.accepted.items() if times > 1]
        assert not twice, f"accepted twice: {twice}"
        lost = [name for name in self.stored if not self.done[name]]
        assert not lost, f"confirmed and never executed: {lost}"
        both = [name for name, sides in self.done.items() if sides > 1]
        assert not both, f"done in both backends: {both}"
        again = [name for name, times in self.acked.items() if times > 1]
        assert not again, f"settled twice: {again}"
        for books in (self.old, self.new):
            for key, ledger in books.items():
                assert ledger.balanced, f"{key}: {ledger}"
        done = sum(ledger.done for books in (self.old, self.new) for ledger in books.values())
        published = sum(
            ledger.published for books in (self.old, self.new) for ledger in books.values()
        )
        assert published == done == sum(self.done.values()), (published, done, self.done)


class _Run:
    def __init__(
        self,
        seed: int,
        old: StoreHome,
        new: StoreHome,
        mode: MigrationMode,
        command: Callable[[str], Awaitable[None]] | None,
    ) -> None:
        self.random = random.Random(seed)
        self.homes = old, new
        self.mode = mode
        self.command = command
        self.story = Story()
        self.enough = False

    def process(self) -> MigratingBackend:
        old, new = (home.enter() for home in self.homes)
        return MigratingBackend(old, new, mode=self.mode, patience=5)

    async def kill(self, backend: MigratingBackend) -> None:
        self.story.kills += 1
        for home, side in zip(self.homes, backend.members, strict=True):
            await home.kill(side.backend)

    async def produce(self, backend: Backend, name: str, tasks: int) -> None:
        """Publish tasks. Two producers use each id, and some publishes are repeated."""
        for number in range(tasks):
            task = Task(key=KEYS[number % len(KEYS)], id=f"{name}{number}")
            for _ in range(self.random.choice((1, 1, 2))):
                await self.publish(backend, task)
            await asyncio.sleep(0)

    async def publish(self, backend: Backend, task: Task) -> None:
        name = task.key, task.id
        self.story.tried.add(name)
        with contextlib.suppress(BackendUnavailable, PublishUnconfirmed):
            (told,) = await backend.publisher.publish(task)
            self.story.accepted[name] += told.status is Published.ACCEPTED
            if told.stored:
                self.story.stored.add(name)

    async def work(self, backend: Backend, name: str) -> None:
        """Consume tasks until the run ends: ack most of them, return some and retry some."""
        async with backend.subscribe(KEYS, name) as subscription:
            while not self.enough:
                received = await subscription.receive(self.random.randint(1, 5), 0.02)
                for delivery in received.deliveries:
                    fate = self.random.random()
                    if fate < 0.1:
                        await subscription.redeliver(delivery)
                    elif fate < 0.2 and delivery.attempt < 3:
                        await backend.publisher.schedule_retry(
                            delivery.task, backend.now(), settles=delivery
                        )
                    else:
                        told = await subscription.ack(delivery)
                        self.story.acked[delivery.task.key, delivery.task.id] += told[0].ok

    async def step(self, act: Callable[[MigratingBackend], Awaitable[object]]) -> None:
        """Run a command in a process that is killed at some settings change, then to its end in another process."""
        if self.command is not None:
            await self.command(act.__name__)
            return
        operator = self.process()
        cut = self.random.randint(1, 9)
        for side in operator.members:
            cut_after(side, cut, before=self.random.random() < 0.5)
        with contextlib.suppress(KilledError):
            await act(operator)
        await self.kill(operator)
        again = self.process()
        await act(again)
        await again.aclose()

    async def left(self, watcher: MigratingBackend) -> int:
        found = [await watcher.control.ledger(key) for key in KEYS]
        return sum(one.waiting + one.scheduled + one.in_flight for one in found)


async def migration(
    seed: int,
    old: StoreHome,
    new: StoreHome,
    *,
    mode: MigrationMode = MigrationMode.AVAILABLE,
    tasks: int = 40,
    command: Callable[[str], Awaitable[None]] | None = None,
) -> Story:
    """Run one migration, killing the operator in each command and a worker in each phase; return the result.

    ``command`` replaces the default way to run a command by its name and to kill the operator that runs it.
    """
    run = _Run(seed, old, new, mode, command)
    plain = run.homes[0].enter()  # a publisher that is not configured for the migration
    first, second = run.process(), run.process()
    workers = [run.process() for _ in range(3)]
    background = [
        asyncio.create_task(run.work(backend, f"w{number}"))
        for number, backend in enumerate(workers)
    ]
    back = run.random.random() < 0.4
    steps: list[Callable[[MigratingBackend], Awaitable[object]]] = [start]
    steps += [rollback, start] if back else []
    for round_, act in enumerate([None, *steps]):
        producing = [
            asyncio.create_task(run.produce(backend, f"r{round_}.", tasks))
            for backend in (first, second, *([plain] if act is None else []))
        ]
        if act is not None:
            await run.step(act)
        victim = run.random.randrange(len(workers))
        background[victim].cancel()
        await asyncio.gather(background[victim], return_exceptions=True)
        await run.kill(workers[victim])
        workers[victim] = run.process()
        background[victim] = asyncio.create_task(run.work(workers[victim], f"w{victim}"))
        await asyncio.gather(*producing)
        # Publish some tasks of all rounds again, from a process that has just started.
        for number in range(round_ + 1):
            fresh = run.process()
            for name in sorted(run.story.tried):
                if name[1].startswith(f"r{number}.") and run.random.random() < 0.3:
                    await run.publish(fresh, Task(key=name[0], id=name[1]))
            await fresh.aclose()
    watcher = run.process()
    await watcher.control.maintain()
    async with asyncio.timeout(30):
        while await run.left(watcher):  # noqa: ASYNC110 - the store has no event to wait for
            await asyncio.sleep(0.01)
    run.enough = True
    await asyncio.gather(*background)
    await run.step(finish)
    assert not (await status(watcher)).unfinished
    run.story.old, run.story.new = [
        {key: await side.control.ledger(key) for key in KEYS} for side in watcher.members
    ]
    for side in watcher.members:
        for key, task_id in sorted(run.story.tried):
            (told,) = await side.control.statuses(key, task_id)
            run.story.done[key, task_id] += told is not None and told.state is State.DONE
    for backend in (plain, first, second, watcher, *workers):
        await backend.aclose()
    return run.story
