"""Workflows of declared tasks, on each kind of store."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

from taskqueue_core import (
    NotConnected,
    Queue,
    State,
    TaskCancelled,
    Tasks,
    Workflow,
    WorkflowHandle,
    WorkflowState,
    chain,
    group,
)
from taskqueue_core.backend import Capability
from taskqueue_core.capabilities import dead_letters_of, has, listing_of
from tests.application.flows import SECONDS, Flows, until
from tests.application.running import OpenWorld, also_on_a_cluster, working

F = TypeVar("F", bound=Flows)


@pytest.fixture
def flows() -> Flows:
    """Return a registry without connections."""
    return Flows()


def in_world(
    test: Callable[[Any, F], Awaitable[None]],
) -> Callable[[Any, F, OpenWorld], Awaitable[None]]:
    """Open a store with a worker for a test."""

    async def run(self: Any, flows: F, world: OpenWorld) -> None:
        async with (
            world() as opened,
            flows.tasks.connect(Queue(opened.backend)),
            working(opened.worker(flows.tasks)),
        ):
            flows.backend = opened.backend
            await test(self, flows)

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


async def state_of(handle: WorkflowHandle, name: str) -> State | None:
    """Return the state of a step."""
    status = await handle.status()
    assert status is not None
    return next(step.state for step in status.steps if step.name == name)


async def state_when(handle: WorkflowHandle, state: WorkflowState) -> None:
    """Wait until a workflow has a state."""

    async def reached() -> bool:
        status = await handle.status()
        return status is not None and status.state is state

    await until(reached)


class TestOnEachStore:
    """What a workflow does on memory, on Redis, and through a server."""

    @in_world
    async def test_results_as_inputs(self, flows: Flows) -> None:
        """U15: the outputs of steps become arguments, whole or in a list, with their types."""
        flow = Workflow()
        first = flow.add(flows.size.using(tags=("user:3",)).call("abc"))
        second = flow.add(flows.double.call(first.output))
        last = flow.add(flows.total.call([first.output, second.output, 100], label="all"))
        handle = await flow.publish(id="cat-17")
        assert await handle.result(last, timeout=SECONDS) == {"all": 109}
        status = await handle.wait(SECONDS)
        assert status.state is WorkflowState.ENDED
        assert [step.name for step in status.steps] == ["size", "double", "total"]
        assert status.steps[0].task_id == "cat-17.size"
        assert [step.after for step in status.steps] == [(), ("size",), ("size", "double")]
        if has(flows.backend, Capability.LISTING):
            detail = await listing_of(flows.backend).task(first.call.function.queue, "cat-17.size")
            assert detail is not None
            assert detail.task.tags == ("user:3",)

    @also_on_a_cluster
    @in_world
    async def test_a_chain(self, flows: Flows) -> None:
        """U15: each call of a chain begins when the one before it is done; the first registry needs no connection."""
        elsewhere = Tasks(prefix="flow.")

        @elsewhere.task
        async def note(text: str) -> None: ...

        with pytest.raises(NotConnected, match=r"flow\.note"):
            await chain(note.call("0")).publish()
        calls = [note.call("0"), *(flows.note.call(str(n)) for n in range(1, 20))]
        handle = await chain(*calls).publish()
        await handle.wait(SECONDS)
        assert flows.ran == [str(n) for n in range(20)]

    @also_on_a_cluster
    @in_world
    async def test_a_group(self, flows: Flows) -> None:
        """U15: after the calls of a group, `then` and `ended` run, and `failed` is cancelled."""
        flow = group(
            *(flows.size.call("x" * n) for n in range(1, 10)),
            then=flows.note.call("then"),
            failed=flows.note.call("failed"),
            ended=flows.note.call("ended"),
        )
        handle = await flow.publish()
        await handle.wait(SECONDS)
        assert sorted(flows.ran[-2:]) == ["ended", "then"]
        assert len(flows.ran) == 11
        assert await state_of(handle, "failed") is State.CANCELLED

    @in_world
    async def test_a_failure(self, flows: Flows) -> None:
        """U15: a dead letter holds `then` until its redrive, `failed` and `ended` run; the output may be missing."""
        flow = Workflow()
        broken = flow.add(flows.breaks.call())
        then = flow.add(flows.double.call(broken.output))
        flow.add(flows.note.call("failed"), after=broken, when="failed", name="failed")
        flow.add(flows.maybe.call(broken.output), when="ended")
        handle = await flow.publish()
        await state_when(handle, WorkflowState.HELD)
        assert sorted(flows.ran) == ["failed", "maybe None"]
        status = await handle.step(then).status()
        assert status is not None
        assert status.state is State.BLOCKED
        assert [held.task_id for held in status.held_by] == [f"{handle.id}.breaks"]
        flows.broken = False
        await dead_letters_of(flows.backend).redrive("flow.breaks", f"{handle.id}.breaks")
        assert await handle.result(then, SECONDS) == 14

    @in_world
    async def test_a_discarded_parent(self, flows: Flows) -> None:
        """U15: the discard of a dead letter cancels the step that it holds, and those after that."""
        flow = chain(flows.breaks.call(), flows.note.call("a"), flows.note.call("b"))
        handle = await flow.publish()
        await state_when(handle, WorkflowState.HELD)
        await dead_letters_of(flows.backend).discard("flow.breaks", f"{handle.id}.breaks")
        status = await handle.wait(SECONDS)
        assert status.state is WorkflowState.ENDED
        assert [step.state for step in status.steps] == [
            State.DISCARDED,
            State.CANCELLED,
            State.CANCELLED,
        ]
        with pytest.raises(TaskCancelled):
            await handle.result(flow.steps[2], SECONDS)

    @in_world
    async def test_cancelling(self, flows: Flows) -> None:
        """U15: cancelling ends what is blocked and stops what runs, and lets no step run that waits for an end."""
        flow = group(
            flows.hangs.call(),
            then=flows.note.call("then"),
            failed=flows.note.call("failed"),
            ended=flows.note.call("ended"),
        )
        handle = await flow.publish()
        await flows.started.wait()
        assert await handle.cancel()
        status = await handle.wait(SECONDS)
        assert {step.state for step in status.steps} == {State.CANCELLED}
        assert flows.ran == []
        assert not await handle.cancel()

    @in_world
    async def test_a_large_workflow(self, flows: Flows) -> None:
        """U15: a workflow that is longer than a payload is stored in parts."""
        names = [f"{n}" * 90_000 for n in range(8)]
        flow = group(*(flows.size.call(name) for name in names), then=flows.note.call("then"))
        handle = await flow.publish()
        status = await handle.wait(SECONDS)
        assert status.state is WorkflowState.ENDED
        assert [await handle.result(step) for step in flow.steps[:8]] == [90_000] * 8

    @in_world
    async def test_the_same_workflow_twice(self, flows: Flows) -> None:
        """U16: publishing a workflow again, before or after its end, changes nothing."""
        flow = chain(flows.note.call("a"), flows.note.call("b"))
        handle = await flow.publish(id="w")
        await flow.publish(id="w")
        await handle.wait(SECONDS)
        await flow.publish(id="w")
        await handle.wait(SECONDS)
        assert flows.ran == ["a", "b"]

    @in_world
    async def test_other_tasks_as_parents(self, flows: Flows) -> None:
        """U15: handles of published tasks are parents of steps, and of tasks without a workflow."""
        first = await flows.size.publish("abc")
        flow = Workflow()
        flow.add(flows.note.call("after"), after=first)
        await (await flow.publish()).wait(SECONDS)
        alone = await flows.note.using(after=first).publish("alone")
        await alone.result(SECONDS)
        assert flows.ran == ["size abc", "after", "alone"]

    @in_world
    async def test_an_unknown_parent(self, flows: Flows) -> None:
        """U15: a step whose parent nobody knows is cancelled, and says why."""
        flow = Workflow()
        step = flow.add(flows.note.call("after"), after=flows.size.handle("never"))
        handle = await flow.publish()
        await handle.wait(SECONDS)
        status = await handle.step(step).status()
        assert status is not None
        assert (status.state, status.error) == (State.CANCELLED, "unknown_parent")

    @in_world
    async def test_events(self, flows: Flows) -> None:
        """U15: the events of a workflow end with the ends of its steps."""
        handle = await chain(flows.note.call("a"), flows.note.call("b")).publish()
        seen = {step.name: step.state async for step in handle.events()}
        assert seen == {"note": State.DONE, "note-2": State.DONE}
