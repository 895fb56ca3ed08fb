"""Steps that a step adds to its workflow, as data: kills between any two calls, repetitions, cancels, wrong input."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

from taskqueue_core.after import TaskRef
from taskqueue_core.consumer.expander import Expander
from taskqueue_core.errors import IdConflict, LeaseLost
from taskqueue_core.limits import LIMITS
from taskqueue_core.queue import Queue
from taskqueue_core.queue_settings import change_settings
from taskqueue_core.tasks import Delivery, State, Task
from taskqueue_core.workflows import (
    WORKFLOWS,
    InvalidWorkflow,
    WorkflowState,
    WorkflowStatus,
    WorkflowStep,
    added_steps,
    addition_id,
    manifest_tasks,
)
from taskqueue_memory import MemoryBackend
from tests.core.test_expander import Counting, Killed, run, steps

BY = TaskRef("q.a", "w.a")


@pytest.fixture
async def backend() -> AsyncIterator[MemoryBackend]:
    """Yield an empty backend."""
    made = MemoryBackend()
    yield made
    await made.aclose()


async def started(backend: MemoryBackend) -> None:
    """Publish a workflow whose first step is available."""
    await Queue(backend).workflows.put(steps("a"), id="w")
    await Expander(backend).drain()


async def status(backend: MemoryBackend) -> WorkflowStatus:
    """Return the status of the workflow."""
    found = await Queue(backend).workflows.get("w")
    assert found is not None
    return found


@pytest.mark.parametrize("size", [1, 100_000])
@pytest.mark.parametrize("after_call", [False, True])
async def test_killed_between_two_calls(size: int, *, after_call: bool) -> None:
    """U16, fault A1: wherever a handler that adds steps, or an expander, is killed, each step runs once, in order."""
    number, killed = 0, True
    while killed:
        made, killed = MemoryBackend(), False
        await started(made)
        async with made.subscribe(["q.a"], "w") as subscription:
            (held,) = (await subscription.receive(1, 0)).deliveries
            dying = Counting(made, (number, after_call))
            added = steps("x", "y", payload="x" * size)
            try:
                await Queue(dying).workflows.add(added, by=BY)  # type: ignore[arg-type] # it has what is used
                await subscription.ack(held)
                await Expander(dying).drain()  # type: ignore[arg-type] # as above
            except Killed:
                killed = True
            if (await made.control.statuses("q.a", "w.a"))[0].state is State.IN_FLIGHT:  # type: ignore[union-attr] # known
                await subscription.redeliver(held)
                (held,) = (await subscription.receive(1, 0)).deliveries
                await Queue(made).workflows.add(added, by=BY)
                await subscription.ack(held)
        assert sorted(await run(made)) == ["w.a:end", "w.a:x", "w.a:y", "w.end"]
        found = await status(made)
        assert found.state is WorkflowState.ENDED
        assert [step.name for step in found.steps] == ["a", "end", "a:x", "a:y", "a:end"]
        ledgers = [await made.control.ledger(key) for key in ("q.x", "q.y", "q.end")]
        assert [(each.published, each.done) for each in ledgers] == [(1, 1), (1, 1), (2, 2)]
        await made.aclose()
        number += 1
    assert number >= 10


async def test_again(backend: MemoryBackend) -> None:
    """U16: the same steps again change nothing, also after their end; other steps are a conflict that says so."""
    await started(backend)
    workflows = Queue(backend).workflows
    for _ in range(2):
        await workflows.add(steps("x"), by=BY)
    with pytest.raises(IdConflict, match="has added other steps in an earlier run") as caught:
        await workflows.add(steps("y"), by=BY)
    assert caught.value.task_id == "w.a"
    assert sorted(await run(backend)) == ["w.a", "w.a:end", "w.a:x", "w.end"]
    await workflows.add(steps("x"), by=BY)
    assert await run(backend) == []


async def test_a_step_that_is_not_done(backend: MemoryBackend) -> None:
    """U15: added steps wait for the step that added them: held while it is a dead letter."""
    await started(backend)
    workflows = Queue(backend).workflows
    async with backend.subscribe(["q.a"], "w") as subscription:
        (held,) = (await subscription.receive(1, 0)).deliveries
        await workflows.add(steps("x"), by=BY)
        assert (await status(backend)).state is WorkflowState.RUNNING
        await subscription.dead_letter(held, "broken")
    assert await run(backend) == ["w.end"]
    assert (await status(backend)).state is WorkflowState.HELD
    await backend.dead_letters.redrive("q.a", "w.a")
    assert (await status(backend)).state is WorkflowState.RUNNING
    assert await run(backend) == ["w.a", "w.a:x", "w.a:end"]
    assert (await status(backend)).state is WorkflowState.ENDED


async def test_a_step_that_is_discarded(backend: MemoryBackend) -> None:
    """U15: the steps that a step has added are never published if it is discarded, or cancelled."""
    await started(backend)
    async with backend.subscribe(["q.a"], "w") as subscription:
        (held,) = (await subscription.receive(1, 0)).deliveries
        await Queue(backend).workflows.add(steps("x"), by=BY)
        await subscription.dead_letter(held, "broken")
    await backend.dead_letters.discard("q.a", "w.a")
    assert await run(backend) == ["w.end"]
    found = await status(backend)
    assert (found.state, len(found.steps), found.problem) == (WorkflowState.ENDED, 2, None)


class Meddling(Counting):
    """A backend that does something before one of the calls."""

    def __init__(
        self, inner: MemoryBackend, number: int, act: Callable[[], Awaitable[object]]
    ) -> None:
        super().__init__(inner)
        self._number = number
        self._act = act

    async def call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Count a call."""
        if self.calls == self._number:
            await self._act()
        return await super().call(function, *args, **kwargs)


