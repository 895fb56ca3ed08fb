"""Steps that running steps add to their workflow: `context.workflow.add`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from taskqueue_core import (
    BackendUnavailable,
    Call,
    Confirmation,
    Context,
    InvalidWorkflow,
    Middleware,
    PublishUnconfirmed,
    Reject,
    Retry,
    State,
    TaskFunction,
    Workflow,
    WorkflowState,
    chain,
)
from taskqueue_core.queue_workflows import QueueWorkflows
from taskqueue_worker.testing import TestQueue
from tests.application.flows import SECONDS, Flows
from tests.application.test_workflow_input import Shuffled
from tests.application.test_workflows import in_world


class Splits(Flows):
    """The tasks of `Flows`, and some that add steps to their workflow."""

    def __init__(self, *middleware: Middleware, **options: Any) -> None:
        super().__init__(*middleware, **options)
        self.add: Callable[[Context], object] = lambda _: None
        """what the task `adds` does"""
        self.contexts: list[Context] = []
        self.fails = 0
        """how many times the task `adds` fails after it has added steps"""

        @self.tasks.task
        async def adds(context: Context) -> str:
            self.contexts.append(context)
            self.add(context)
            self.fails -= 1
            if self.fails >= 0:
                raise Retry(0)
            self.ran.append("adds")
            return "added"

        @self.tasks.task
        def split(context: Context, names: list[str]) -> None:
            sizes = [context.workflow.add(self.size.call(name)) for name in names]
            total = context.workflow.add(self.total.call([each.output for each in sizes]))
            context.workflow.add(self.descend.call(2), after=total, name="more")

        @self.tasks.task
        async def descend(context: Context, levels: int) -> None:
            if levels:
                context.workflow.add(self.descend.call(levels - 1), name="more")
            else:
                context.workflow.add(self.note.call("end"), name="end")
                older = self.size.handle(f"{context.workflow.id}.split:size")
                for when in ("ended", "failed"):
                    context.workflow.add(self.note.call(when), after=older, when=when, name=when)

        self.adds: TaskFunction[[], str] = adds
        self.split, self.descend = split, descend


@pytest.fixture
def flows() -> Splits:
    """Return a registry without connections."""
    return Splits()


NOTES = ["end", "ended", "failed"]
NAMES = ["split", "split:size", "split:size-2", "split:total", "split:more"]


class TestOnEachStore:
    """What added steps do on memory, on Redis, and through a server."""

    @in_world
    async def test_added_steps(self, flows: Splits) -> None:
        """U15: a handler adds steps, which get one another's results, and add more; the handle waits for all."""
        flow = chain(flows.split.call(["a", "bb"]), flows.note.call("next"))
        handle = await flow.publish(id="w")
        status = await handle.wait(SECONDS)
        assert status.state is WorkflowState.ENDED
        names = {step.name: (step.state, step.after) for step in status.steps}
        last = "split:more:more:more"
        assert [name for name in names if names[name][0] is not State.DONE] == [f"{last}:failed"]
        assert names[f"{last}:failed"][0] is State.CANCELLED
        deeper = ["split:more:more", last, *(f"{last}:{name}" for name in NOTES)]
        assert sorted(names) == sorted([*NAMES, *deeper, "note"])
        assert names["split:size"][1] == ("split",)
        assert names["split:total"][1] == ("split:size", "split:size-2")
        assert names["split:more:more"][1] == ("split:more",)
        ran = ["size a", "size bb", "total [1, 2]", "end", "ended", "next"]
        assert sorted(flows.ran) == sorted(ran)
        total = await flows.total.handle("w.split:total").result(SECONDS)
        assert total == {"sum": 3}

    @in_world
    async def test_an_attempt_that_fails(self, flows: Splits) -> None:
        """U15: an attempt that fails adds nothing; the next one adds its steps once, also if they are large."""
        flows.fails = 1
        flows.add = lambda context: [
            context.workflow.add(flows.size.call("x" * 60_000)) for _ in range(6 - flows.fails)
        ]
        handle = await chain(flows.adds.call()).publish()
        status = await handle.wait(SECONDS)
        assert status.state is WorkflowState.ENDED
        assert len(status.steps) == 7
        assert flows.ran[0] == "adds"
        assert len(flows.ran) == 7

    @in_world
    async def test_cancelling(self, flows: Splits) -> None:
        """U15: cancelling a workflow ends the steps that were added, and stops those that run."""
        flows.add = lambda context: [
            context.workflow.add(flows.hangs.call()),
            context.workflow.add(flows.note.call("x"), after=context.workflow.steps[0]),
            context.workflow.add(
                flows.note.call("y"), after=context.workflow.steps[0], when="ended"
            ),
        ]
        handle = await chain(flows.adds.call()).publish()
        await flows.started.wait()
        assert await handle.cancel()
        status = await handle.wait(SECONDS)
        assert [step.state for step in status.steps] == [State.DONE, *[State.CANCELLED] * 3]
        assert flows.ran == ["adds"]

    @in_world
    async def test_wrong_uses(self, flows: Splits) -> None:
        """U15: what cannot be added is an error that names the field, before anything is stored."""
        errors: list[str] = []
        flows.add = lambda context: errors.extend(_errors(flows, context))
        status = await (await chain(flows.adds.call()).publish(id="w")).wait(SECONDS)
        assert status.state is WorkflowState.ENDED
        assert [step.name for step in status.steps] == ["adds"]
        assert errors == [
            "steps.x.name",  # two steps
            "steps.x2.after",  # a step of another workflow
            "call",
            f"steps.{'x' * 99}.name",  # too long
        ]
        with pytest.raises(InvalidWorkflow, match="a handler that has ended") as caught:
            flows.contexts[0].workflow.add(flows.note.call("late"))
        assert caught.value.field == "context.workflow"
        flows.add = lambda _: None
        handle = await flows.adds.publish()
        with pytest.raises(InvalidWorkflow, match="a task that is no step of a workflow"):
            _ = flows.contexts[-1].workflow if await handle.result(SECONDS) else None
        assert len(flows.contexts) == 2


