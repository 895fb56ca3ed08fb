"""Unique tasks and debounces as an application declares and publishes them (U12)."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from taskqueue_core import (
    Debounce,
    InvalidInput,
    Middleware,
    NotUnique,
    Queue,
    Tasks,
    Unique,
    UniqueKey,
)
from taskqueue_core.backend import Capabilities, Capability
from taskqueue_core.clock import ManualClock
from taskqueue_core.errors import CapabilityMissing, ConfigurationError
from taskqueue_core.tasks import Published, State
from taskqueue_memory import MemoryBackend
from taskqueue_worker.testing import TestQueue

ACCEPTED, DUPLICATE, REPLACED = Published.ACCEPTED, Published.DUPLICATE, Published.REPLACED


class Quiet(Middleware):
    """Middleware that passes everything on."""


def declared(**options: Any) -> tuple[Tasks, Any, list[tuple[int, str]]]:
    """Declare a unique task; return its registry, the task, and the list of the arguments that it ran with."""
    tasks, ran = Tasks(), list[tuple[int, str]]()

    @tasks.task(unique=Unique(**options))
    async def rebuild(user: int, reason: str = "asked for") -> None:
        ran.append((user, reason))

    return tasks, rebuild, ran


async def test_by_some_arguments() -> None:
    """U12: calls with equal chosen arguments are one task, whose handle each publisher gets."""
    tasks, rebuild, ran = declared(by=("user",))
    async with TestQueue(tasks) as queue:
        first = await rebuild.publish(7, reason="edited")
        again = await rebuild.publish(user=7, reason="deleted")
        other = await rebuild.publish(8)
        assert first.confirmation.status is ACCEPTED
        assert (again.confirmation.status, again.confirmation.existing_id) == (DUPLICATE, first.id)
        assert again.id == first.id
        assert other.id != first.id
        await queue.drain()
        assert ran == [(7, "edited"), (8, "asked for")]
        assert (await again.status()).state is State.DONE
        later = await rebuild.publish(7)
        assert later.confirmation.status is ACCEPTED


async def test_by_all_arguments() -> None:
    """U12: by default all arguments count, and one that is not given counts as its default."""
    tasks, rebuild, _ = declared()
    async with TestQueue(tasks):
        first = await rebuild.publish(7)
        assert (await rebuild.publish(7, "asked for")).id == first.id
        assert (await rebuild.publish(7, "edited")).id != first.id


async def test_by_no_argument() -> None:
    """U12: by no argument, one task of the name is live at a time."""
    tasks, rebuild, _ = declared(by=())
    async with TestQueue(tasks):
        first = await rebuild.publish(7)
        assert (await rebuild.publish(8)).id == first.id


async def test_per_tenant() -> None:
    """U12: tasks of different tenants are different work, unless the declaration says otherwise."""
    tasks, rebuild, _ = declared(by=("user",))
    async with TestQueue(tasks):
        first = await rebuild.using(tenant="a").publish(7)
        assert (await rebuild.using(tenant="b").publish(7)).id != first.id
        assert (await rebuild.using(tenant="a").publish(7)).id == first.id
    tasks, rebuild, _ = declared(by=("user",), per_tenant=False)
    async with TestQueue(tasks):
        first = await rebuild.using(tenant="a").publish(7)
        assert (await rebuild.using(tenant="b").publish(7)).id == first.id


async def test_refuse() -> None:
    """U12: with ``refuse``, a publish raises an error that names the holder; a handle of a batch does, too."""
    tasks, rebuild, _ = declared(by=("user",), on_conflict="refuse")
    async with TestQueue(tasks):
        first = await rebuild.publish(7)
        with pytest.raises(NotUnique, match=first.id) as error:
            await rebuild.using(id="second").publish(7)
        assert (error.value.existing_id, error.value.task_id) == (first.id, "second")
        assert error.value.code == "not_unique"
        one, two = await tasks.publish_many([rebuild.call(8), rebuild.call(8)])
        assert one.confirmation is not None
        assert one.confirmation.status is ACCEPTED
        with pytest.raises(NotUnique):
            await two.result()


async def test_publish_many() -> None:
    """U12: equal calls of one batch are one task; each has its handle."""
    tasks, rebuild, ran = declared(by=("user",))
    async with TestQueue(tasks) as queue:
        handles = await tasks.publish_many(rebuild.call(n % 3) for n in range(12))
        assert len({handle.id for handle in handles}) == 3
        await queue.drain()
        assert sorted(ran) == [(n, "asked for") for n in range(3)]


async def test_switched_off() -> None:
    """U12: ``using(unique=None)`` switches it off for a call, and ``using(unique=...)`` replaces it."""
    tasks, rebuild, _ = declared(by=("user",))
    async with TestQueue(tasks):
        first = await rebuild.publish(7)
        assert (await rebuild.using(unique=None).publish(7)).confirmation.status is ACCEPTED
        assert (await rebuild.using(unique=Unique()).publish(7)).confirmation.status is ACCEPTED
        same = UniqueKey(key="mine")
        mine = await rebuild.using(unique=same).publish(7)
        assert (await rebuild.using(unique=same).publish(8)).id == mine.id
        assert (await rebuild.publish(7)).id == first.id


async def test_period() -> None:
    """U12: with a period, a task runs once in it, however often it is published."""
    tasks, rebuild, ran = declared(by=("user",), period=60)
    async with TestQueue(tasks) as queue:
        for _ in range(3):
            await rebuild.publish(7)
            await queue.drain()
            await queue.advance(15)
        await queue.advance(16)
        await rebuild.publish(7)
        await queue.drain()
        assert len(ran) == 2


async def test_debounce() -> None:
    """U12: a debounced task runs once, after the last call and with its arguments, at ``max_wait`` at the latest."""
    tasks, rebuild, ran = declared(by=("user",))
    async with TestQueue(tasks) as queue:
        wait = Debounce(seconds=30, max_wait=70)
        handles = []
        for number in range(4):
            await queue.advance(20 if number else 0)
            handles.append(
                await rebuild.using(debounce=wait).publish(user=7, reason=f"edit {number}")
            )
        await queue.advance(9)
        assert ran == []
        assert {handle.id for handle in handles} == {handles[0].id}
        assert [handle.confirmation.status for handle in handles] == [ACCEPTED, *[REPLACED] * 3]
        await queue.advance(1)
        await queue.drain()
        assert ran == [(7, "edit 3")]


async def test_through_middleware() -> None:
    """U12: a publish through middleware has the handle of the holder as well."""
    tasks = Tasks(middleware=[Quiet()])

    @tasks.task(unique=Unique())
    async def rebuild(user: int) -> None: ...

    async with TestQueue(tasks):
        first = await rebuild.publish(7)
        assert (await rebuild.publish(7)).id == first.id


async def test_queue_publish() -> None:
    """U12: `Queue.publish` takes a `Unique`, which names members of the payload, or the key itself, and a debounce."""
    clock = ManualClock()
    queue = Queue(MemoryBackend(clock=clock))
    by = Unique(by=("user",))
    first = await queue.publish("mail", {"user": 7, "n": 1}, unique=by)
    again = await queue.publish("mail", {"user": 7, "n": 2}, unique=by)
    assert (again.status, again.existing_id) == (DUPLICATE, first.task_id)
    assert (await queue.publish("mail", {"user": 8}, unique=by)).status is ACCEPTED
    key = UniqueKey(key="k", on_conflict="refuse")
    await queue.publish("mail", unique=key)
    with pytest.raises(NotUnique):
        await queue.publish("mail", unique=key)
    later = await queue.publish("mail", {"user": 9}, unique=by, debounce=Debounce(5))
    status = await queue.status("mail", later.task_id)
    assert status is not None
    assert (status.state, status.due_at) == (State.SCHEDULED, clock.now() + 5)


def test_blocking_publish() -> None:
    """U12: `SyncQueue.publish` and `publish_sync` have the same options."""
    tasks, rebuild, _ = declared(by=("user",))
    with tasks.connect_sync("taskqueue_memory") as queue:
        one = queue.publish("mail", {"user": 7}, unique=Unique())
        assert queue.publish("mail", {"user": 7}, unique=Unique()).existing_id == one.task_id
        assert rebuild.publish_sync(7).id == rebuild.publish_sync(7).id


def test_the_key_is_stable() -> None:
    """U12: the key follows from the name, the chosen arguments and the tenant alone, as documented."""
    one = Unique(by=("b", "a")).key(
        "shop.rebuild", {"a": 1, "b": {"y": [1.5], "x": "é"}, "c": 3}, "t"
    )
    text = '["shop.rebuild",{"a":1,"b":{"x":"\\u00e9","y":[1.5]}},"t"]'
    assert one.key == hashlib.sha256(text.encode()).hexdigest()[:32]
    assert (
        one.key
        == Unique(by=("a", "b")).key("shop.rebuild", {"b": {"x": "é", "y": [1.5]}, "a": 1}, "t").key
    )
    assert (
        one.key
        != Unique(by=("a", "b")).key("shop.rebuild", {"a": 2, "b": {"x": "é", "y": [1.5]}}, "t").key
    )


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"debounce": Debounce(5)}, "debounce"),
        ({"unique": Unique(on_conflict="refuse"), "debounce": Debounce(5)}, "debounce"),
        ({"unique": Unique(), "debounce": Debounce(5), "delay": 3}, "debounce"),
        ({"unique": Unique(), "debounce": Debounce(5), "ordering_key": "e"}, "debounce"),
        ({"unique": Unique(), "debounce": 5}, "debounce"),
        ({"unique": "user"}, "unique"),
        ({"unique": Unique(by=("nobody",))}, "unique.by"),
    ],
)
async def test_wrong_options(options: dict[str, Any], field: str) -> None:
    """U12: a wrong option is refused before anything is stored, with the name of the field."""
    _, rebuild, _ = declared(by=("user",))
    rebuild.options = type(rebuild.options)()
    queue = Queue(MemoryBackend())
    with pytest.raises(InvalidInput) as error:
        await rebuild.using(on=queue, **options).publish(7)
    assert error.value.field == field
    assert (await queue.ledger("rebuild")).published == 0


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Unique(by="user"), "unique.by"),  # type: ignore[arg-type]
        (lambda: Unique(by=(1,)), "unique.by"),  # type: ignore[arg-type]
        (lambda: Unique(until="done"), "unique.until"),  # type: ignore[arg-type]
        (lambda: Unique(on_conflict="drop"), "unique.on_conflict"),  # type: ignore[arg-type]
        (lambda: Unique(period=0), "unique.period"),
        (lambda: Unique(period=float("nan")), "unique.period"),
        (lambda: UniqueKey(key=""), "unique.key"),
        (lambda: UniqueKey(key="x" * 201), "unique.key"),
        (lambda: UniqueKey(key="k", debounce=Debounce(1)), "debounce"),
        (lambda: Debounce(0), "debounce.seconds"),
        (lambda: Debounce(5, max_wait=4), "debounce.max_wait"),
    ],
)
def test_wrong_values(make: Any, field: str) -> None:
    """U12: a wrong value is refused where it is written, with the name of the field."""
    with pytest.raises(InvalidInput) as error:
        make()
    assert error.value.field == field


def test_no_argument_of_that_name() -> None:
    """U12: a name that is no argument is an error at import, which names the nearest one."""
    tasks = Tasks()
    with pytest.raises(ConfigurationError, match=r"^unique\.by of .*: got 'usr'.*user"):

        @tasks.task(unique=Unique(by=("usr",)))
        async def rebuild(user: int) -> None: ...

    with pytest.raises(ConfigurationError, match="expected a Unique"):
        tasks.task(unique=("user",))  # type: ignore[call-overload]


async def test_a_backend_without_it() -> None:
    """U12: a backend without the capability refuses a unique task by name, before anything is stored."""

    class Lesser(MemoryBackend):
        capabilities = Capabilities(
            names=frozenset(Capability) - {Capability.UNIQUE, Capability.AFTER}
        )

    queue = Queue(Lesser())
    with pytest.raises(CapabilityMissing, match="unique"):
        await queue.publish("mail", unique=UniqueKey(key="k"))
    assert (await queue.ledger("mail")).published == 0