async def test_added_while_the_workflow_is_cancelled() -> None:
    """U15: at whatever call of a cancellation a handler adds steps and ends, none of them runs, and all have ended."""
    number, acted = 0, True
    while acted:
        made, acted = MemoryBackend(), False
        await started(made)
        workflows = Queue(made).workflows
        async with made.subscribe(["q.a"], "w") as subscription:
            (held,) = (await subscription.receive(1, 0)).deliveries
            await workflows.cancel("w")

            async def add(held: Delivery = held, made: MemoryBackend = made) -> None:
                nonlocal acted
                acted = True  # it has looked for an order to cancel before
                await made.publisher.publish(*manifest_tasks("w", added_steps(BY, steps("x")), BY))
                with suppress(LeaseLost):
                    await subscription.ack(held)

            await Expander(Meddling(made, number, add)).drain()  # type: ignore[arg-type] # it has what is used
            assert await run(made) == []
        found = await status(made)
        assert found.state is WorkflowState.ENDED
        assert not {step.state for step in found.steps} - {State.CANCELLED, State.DONE}
        await made.aclose()
        number += 1
    assert number >= 10


async def test_cancelled_while_added_steps_are_published() -> None:
    """U15: at whatever call of their publishing a workflow is cancelled, no added step runs, except at the ack."""
    number, acted, late = 0, True, 0
    while acted:
        made, acted = MemoryBackend(), False
        await started(made)
        workflows = Queue(made).workflows
        await workflows.add(steps("x"), by=BY)
        async with made.subscribe(["q.a"], "w") as subscription:
            await subscription.ack(*(await subscription.receive(1, 0)).deliveries)

        async def cancel(made: MemoryBackend = made) -> None:
            nonlocal acted
            acted = True
            await Queue(made).workflows.cancel("w")
            await Expander(made).drain()

        meddling = Meddling(made, number, cancel)
        await Expander(meddling).drain()  # type: ignore[arg-type] # it has what is used
        if await run(made):
            late += acted
        else:
            found = await status(made)
            assert {step.state for step in found.steps[2:]} <= {State.CANCELLED}
        await made.aclose()
        number += 1
    assert number >= 10
    assert late <= 2  # before the settings are read, and before the ack


