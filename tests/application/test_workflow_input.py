"""Workflows that are wrong or cannot go on, and the middleware of their calls."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from taskqueue_core import (
    After,
    Call,
    Confirmation,
    Context,
    InvalidArguments,
    InvalidInput,
    InvalidWorkflow,
    Middleware,
    Queue,
    State,
    UnknownTask,
    Workflow,
    WorkflowHandle,
    WorkflowState,
    Zlib,
    chain,
    group,
)
from taskqueue_core.capabilities import control_of, dead_letters_of
from taskqueue_core.limits import LIMITS
from taskqueue_core.queue_settings import change_settings
from taskqueue_core.workflows import WORKFLOWS
from taskqueue_memory import MemoryBackend
from taskqueue_worker import LocalWorker
from tests.application.flows import SECONDS, Flows, memory, until
from tests.application.running import working


@pytest.fixture
def flows() -> Flows:
    """Return a registry without connections."""
    return Flows()


async def test_an_unknown_workflow(flows: Flows) -> None:
    """U15: a workflow that was never published has no status, and no wait for it lasts."""
    async with memory(flows) as backend:
        handle = WorkflowHandle(Queue(backend), "never")
        assert await handle.status() is None
        assert not await handle.cancel()
        with pytest.raises(UnknownTask):
            await handle.wait()


def _cases(flows: Flows) -> dict[str, Callable[[Workflow], object]]:
    def other() -> Any:
        return Workflow().add(flows.size.call("x"))

    return {
        "steps.note.name": lambda flow: [
            flow.add(flows.note.call("x"), name="note") for _ in range(2)
        ],
        "steps.note.after": lambda flow: flow.add(flows.note.call("x"), after=other()),
        "steps.double.after": lambda flow: flow.add(flows.double.call(other().output)),
        "steps.note.id": lambda flow: flow.add(flows.note.using(id="x").call("x")),
        "call": lambda flow: flow.add(flows.note),
    }


@pytest.mark.parametrize("field", list(_cases(Flows())))
def test_wrong_steps(flows: Flows, field: str) -> None:
    """U15: a wrong step is refused when it is added, with the name of the field."""
    with pytest.raises(InvalidWorkflow) as caught:
        _cases(flows)[field](Workflow())
    assert caught.value.field == field


async def test_wrong_workflows(flows: Flows) -> None:
    """U15: a workflow that is empty or too large is refused before anything is sent."""
    async with memory(flows) as backend:
        many = group(*(flows.note.call("x") for _ in range(LIMITS.steps + 1)))
        long = group(*(flows.note.call("x" * 250_000) for _ in range(20)))
        inputs = Workflow()
        total = flows.total.call([inputs.add(flows.size.call("x")).output])
        inputs.add(total, after=flows.size.handle("y"), when="failed")
        unique = chain(flows.note.using(unique=None).call("x"))
        for flow, field in (
            (Workflow(), "steps"),
            (many, "steps"),
            (long, "steps"),
            (inputs, "steps.total.inputs"),
        ):
            with pytest.raises(InvalidWorkflow) as caught:
                await flow.publish()
            assert caught.value.field == field
        for wrong in ("", "<x", "x" * 101):
            with pytest.raises(InvalidInput, match="id: got"):
                await unique.publish(id=wrong)
        assert await control_of(backend).queues() == ()


def test_wrong_uses_of_outputs(flows: Flows) -> None:
    """U15: an output is passed on whole, and only to a step."""
    flow = Workflow()
    step = flow.add(flows.total.call([1]))
    for use in (
        lambda: step.output["sum"],
        lambda: f"{step.output}",
        lambda: [*step.output],
        lambda: bool(step.output),
    ):
        with pytest.raises(TypeError, match="is not known yet"):
            use()
    with pytest.raises(InvalidArguments, match="missing a required argument: 'name'"):
        flows.size.call(other=step.output)  # type: ignore[call-arg] # wrong on purpose
    with pytest.raises(InvalidArguments, match="label"):
        flows.total.call([flow.add(flows.size.call("x")).output], label=3)  # type: ignore[arg-type] # as above
    with pytest.raises(InvalidArguments, match="input"):
        flows.total.call([step.output, {"$input": 3}])  # type: ignore[list-item] # as above


async def test_an_output_without_a_workflow(flows: Flows) -> None:
    """U15: a call with an output cannot be published alone."""
    call = flows.double.call(Workflow().add(flows.size.call("x")).output)
    async with memory(flows) as backend:
        with pytest.raises(InvalidInput, match="the output of a step"):
            await flows.tasks.publish_many([call])
        assert await control_of(backend).queues() == ()


async def test_after_on_a_publish(flows: Flows) -> None:
    """U15: `after` is an After, a handle, a TaskRef or a list of them; something else is refused."""
    async with memory(flows) as backend:
        first = await flows.size.publish("x")
        queue = Queue(backend)
        for after in (first, first.ref, [first], After(tasks=(first.ref,))):
            confirmation = await queue.publish("flow.note", {"text": "x"}, after=after)
            status = await queue.status("flow.note", confirmation.task_id)
            assert status is not None
            assert status.state is State.BLOCKED
        with pytest.raises(InvalidInput, match="after: got int"):
            await queue.publish("flow.note", after=3)  # type: ignore[arg-type] # wrong on purpose


class _Tags(Middleware):
    """Adds a header to each publish, or sends nothing."""

    def __init__(self) -> None:
        self.confirmed: list[Confirmation] = []
        self.sends = True

    async def publish(
        self, call: Call[Any], send: Callable[[Call[Any]], Awaitable[Confirmation]]
    ) -> Confirmation:
        if not self.sends:
            return self.confirmed[0]
        confirmation = await send(call.using(headers={"tag": "x"}))
        self.confirmed.append(confirmation)
        return confirmation


async def test_middleware() -> None:
    """U15: each call of a workflow goes through the middleware; one that it does not send is an error."""
    tags = _Tags()
    flows = Flows(tags)
    seen: list[str] = []

    @flows.tasks.task
    async def shows(context: Context) -> None:
        seen.append(context.headers["tag"])

    async with memory(flows) as backend:
        flow = chain(flows.tasks.functions["flow.shows"].call(), flows.note.call("x"))
        async with working(LocalWorker(flows.tasks, backend=backend)):
            await (await flow.publish(id="w")).wait(SECONDS)
        assert seen == ["x"]
        assert [each.task_id for each in tags.confirmed] == ["w.shows", "w.note"]
        tags.sends = False
        with pytest.raises(InvalidWorkflow, match="middleware did not send"):
            await flow.publish()


async def test_a_step_that_conflicts(flows: Flows) -> None:
    """U16: if the id of a step is taken by another task, no step runs, and the workflow says why."""
    async with memory(flows) as backend:
        queue = Queue(backend)
        await queue.publish("flow.note", {"text": "other"}, id="w.note")
        handle = await chain(flows.size.call("x"), flows.note.call("x")).publish(id="w")
        async with working(LocalWorker(flows.tasks, backend=backend)):
            status = await handle.wait(SECONDS)
            assert status.state is WorkflowState.HELD
            assert status.problem == "id_conflict"
            assert await handle.cancel()
            await until(lambda: _is_gone(backend))
        assert flows.ran == ["other"]
        ledger = await queue.ledger("flow.size", "flow.note")
        assert (ledger.cancelled, ledger.blocked, ledger.done) == (1, 0, 1)


async def _is_gone(backend: MemoryBackend) -> bool:
    return await dead_letters_of(backend).get(WORKFLOWS, "w") is None


async def _is_put_off(backend: MemoryBackend) -> bool:
    return bool((await control_of(backend).ledger(WORKFLOWS)).scheduled)


async def test_a_queue_that_is_full(flows: Flows) -> None:
    """U16: a workflow whose steps do not fit into a queue waits until they do; none of its steps runs before."""
    async with memory(flows) as backend:
        control = control_of(backend)
        await change_settings(
            control, "flow.note", lambda old: old.model_copy(update={"capacity": 1})
        )
        handle = await chain(flows.note.call("a"), flows.note.call("b")).publish()
        async with working(LocalWorker(flows.tasks, backend=backend)):
            await until(lambda: _is_put_off(backend))
            assert flows.ran == []
            await change_settings(
                control, "flow.note", lambda old: old.model_copy(update={"capacity": 2})
            )
            await handle.wait(SECONDS)
        assert flows.ran == ["a", "b"]


class Shuffled(Zlib):
    """A codec that encodes the same text differently each time."""

    def __init__(self) -> None:
        super().__init__()
        self._number = 0

    def encode(self, data: bytes) -> bytes:
        """Add a number."""
        self._number += 1
        return super().encode(data + b" " * self._number)


@pytest.mark.parametrize("length", [3, 400_000])
async def test_codecs(length: int) -> None:
    """U15, U17: payloads and results are encoded in the store; the same workflow again is a repetition."""
    flows = Flows(codec=Shuffled())
    async with memory(flows) as backend:
        flow = Workflow()
        size = flow.add(flows.size.call("x" * length))
        flow.add(flows.double.call(size.output))
        handle = await flow.publish(id="w")
        await flow.publish(id="w")
        async with working(LocalWorker(flows.tasks, backend=backend)):
            assert await handle.result(flow.steps[1], SECONDS) == 2 * length
        await flow.publish(id="w")
