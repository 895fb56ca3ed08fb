"""Workflows in drains of a `TestQueue`."""

from __future__ import annotations

import pytest

from taskqueue_core import WorkflowState, chain, group
from taskqueue_core.limits import LIMITS
from taskqueue_worker.testing import TestQueue
from tests.application.flows import Flows


@pytest.fixture
def flows() -> Flows:
    """Return a registry without connections."""
    return Flows()


@pytest.mark.parametrize("mode", ["queue", "inline"])
async def test_a_drain_runs_a_workflow(flows: Flows, mode: str) -> None:
    """U11, U15: a drain publishes the steps of a workflow, and runs them one after another."""
    async with TestQueue(flows.tasks, mode=mode) as taskqueue:  # type: ignore[arg-type] # one of the two
        flow = chain(flows.size.call("abc"), flows.note.call("done"))
        handle = await flow.publish()
        await taskqueue.drain()
        assert flows.ran == ["size abc", "done"]
        assert await handle.result(flow.steps[0]) == 3
        assert (await handle.wait()).state is WorkflowState.ENDED
        taskqueue.assert_published(flows.size, times=1, name="abc")


async def test_each_step_twice(flows: Flows) -> None:
    """U11, U15: steps are delivered twice if the test asks for it, and the steps after them once."""
    async with TestQueue(flows.tasks) as taskqueue:
        await group(flows.note.call("a"), flows.note.call("b"), then=flows.note.call("c")).publish()
        drained = await taskqueue.drain(deliver_twice=True)
        assert drained.count(end="done") == 3
        assert sorted(flows.ran) == ["a", "a", "b", "b", "c", "c"]


async def test_a_failure_branch(flows: Flows) -> None:
    """U11, U15: a drain raises the error of a step, and the step that waits for a failure runs."""
    async with TestQueue(flows.tasks, errors="record") as taskqueue:
        handle = await group(flows.breaks.call(), failed=flows.note.call("failed")).publish()
        drained = await taskqueue.drain()
        assert [run.dead.reason for run in drained.dead if run.dead] == ["broken"]
        assert flows.ran == ["failed"]
        assert (await handle.wait()).state is WorkflowState.ENDED


async def test_a_chain_of_a_thousand(flows: Flows) -> None:
    """U15: a chain of as many steps as a workflow may have runs in order, and ends."""
    async with TestQueue(flows.tasks) as taskqueue:
        calls = [flows.note.call(str(number)) for number in range(LIMITS.steps)]
        handle = await chain(*calls).publish()
        await taskqueue.drain()
        assert flows.ran == [str(number) for number in range(LIMITS.steps)]
        assert (await handle.wait()).state is WorkflowState.ENDED