@pytest.mark.parametrize(
    ("by", "added", "field", "text"),
    [
        (TaskRef("q.a", "a"), steps("x"), "by", "no step of a workflow"),
        (TaskRef("q.a", "never.a"), steps("x"), "by", "a workflow that is not known"),
        (TaskRef("q.a", "w.b"), steps("x"), "by", "a step that is not known or has ended"),
        (TaskRef("q.end", "w.a"), steps("x"), "by", "a step that is not known or has ended"),
        (BY, [], "steps", "no step"),
        (BY, [WorkflowStep.of("x", "q")] * 2, "steps.x.name", "the name of two steps"),
        (BY, [WorkflowStep.of("a:x", "q")], "steps.a:x.name", "a name with a colon"),
        (BY, [WorkflowStep.of("x" * 98, "q")], f"steps.{'x' * 98}.name", "100 characters together"),
        (BY, [WorkflowStep.of("x", "q", after=("a",))], "steps.x.after", "does not exist"),
        (BY, [WorkflowStep.of("x", "q", after=("x",))], "steps.x.after", "a cycle of steps: x;"),
        (
            BY,
            [WorkflowStep.of("x", "q", after=(TaskRef("q.z", "w.z"),))],
            "steps.x.after",
            "a step that the workflow does not have in this queue",
        ),
        (
            BY,
            [WorkflowStep.of("x", "q", after=(BY,), when="ended", inputs=(0,))],
            "steps.x.inputs",
            "other tasks with 'ended'",
        ),
        (
            BY,
            [WorkflowStep.of(f"s{n}", "q") for n in range(LIMITS.steps + 1)],
            "steps",
            "1001 steps",
        ),
        (
            BY,
            [WorkflowStep.of(f"s{n}", "q", "x" * 250_000) for n in range(20)],
            "steps",
            "bytes",
        ),
    ],
    ids=[
        *("task", "workflow", "step", "queue", "empty", "twice", "colon", "long", "unknown"),
        *("cycle", "parent", "inputs", "many", "large"),
    ],
)
async def test_wrong_additions(
    backend: MemoryBackend, by: TaskRef, added: list[WorkflowStep], field: str, text: str
) -> None:
    """U15: steps that cannot be added are refused with the field, before anything is stored."""
    await started(backend)
    before = await backend.control.ledger(WORKFLOWS)
    with pytest.raises(InvalidWorkflow, match=text) as caught:
        await Queue(backend).workflows.add(added, by=by)
    assert caught.value.field == field
    unknown = "workflow that is not known" in text
    assert caught.value.code == ("unknown_workflow" if unknown else "invalid_workflow")
    assert await backend.control.ledger(WORKFLOWS) == before


async def test_of_a_step_that_has_ended(backend: MemoryBackend) -> None:
    """U15: a step that has ended, or one of a cancelled workflow, adds no steps."""
    await started(backend)
    workflows = Queue(backend).workflows
    await run(backend)
    with pytest.raises(InvalidWorkflow, match="a step that is not known or has ended"):
        await workflows.add(steps("x"), by=BY)
    await workflows.put(steps("a"), id="w2")
    await Expander(backend).drain()
    await workflows.cancel("w2")
    with pytest.raises(InvalidWorkflow, match="a step of a workflow that is cancelled"):
        await workflows.add(steps("x"), by=TaskRef("q.a", "w2.a"))
    (known,) = await backend.control.statuses(WORKFLOWS, addition_id(TaskRef("q.a", "w2.a")))
    assert known is None


async def test_after_other_steps(backend: MemoryBackend) -> None:
    """U15: an added step waits for other steps of the workflow, which its status names, and for other tasks."""
    await Queue(backend).workflows.put(
        [WorkflowStep.of("a", "q.a"), WorkflowStep.of("b", "q.b")], id="w"
    )
    await Expander(backend).drain()
    other = TaskRef("q.c", "other")
    await backend.publisher.publish(Task(key=other.key, id=other.task_id))
    after = (TaskRef("q.b", "w.b"), other)
    await Queue(backend).workflows.add([WorkflowStep.of("x", "q.a", after=after)], by=BY)
    async with backend.subscribe(["q.a"], "w") as subscription:
        await subscription.ack(*(await subscription.receive(9, 0)).deliveries)
        await Expander(backend).drain()
        assert not (await subscription.receive(9, 0)).deliveries
    found = await status(backend)
    assert [(step.name, step.after) for step in found.steps] == [
        ("a", ()),
        ("b", ()),
        ("a:x", ("a", "b", other)),
    ]
    assert sorted(await run(backend)) == ["other", "w.a:x", "w.b"]


async def test_a_forgotten_step(backend: MemoryBackend) -> None:
    """U16: added steps run although the record of the step that added them is deleted at its end."""
    await change_settings(
        backend.control, "q.a", lambda old: old.model_copy(update={"dedupe_window": 0.0})
    )
    await started(backend)
    async with backend.subscribe(["q.a"], "w") as subscription:
        deliveries = (await subscription.receive(1, 0)).deliveries
        await Queue(backend).workflows.add(steps("x"), by=BY)
        await subscription.ack(*deliveries)
    await backend.control.maintain()
    assert sorted(await run(backend)) == ["w.a:end", "w.a:x", "w.end"]
    assert len((await status(backend)).steps) == 4
