"""The carrier of lines: failures between any two of its steps, and partitions that do not answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from taskqueue_conformance.partitions import JointDependencies, after
from taskqueue_core.after import TaskRef
from taskqueue_core.backend import Subscription
from taskqueue_core.capabilities import dependencies_of
from taskqueue_core.consumer import outage
from taskqueue_core.consumer.carrier import carry, register, run_carrier
from taskqueue_core.errors import BackendUnavailable
from taskqueue_core.retry import RetryPolicy
from taskqueue_core.tasks import Delivery, Ledger, Task
from taskqueue_memory import MemoryBackend
from tests.worker.local import until

CHILDREN, PARENTS, OTHERS = "children", "parents", "others"
PLACES = {CHILDREN: 0, PARENTS: 1, OTHERS: 2}
STEPS = ("lines", "register", "release", "confirm")


class Killed(Exception):
    """A carrier that is killed at this point."""


class Failing(JointDependencies):
    """The lines of three backends, where some calls fail."""

    def __init__(self, *backends: MemoryBackend) -> None:
        super().__init__([dependencies_of(backend) for backend in backends], PLACES.__getitem__)
        self.calls: list[str] = []
        self.kill: tuple[str, bool] | None = None
        """the step before or after (True) which the carrier is killed"""
        self.down: set[str] = set()
        """queues whose backends do not answer"""

    async def _by_place(self, items: Any, key: Any, call: Any) -> Any:
        if self.down & {key(item) for item in items}:
            raise BackendUnavailable("down")
        return await super()._by_place(items, key, call)

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in STEPS:
            return found

        async def call(*args: Any) -> Any:
            self.calls.append(name)
            if self.kill == (name, False):
                raise Killed
            answer = await found(*args)
            if self.kill == (name, True):
                raise Killed
            return answer

        return call


class Store:
    """Three backends with a carrier."""

    def __init__(self) -> None:
        self.backends = [MemoryBackend() for _ in PLACES]
        self.failing = Failing(*self.backends)

    def of(self, key: str) -> MemoryBackend:
        """Return the backend of a queue."""
        return self.backends[PLACES[key]]

    async def publish(self, key: str, task_id: str, **fields: Any) -> None:
        """Publish a task."""
        await self.of(key).publisher.publish(Task(key=key, id=task_id, **fields))

    async def take(self, key: str) -> tuple[Subscription, tuple[Delivery, ...]]:
        """Receive all tasks of a queue."""
        subscription = self.of(key).subscribe([key], "w")
        return subscription, (await subscription.receive(99, 0)).deliveries

    async def end(self, key: str) -> list[str]:
        """Run all tasks of a queue, and return their ids."""
        subscription, deliveries = await self.take(key)
        await subscription.ack(*deliveries)
        await subscription.close()
        return [each.task.id for each in deliveries]


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    """Yield three empty backends, and close them."""
    made = Store()
    yield made
    for backend in made.backends:
        await backend.aclose()


@pytest.mark.parametrize("after_step", [False, True])
@pytest.mark.parametrize(
    ("at", "step"),
    [("registration", step) for step in STEPS if step != "release"]
    + [("end", step) for step in STEPS if step != "register"],
)
async def test_a_carrier_that_is_killed(
    store: Store, step: str, at: str, *, after_step: bool
) -> None:
    """U16: whenever a carrier is killed, the next one finishes its work; the child is released exactly once."""
    await store.publish(PARENTS, "p")
    await store.publish(CHILDREN, "c", after=after("p", key=PARENTS))
    if at == "end":
        await carry(store.failing)
        await store.end(PARENTS)
    store.failing.kill = (step, after_step)
    try:
        await carry(store.failing)
    except Killed:
        store.failing.calls.append("killed")
    assert store.failing.calls[-1] == "killed"
    store.failing.kill = None
    if at == "registration":
        await store.end(PARENTS)
    await carry(store.failing)
    await carry(store.failing)
    assert await store.of(CHILDREN).control.ledger(CHILDREN) == Ledger(published=1, waiting=1)
    assert await store.end(CHILDREN) == ["c"]
    assert [await each.dependencies.lines(9) for each in store.backends] == [(), (), ()]


async def test_a_partition_that_does_not_answer(store: Store) -> None:
    """U16: lines to a partition that is down stay, and hold up no others."""
    parents = (TaskRef(PARENTS, "p"), TaskRef(OTHERS, "o"))
    await store.publish(PARENTS, "p")
    await store.publish(OTHERS, "o")
    for ref in parents:
        await store.publish(CHILDREN, f"of-{ref.task_id}", after=after(ref.task_id, key=ref.key))
    await store.end(PARENTS)
    await store.end(OTHERS)
    store.failing.down = {OTHERS}
    assert await carry(store.failing) == (1, 1)
    assert await store.end(CHILDREN) == ["of-p"]
    store.failing.down = {CHILDREN}
    assert await carry(store.failing) == (0, 1)
    store.failing.down = set()
    assert await carry(store.failing) == (1, 0)
    assert await store.end(CHILDREN) == ["of-o"]


async def test_the_loop(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """U16: the carrier continues after failures, and logs the first of several in a row."""
    running = asyncio.create_task(run_carrier(store.failing))
    store.failing.kill = ("register", False)
    await store.publish(PARENTS, "p")
    await store.publish(CHILDREN, "c", after=after("p", key=PARENTS))
    await until(lambda: store.failing.calls.count("register") >= 3)
    store.failing.kill = None
    await store.end(PARENTS)
    subscription = store.of(CHILDREN).subscribe([CHILDREN], "w")
    assert len((await subscription.receive(9, 60)).deliveries) == 1
    running.cancel()
    texts = [record.message for record in caplog.records if record.name == "taskqueue.dependencies"]
    assert len(texts) == 1
    assert "were not carried" in texts[0]


async def test_a_partition_that_is_down_is_logged_once(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """U16: while one of several partitions does not answer, the log says so once, until it has answered again."""
    store.failing.down = {OTHERS}
    for ref in (TaskRef(PARENTS, "p"), TaskRef(OTHERS, "o")):
        await store.publish(CHILDREN, f"of-{ref.task_id}", after=after(ref.task_id, key=ref.key))
    running = asyncio.create_task(run_carrier(store.failing))
    await until(lambda: store.failing.calls.count("register") >= 6)
    running.cancel()
    texts = [record.message for record in caplog.records if record.name == "taskqueue.dependencies"]
    assert len(texts) == 1


async def test_the_answer_of_a_partition_that_is_down_is_awaited_without_haste(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """U16: while a partition does not answer, the wait for its answer asks again only after a pause."""
    monkeypatch.setattr(outage, "OUTAGE_BACKOFF", RetryPolicy(base=3600, cap=3600))
    store.failing.down = {OTHERS}
    task = Task(key=CHILDREN, id="c", after=after("o", key=OTHERS))
    await store.of(CHILDREN).publisher.publish(task)
    waiting = asyncio.create_task(register(store.failing, [task]))
    await until(lambda: store.failing.calls.count("register") > 0)
    for _ in range(100):
        await asyncio.sleep(0)
    assert store.failing.calls.count("register") == 1
    assert not waiting.done()
    waiting.cancel()
