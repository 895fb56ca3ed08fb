"""Schedules that registries declare, and their way into the store."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from datetime import UTC, date, datetime
from typing import Any

import pytest
from msgspec.structs import replace

from taskqueue_core import (
    Cron,
    Every,
    Instant,
    Queue,
    Schedule,
    Tasks,
    TaskTemplate,
    Unique,
)
from taskqueue_core.application.errors import InvalidArguments
from taskqueue_core.backend import Capability
from taskqueue_core.errors import CapabilityMissing, ConfigurationError, InvalidInput
from taskqueue_core.schedules import scheduled_task
from taskqueue_core.tasks import Published
from taskqueue_memory import MemoryBackend

MINUTE = Every(60)
NOTHING: Any = None
SIXTY: Any = 60
NIGHTLY = Cron("0 3 * * *", timezone="Europe/Berlin")
STARTED = Unique(until="started")
BY_AT = Unique(by=("at",))


@pytest.fixture
async def queue() -> AsyncIterator[Queue]:
    """A queue in memory."""
    backend = MemoryBackend()
    yield Queue(backend)
    await backend.aclose()


def digest(to: str = "all", at: datetime | None = None) -> None:
    """A task."""


def work() -> None:
    """A task without arguments."""


def greet(to: str) -> None:
    """A task that needs an argument."""


def call(**options: Any) -> Any:
    """Return a call with options."""
    return Tasks().task("digest")(digest).using(**options).call()


def dated(**options: Any) -> Any:
    """Return a call with options that takes the instant."""
    return Tasks().task("digest")(digest).using(**options).call(at=Instant)


def shop(prefix: str = "shop.", **schedules: Any) -> Tasks:
    """Return a registry with a task, and with schedules of it."""
    tasks = Tasks(prefix=prefix)
    function = tasks.task("digest")(digest)
    for name, when in schedules.items():
        tasks.schedule(name, function.call(name), when)
    return tasks


async def apply(tasks: Tasks, queue: Queue, **options: bool) -> dict[str, str]:
    """Apply the declarations of a registry, and return what was done with its schedules."""
    async with tasks.connect(queue):
        applied = await tasks.apply(**options)
    return {each.name: each.change.value for each in applied.schedules}


async def test_a_task_declares_its_schedule(queue: Queue) -> None:
    """U13: the schedule has the name of the task, and publishes it without arguments."""
    tasks = Tasks(prefix="shop.")

    @tasks.task("sweep", schedule=NIGHTLY)
    async def sweep(rooms: int = 3) -> int:
        return rooms

    assert await sweep(2) == 2
    assert await apply(tasks, queue) == {"shop.sweep": "created"}
    status = await queue.schedules.get("shop.sweep")
    assert status is not None
    assert (status.key, status.declared_by) == ("shop.sweep", "shop.")
    assert status.schedule is not None
    assert status.schedule.when == NIGHTLY
    assert scheduled_task(status.schedule, 60.0).value() == {}


async def test_a_call_is_scheduled_with_its_arguments_and_options(queue: Queue) -> None:
    """U13: arguments, `Instant` among them, and the options of `using`; its headers name the task and the schema."""
    tasks = Tasks(prefix="shop.")
    function = tasks.task("digest", queue="mail", tags=("digest",))(digest)
    using = function.using(
        priority=7, tenant="acme", headers={"a": "b"}, expires_in=60, tags=("user:1",)
    )
    call = using.call("ada", at=Instant)
    declared = tasks.schedule("ada", call, Every(60), jitter=3, overlap="allow")
    assert await apply(tasks, queue) == {"shop.ada": "created"}
    status = await queue.schedules.get("shop.ada")
    assert status is not None
    assert status.schedule == declared
    task = scheduled_task(declared, 60.0)
    assert (task.key, task.priority, task.tenant) == ("mail", 7, "acme")
    assert task.tags == ("digest", "user:1")
    assert task.value() == {"to": "ada", "at": "1970-01-01T00:01:00Z"}
    assert task.headers.items() >= {("a", "b"), ("taskqueue-task", "shop.digest")}
    assert "taskqueue-schema" in task.headers
    assert task.deadline is not None


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(datetime, "1970-01-01T00:01:00Z"), (float, 60), (int, 60), (str, "1970-01-01T00:01:00Z")],
)
def test_an_instant_has_the_form_of_its_parameter(kind: Any, expected: object) -> None:
    """U13: `Instant` is a datetime, a number or text, by the annotation; another type is refused at import."""
    tasks = Tasks()

    def at(moment: Any) -> None:
        """Take the instant."""

    at.__annotations__["moment"] = kind
    schedule = tasks.schedule("s", tasks.task("at")(at).call(Instant), Every(60))
    assert scheduled_task(schedule, 60.0).value() == {"moment": expected}


def test_an_instant_that_nothing_can_take_is_refused() -> None:
    """U13: a parameter of another type, a batch, and a publish without a schedule."""
    tasks = Tasks()

    def on(day: date) -> None:
        """Take a date, which depends on a time zone."""

    with pytest.raises(InvalidArguments, match="day cannot be an instant"):
        tasks.task("on")(on).call(Instant)

    def many(items: list[int]) -> None:
        """Handle a batch."""

    with pytest.raises(InvalidArguments, match="batch"):
        tasks.task("many", batch=5)(many).call(Instant)


async def test_a_unique_task_is_published_with_its_key(queue: Queue) -> None:
    """U12, U13: so a task that was published by hand counts; `using(unique=None)` leaves it to ``overlap``."""
    tasks = Tasks()
    function = tasks.task("digest", unique=Unique(by=("to",)))(digest)
    schedule = tasks.schedule("ada", function.call("ada", at=Instant), Every(60))
    without = function.using(unique=None).call("ada", at=Instant)
    tasks.schedule("free", without, Every(60))
    await apply(tasks, queue)
    async with tasks.connect(queue):
        by_hand = await function.publish("ada", datetime.now(UTC))
    kept = await queue.schedules.trigger("ada")
    assert (kept.status, kept.existing_id) == (Published.DUPLICATE, by_hand.id)
    assert (await queue.schedules.trigger("free")).status is Published.ACCEPTED
    stored = await queue.schedules.get("ada")
    assert stored is not None
    assert stored.schedule == schedule


async def test_a_call_with_an_instant_is_only_for_schedules(queue: Queue) -> None:
    """U13: publishing it says so."""
    tasks = Tasks()
    function = tasks.task("digest")(digest)
    async with tasks.connect(queue):
        with pytest.raises(InvalidInput, match="at: got Instant"):
            await tasks.publish_many([function.call(at=Instant)])
        with pytest.raises(InvalidArguments, match="at"):
            await function.publish(at=Instant)


async def test_apply_writes_what_has_changed_and_prunes_its_own(queue: Queue) -> None:
    """U13: created, changed, declared no more; only what this registry declared is deleted."""
    assert await apply(shop(a=Every(60), b=Every(60)), queue, dry_run=True) == {
        "shop.a": "created",
        "shop.b": "created",
    }
    assert await queue.schedules.list() == ()
    await apply(shop(a=Every(60), b=Every(60)), queue)
    assert await apply(shop(a=Every(60), b=Every(60)), queue) == {}
    await apply(shop("other.", a=Every(60)), queue)
    await apply(shop("", a=Every(60)), queue)
    mail = TaskTemplate.of("shop.digest")
    await queue.schedules.put(Schedule("shop.c", Every(60), mail))
    later = shop(a=Every(61), c=Every(60))
    expected = {"shop.a": "changed", "shop.c": "kept", "shop.b": "undeclared"}
    assert await apply(later, queue) == expected
    pruned = {"shop.c": "kept", "shop.b": "deleted"}
    assert await apply(later, queue, prune=True, dry_run=True) == pruned
    assert len(await queue.schedules.list()) == 5
    assert await apply(later, queue, prune=True) == pruned
    assert [each.name for each in await queue.schedules.list()] == [
        "a",
        "other.a",
        "shop.a",
        "shop.c",
    ]
    assert await apply(shop(), queue, prune=True) == {"shop.a": "deleted"}


async def test_a_registry_without_a_prefix_prunes_only_schedules_of_its_queues(
    queue: Queue,
) -> None:
    """U13: another registry without a prefix may use the same store."""
    await apply(shop("", a=Every(60)), queue)
    other = Tasks()
    function = other.task("work")(work)
    other.schedule("b", function.call(), Every(60))
    assert await apply(other, queue, prune=True) == {"b": "created"}
    assert [each.name for each in await queue.schedules.list()] == ["a", "b"]
    assert await apply(shop(""), queue, prune=True) == {"a": "deleted"}


async def test_a_pause_survives_an_apply(queue: Queue) -> None:
    """U13: what an operator has paused or resumed stays so, also if the declaration changes."""
    await apply(shop(a=Every(60)), queue)
    await queue.schedules.pause("shop.a")
    assert await apply(shop(a=Every(60)), queue) == {}
    assert await apply(shop(a=Every(120)), queue) == {"shop.a": "changed"}
    status = await queue.schedules.get("shop.a")
    assert status is not None
    assert (status.paused, status.next_at) == (True, None)


async def test_a_schedule_moves_with_the_queue_of_its_task(queue: Queue) -> None:
    """U13: a declared schedule whose task has another queue now is stored there."""
    await apply(shop(a=Every(60)), queue)
    tasks = Tasks(prefix="shop.")
    function = tasks.task("digest", queue="mail")(digest)
    tasks.schedule("a", function.call("a"), Every(60))
    assert await apply(tasks, queue) == {"shop.a": "changed"}
    assert [(each.name, each.key) for each in await queue.schedules.list()] == [("shop.a", "mail")]


async def test_included_registries_declare_through_the_one_that_is_applied(queue: Queue) -> None:
    """U13: schedules of included registries are applied and pruned with it, also those declared later."""
    mail, tasks = Tasks(prefix="mail."), Tasks(prefix="shop.")
    first = mail.task("digest")(digest)
    mail.schedule("a", first.call(), Every(60))
    tasks.include(mail)
    mail.schedule("b", first.call(), Every(60))
    assert await apply(tasks, queue) == {"mail.a": "created", "mail.b": "created"}
    later = Tasks(prefix="shop.")
    later.include(Tasks(prefix="mail."))
    assert await apply(later, queue, prune=True) == {"mail.a": "deleted", "mail.b": "deleted"}


@pytest.mark.parametrize(
    ("declare", "fault"),
    [
        (lambda: shop().schedule("a b", call(), MINUTE), "schedule 'shop.a b': name"),
        (lambda: shop().schedule("a", NOTHING, MINUTE), "schedule 'shop.a': call: got NoneType"),
        (lambda: shop().schedule(NOTHING, call(), MINUTE), "name: got a NoneType"),
        (lambda: shop(a=60), "schedule 'shop.a': when: got int"),
        (lambda: shop(a=MINUTE).schedule("a", call(), Every(9)), "taken by another schedule"),
        (lambda: shop().schedule("a", call(delay=5), MINUTE), "'shop.a': delay: got an option"),
        (lambda: shop().schedule("a", call(id="x"), MINUTE), "'shop.a': id: got an option"),
        (lambda: shop().schedule("a", call(), MINUTE, late=0), "schedule 'shop.a': late"),
        (lambda: shop().schedule("a", call(debounce=5), MINUTE), "debounce: got an option"),
        (lambda: shop().schedule("a", call(unique=STARTED), MINUTE), "overlap: got 'skip' with a"),
        (lambda: shop().schedule("a", dated(unique=Unique()), MINUTE), "unique: .*on Instant"),
        (lambda: shop().schedule("a", dated(unique=BY_AT), MINUTE), "unique: .*on Instant"),
        (lambda: Tasks().task("digest", schedule=SIXTY)(digest), "schedule 'digest': when"),
        (lambda: Tasks().task("x", schedule=MINUTE)(greet), "'x'.*to is missing.*tasks.schedule"),
    ],
)  # fmt: skip
def test_a_wrong_declaration_is_named_at_import(declare: Callable[[], Any], fault: str) -> None:
    """U13: the field and the schedule are named where it is written."""
    with pytest.raises(ConfigurationError, match=fault):
        declare()


class Without(MemoryBackend):
    """A backend that keeps no schedules."""

    capabilities = replace(
        MemoryBackend.capabilities,
        names=MemoryBackend.capabilities.names - {Capability.SCHEDULES},
    )


async def test_a_store_that_cannot_keep_schedules_is_not_changed() -> None:
    """U13: the capability is named before anything is written."""
    queue = Queue(Without())
    with pytest.raises(CapabilityMissing, match="schedules"):
        await apply(shop(a=Every(60)), queue)
    assert await apply(shop(), queue, prune=True) == {}
