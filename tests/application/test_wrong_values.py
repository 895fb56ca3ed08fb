"""Each option of unique tasks, schedules, workflows and batches with values of wrong types and sizes, in Python."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime
from inspect import signature
from typing import Any

import pytest

from taskqueue_core import (
    Batch,
    Debounce,
    Every,
    InvalidInput,
    Queue,
    Schedule,
    TaskRef,
    Tasks,
    TaskTemplate,
    Unique,
    Workflow,
    WorkflowStep,
)
from taskqueue_core.after import After
from taskqueue_core.errors import ConfigurationError
from taskqueue_core.schedules import Cron
from taskqueue_core.tasks import Task
from taskqueue_core.uniqueness import UniqueKey
from taskqueue_memory import MemoryBackend

NEVER = object()
"""a value that no option accepts"""
WRONG = (
    *(NEVER, None, True, -1, float("nan"), 10**400, "x" * 5000, "two words", "\ud800", b"x"),
    *((1,), ("x", "x"), {"a": 1}, (TaskRef("k", "p"), TaskRef("k", "p"))),
    datetime(2026, 1, 1),  # noqa: DTZ001 - wrong, too
)
Run = Callable[..., Awaitable[Any]]
tasks = Tasks()


@tasks.task
async def _work(number: int) -> int:
    return number


def _of_type(make: Callable[..., Any], **good: Any) -> tuple[Run, tuple[str, ...]]:
    """Return what publishes a task, or puts a schedule, that ``make`` returns, and the names of its fields."""

    async def run(queue: Queue, **wrong: Any) -> None:
        made = make(**{**good, **wrong})
        if isinstance(made, Unique | UniqueKey):
            await queue.publish("k", {"x": 1}, unique=made)
        elif isinstance(made, After):
            await queue.publish("k", after=made)
        elif isinstance(made, Debounce):
            await queue.publish("k", {}, unique=UniqueKey(key="w"), debounce=made)
        elif isinstance(made, WorkflowStep):
            parents = [WorkflowStep(name=name, key="k") for name in ("p", "q")]
            await queue.workflows.put([*parents, made], id="w")
        elif isinstance(made, Task):
            await queue.publish_many([made])
        else:
            timed = isinstance(made, Cron | Every)
            template = made if isinstance(made, TaskTemplate) else TaskTemplate(key="k")
            when = made if timed else Every(5)
            schedule = made if isinstance(made, Schedule) else Schedule("n", when, template)
            await queue.schedules.put(schedule)

    return run, tuple(signature(make).parameters)


async def _publish(queue: Queue, **options: Any) -> None:
    await _work.using(on=queue, **options).publish(1)


async def _add_step(queue: Queue, **options: Any) -> None:
    flow = Workflow()
    flow.add(**{"call": _work.using(on=queue).call(1), "name": "s", **options})
    await flow.publish(id="w")


async def _use_step(queue: Queue, **options: Any) -> None:
    flow = Workflow()
    flow.add(_work.using(on=queue, **options).call(1), name="s")
    await flow.publish(id="w")


async def _put_workflow(queue: Queue, **options: Any) -> None:
    await queue.workflows.put(**{"steps": [WorkflowStep(name="s", key="k")], **options})


async def _add_to_workflow(queue: Queue, **options: Any) -> None:
    steps, by = [WorkflowStep(name="s", key="k")], TaskRef("k", "w.s")
    await queue.workflows.add(**{"steps": steps, "by": by, **options})


async def _fill_batch(queue: Queue, **options: Any) -> None:
    await Batch(then=_work.using(on=queue).call(1), **options).add(_work.using(on=queue).call(1))


async def _call_back(queue: Queue, **options: Any) -> None:
    await Batch(then=_work.using(on=queue, **options).call(1)).close()


async def _add_member(queue: Queue, **options: Any) -> None:
    await Batch(then=_work.using(on=queue).call(1)).add(_work.using(on=queue, **options).call(1))


async def _read_members(queue: Queue, **options: Any) -> None:
    await anext(Batch(then=_work.using(on=queue).call(1)).results(**options))


async def _declare(queue: Queue, **options: Any) -> None:
    declared = Tasks()

    @declared.task("t", **options)
    async def other() -> None: ...

    async with declared.connect(queue):
        await declared.apply()


async def _put_schedule(queue: Queue, **options: Any) -> None:
    good = Schedule("n", Every(5), TaskTemplate(key="k"))
    await queue.schedules.put(**{"schedule": good, **options})


async def _delete_schedule(queue: Queue, **options: Any) -> None:
    await queue.schedules.delete(**{"name": "n", **options})


async def _list_workflows(queue: Queue, **options: Any) -> None:
    await queue.workflows.list(**options)


OPTIONS = (
    *("priority", "delay", "not_before", "expires_in", "deadline", "tenant", "ordering_key"),
    *("headers", "max_attempts", "tags", "unique", "debounce", "after"),
)
TABLE: dict[str, tuple[Run, tuple[str, ...]]] = {
    "UniqueKey": _of_type(UniqueKey, key="w"),
    "Unique": _of_type(Unique),
    "Debounce": _of_type(Debounce, seconds=5),
    "After": _of_type(After, tasks=(TaskRef("k", "p"),)),
    "TaskRef": (_of_type(Task, key="k")[0], ("batch",)),
    "WorkflowStep": _of_type(WorkflowStep, name="s", key="k"),
    "a step with parents": _of_type(WorkflowStep, name="s", key="k", after=("p", "q")),
    "Cron": _of_type(Cron, expression="* * * * *"),
    "Every": _of_type(Every, seconds=5),
    "Schedule": _of_type(Schedule, name="n", when=Every(5), call=TaskTemplate(key="k")),
    "TaskTemplate": _of_type(TaskTemplate, key="k"),
    "using": (_publish, (*OPTIONS, "id")),
    "Workflow.add": (_add_step, ("call", "after", "when", "on_dead", "name")),
    "a step's call": (_use_step, ("headers", "unique", "after", "debounce", "id")),
    "workflows.put": (_put_workflow, ("steps", "id")),
    "workflows.add": (_add_to_workflow, ("steps", "by")),
    "workflows.list": (_list_workflows, ("after", "limit")),
    "Batch": (_fill_batch, ("id", "failed", "ended")),
    "a member": (_add_member, (*OPTIONS, "id")),
    "a callback": (_call_back, ("headers", "priority", "tags")),
    "Batch.results": (_read_members, ("of",)),
    "task": (_declare, ("unique", "schedule")),
    "schedules.put": (_put_schedule, ("schedule", "version", "declared_by")),
    "schedules.delete": (_delete_schedule, ("name", "version")),
}


async def _stored(queue: Queue) -> object:
    """Return whatever a queue has stored."""
    backend = queue.backend
    assert isinstance(backend, MemoryBackend)
    counts = [await backend.control.ledger(key) for key in await backend.control.queues()]
    return [each.published for each in counts if each.published], await queue.schedules.list()


@pytest.mark.parametrize("what", TABLE)
async def test_wrong_values(what: str) -> None:
    """U12, U13, U15, U16: a wrong value is refused before anything is _stored, by the name of its option."""
    run, fields = TABLE[what]
    queue = Queue(MemoryBackend())
    for field in fields:
        for value in WRONG:
            text = await _refusal(run, queue, field, value)
            if text is None:
                assert value is not NEVER, field
                queue = Queue(MemoryBackend())
                continue
            assert field in text, (type(value), text)
            assert len(text) < 500, (field, type(value))
            assert await _stored(queue) == ([], ()), (field, type(value))


async def _refusal(run: Run, queue: Queue, field: str, value: object) -> str | None:
    try:
        await run(queue, **{field: value})
    except InvalidInput as error:
        assert field in error.field, (type(value), str(error))  # noqa: PT017 - one of many
        return str(error)
    except ConfigurationError as error:
        return str(error)
    return None