def _errors(flows: Splits, context: Context) -> list[str]:
    """Return the fields that errors name, and add nothing."""
    flow = context.workflow
    other = Workflow().add(flows.note.call("other"))
    found = []
    added = flow.add(flows.note.call("x"), name="x")
    wrong: list[Callable[[], object]] = [
        lambda: flow.add(flows.note.call("x"), name="x"),
        lambda: flow.add(flows.note.call("x"), name="x2", after=other),
        lambda: flow.add(flows.note),  # type: ignore[arg-type] # wrong on purpose
        lambda: flow.add(flows.note.call("x"), name="x" * 99),
    ]
    for add in wrong:
        with pytest.raises(InvalidWorkflow) as caught:
            add()
        found.append(caught.value.field)
    del flow._steps[added.name]
    return found


@pytest.mark.parametrize("mode", ["queue", "inline"])
async def test_in_drains(flows: Splits, mode: str) -> None:
    """U11, U15: a drain runs added steps; a handler that runs twice adds them once."""
    async with TestQueue(flows.tasks, mode=mode) as taskqueue:  # type: ignore[arg-type] # one of the two
        handle = await chain(flows.split.call(["a", "bb"])).publish(id="w")
        if mode == "queue":
            drained = await taskqueue.drain(deliver_twice=True)
            assert drained.count(flows.size) == 4
        assert (await handle.wait()).state is WorkflowState.ENDED
        taskqueue.assert_published(flows.size, times=1, name="bb")


async def test_another_addition_after_a_crash(flows: Splits) -> None:
    """U16: a handler that adds other steps when it runs again fails, and succeeds once it adds the same."""
    flows.add = lambda context: context.workflow.add(flows.note.call(str(len(flows.contexts))))
    async with TestQueue(flows.tasks, errors="record") as taskqueue:
        handle = await chain(flows.adds.call()).publish(id="w")
        drained = await taskqueue.drain(deliver_twice=True)
        assert "w.adds' has added other steps in an earlier run" in str(drained.errors[0])
        flows.add = lambda context: context.workflow.add(flows.note.call("1"))
        await taskqueue.advance(60)
        assert flows.ran == ["adds", "adds", "adds", "1"]
        assert (await handle.wait()).state is WorkflowState.ENDED


async def test_an_outage(flows: Splits, monkeypatch: pytest.MonkeyPatch) -> None:
    """U16, fault B1: while the store does not answer, a handler that adds steps runs again, and no attempt is used."""
    add, failures = QueueWorkflows.add, [BackendUnavailable("down"), PublishUnconfirmed("lost")]

    async def broken(*args: Any, **options: Any) -> Confirmation:
        if failures:
            raise failures.pop()
        return await add(*args, **options)

    monkeypatch.setattr(QueueWorkflows, "add", broken)
    flows.add = lambda context: context.workflow.add(flows.note.call("once"))
    async with TestQueue(flows.tasks) as taskqueue:
        handle = await chain(flows.adds.using(max_attempts=1).call()).publish()
        await taskqueue.advance(60)
        assert (await handle.wait()).state is WorkflowState.ENDED
        assert flows.ran == ["adds", "adds", "adds", "once"]
        assert [context.failures for context in flows.contexts] == [0, 0, 0]


class _Tags(Middleware):
    """Adds a header to each publish."""

    def __init__(self) -> None:
        self.confirmed: list[str] = []

    async def publish(
        self, call: Call[Any], send: Callable[[Call[Any]], Awaitable[Confirmation]]
    ) -> Confirmation:
        confirmation = await send(call.using(headers={"tag": "x"}))
        self.confirmed.append(confirmation.task_id)
        return confirmation


async def test_middleware_and_codecs() -> None:
    """U15, U17: added calls go through their middleware, and are encoded; a repetition is one all the same."""
    tags = _Tags()
    flows = Splits(tags, codec=Shuffled())
    async with TestQueue(flows.tasks) as taskqueue:
        await chain(flows.split.call(["a"])).publish(id="w")
        await taskqueue.drain(deliver_twice=True)
        assert flows.ran.count("total [1]") == 2
        assert set(tags.confirmed) == {
            *("w.split", "w.split:size", "w.split:total", "w.split:more", "w.split:more:more"),
            "w.split:more:more:more",
            *(f"w.split:more:more:more:{name}" for name in NOTES),
        }


async def test_batches(flows: Splits) -> None:
    """U15: in a batch handler each task has its own workflow, and those that fail add nothing."""

    @flows.tasks.task(batch=5)
    async def many(contexts: list[Context], numbers: list[int]) -> list[Any]:
        for number, context in zip(numbers, contexts, strict=True):
            context.workflow.add(flows.note.call(str(number)))
        return [Reject("odd") if number % 2 else None for number in numbers]

    async with TestQueue(flows.tasks, errors="record") as taskqueue:
        for number in range(4):
            call = many.call([number])  # type: ignore[call-arg, list-item] # contexts come from the worker
            await chain(call).publish()
        await taskqueue.drain()
        assert sorted(flows.ran) == ["0", "2"]
