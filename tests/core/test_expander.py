"""The expander of workflows: killed between any two of its calls, twice at once, and late."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from taskqueue_core.after import TaskRef
from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.consumer.carrier import carry
from taskqueue_core.consumer.expander import Expander
from taskqueue_core.errors import BackendUnavailable, InvalidInput
from taskqueue_core.hooks import Identity, is_internal
from taskqueue_core.limits import LIMITS
from taskqueue_core.queue import Queue
from taskqueue_core.tasks import State, Task
from taskqueue_core.workflows import (
    WORKFLOWS,
    InvalidWorkflow,
    WorkflowState,
    WorkflowStep,
    checked_steps,
    levels,
    read_stored,
    with_inputs,
)
from taskqueue_memory import MemoryBackend

PARTS = ("publisher", "control", "dependencies", "dead_letters")


class Killed(BaseException):
    """The expander is killed at this point."""


class Counting:
    """A backend whose calls are counted, and one of which kills the caller."""

    def __init__(self, inner: MemoryBackend, kill: tuple[int, bool] | None = None) -> None:
        self.capabilities = inner.capabilities
        self.now = inner.now
        self._inner = inner
        self._kill = kill
        self.calls = 0
        for name in PARTS:
            setattr(self, name, _Part(self, getattr(inner, name)))

    def subscribe(self, keys: Any, consumer: str) -> Any:
        """Open a subscription whose calls are counted, except its close."""
        return _Part(self, self._inner.subscribe(keys, consumer))

    async def call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Count a call, and be killed before it or after it."""
        number, self.calls = self.calls, self.calls + 1
        if self._kill == (number, False):
            raise Killed
        answer = await function(*args, **kwargs)
        if self._kill == (number, True):
            raise Killed
        return answer


class _Part:
    def __init__(self, backend: Counting, inner: Any) -> None:
        self._backend = backend
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._inner, name)
        if name == "close":
            return function
        return lambda *args, **kwargs: self._backend.call(function, *args, **kwargs)


def steps(*names: str, payload: object = None) -> list[WorkflowStep]:
    """Return steps that wait for one another, in a queue of their own, and one that waits for all."""
    found = [
        WorkflowStep.of(name, f"q.{name}", payload, after=(before,) if before else ())
        for before, name in zip(("", *names), names, strict=False)
    ]
    return [*found, WorkflowStep.of("end", "q.end", after=names, when="ended")]


async def run(backend: MemoryBackend) -> list[str]:
    """Expand what is left, and run all steps; return their ids in order."""
    ran: list[str] = []
    while True:
        await Expander(backend).drain()
        keys = [key for key in await backend.control.queues() if key != WORKFLOWS]
        if not keys:
            return ran
        async with backend.subscribe(keys, "w") as subscription:
            received = await subscription.receive(1, 0)
            if not received.deliveries:
                return ran
            ran += [each.task.id for each in received.deliveries]
            await subscription.ack(*received.deliveries)


@pytest.fixture
async def backend() -> AsyncIterator[MemoryBackend]:
    """Yield an empty backend."""
    made = MemoryBackend()
    yield made
    await made.aclose()


@pytest.mark.parametrize("size", [1, 100_000])
@pytest.mark.parametrize("after_call", [False, True])
async def test_killed_between_two_calls(
    backend: MemoryBackend, size: int, *, after_call: bool
) -> None:
    """U16, fault A1: wherever an expander is killed, every step runs once, in order, and none before all are stored."""
    number, killed = 0, True
    while killed:
        made, killed = MemoryBackend(), False
        await Queue(made).workflows.put(steps("a", "b", "c", payload="x" * size), id="w")
        expander = Expander(Counting(made, (number, after_call)))  # type: ignore[arg-type] # it has what is used
        try:
            await expander.drain()
        except Killed:
            killed = True
        assert await run(made) == ["w.a", "w.b", "w.c", "w.end"]
        status = await Queue(made).workflows.get("w")
        assert status is not None
        assert status.state is WorkflowState.ENDED
        await made.aclose()
        number += 1
    assert number >= 8
    assert await backend.control.queues() == ()


OTHER = TaskRef("other", "o")


def waiting_for_another() -> list[WorkflowStep]:
    """Return steps that wait for the end, or the failure, of a task that is no step, some of them also for a step."""
    return [
        WorkflowStep.of("first", "q.first"),
        *(
            WorkflowStep.of(f"{when}-{number}", f"q.{when}", after=parents, when=when)
            for when in ("ended", "failed")
            for number, parents in enumerate(((OTHER,), (OTHER, "first")))
        ),
    ]


@pytest.mark.parametrize("reject", [True, False])
async def test_others_that_end_before_the_steps_are_stored(*, reject: bool) -> None:
    """U16, fault A1: a step whose parents have ended otherwise runs only once all are stored, wherever that stops."""
    number, killed = 0, True
    while killed:
        made, killed = MemoryBackend(), False
        await made.publisher.publish(Task(key=OTHER.key, id=OTHER.task_id))
        await Queue(made).workflows.put(waiting_for_another(), id="w")
        async with made.subscribe([OTHER.key], "w") as subscription:
            (other,) = (await subscription.receive(1, 0)).deliveries
            await (subscription.dead_letter(other, "x") if reject else subscription.ack(other))
        expander = Expander(Counting(made, (number, False)))  # type: ignore[arg-type] # it has what is used
        try:
            await expander.drain()
        except Killed:
            killed = True
            (main,) = await made.control.statuses(WORKFLOWS, "w")
            assert main is not None
            if main.state is not State.DONE:
                stored = [
                    await made.control.ledger(key)
                    for key in await made.control.queues()
                    if key.startswith("q.")
                ]
                assert not any(each.waiting for each in stored)
        ran = await run(made)
        assert sorted(ran) == sorted(
            f"w.{name}"
            for name in ("first", "ended-0", "ended-1", *(["failed-0", "failed-1"] * reject))
        )
        number += 1
        await made.aclose()
    assert number >= 5


async def test_cancelled_while_it_waits_for_another(backend: MemoryBackend) -> None:
    """U15: a workflow that is cancelled leaves nothing that waits for tasks which are no steps."""
    await backend.publisher.publish(Task(key=OTHER.key, id=OTHER.task_id))
    await Queue(backend).workflows.put(waiting_for_another(), id="w")
    await Expander(backend).drain()
    assert (await backend.control.ledger(WORKFLOWS)).blocked == 3
    await Queue(backend).workflows.cancel("w")
    await Expander(backend).drain()
    assert (await backend.control.ledger(WORKFLOWS)).blocked == 0


async def test_expanded_again_after_the_end(backend: MemoryBackend) -> None:
    """U16: a second delivery of a workflow whose steps have run changes nothing."""
    queue = Queue(backend)
    await queue.workflows.put(steps("a"), id="w")
    async with backend.subscribe([WORKFLOWS], "slow") as slow:
        (held,) = (await slow.receive(1, 0)).deliveries
        stored = read_stored(held.task.payload)
        await slow.redeliver(held)
        assert await run(backend) == ["w.a", "w.end"]
        expander = Expander(backend)
        await expander._publish(held, stored, stored.steps, taken=0.0)
        assert await run(backend) == []


async def test_two_at_once(backend: MemoryBackend) -> None:
    """U16: a workflow that two expanders publish has each step once."""
    queue = Queue(backend)
    await queue.workflows.put(steps("a", "b"), id="w")
    async with backend.subscribe([WORKFLOWS], "first") as first:
        (held,) = (await first.receive(1, 0)).deliveries
        stored = read_stored(held.task.payload)
        for _ in range(2):
            await Expander(backend)._publish(held, stored, stored.steps, taken=1e9)
    assert await run(backend) == ["w.a", "w.b", "w.end"]


async def test_cancelled_before_it_is_expanded(backend: MemoryBackend) -> None:
    """U15: a workflow that is cancelled before its steps are published runs no step, and ends."""
    queue = Queue(backend)
    await queue.workflows.put(steps("a", "b"), id="w")
    assert await queue.workflows.cancel("w")
    await Expander(backend).drain()
    status = await queue.workflows.get("w")
    assert status is not None
    assert {step.state for step in status.steps} == {State.CANCELLED}
    assert await run(backend) == []


@pytest.mark.parametrize("payload", [b"null", b"[]", b'{"v":2}', b'{"workflow":"w"}', b'"x"'])
async def test_damaged_payloads(backend: MemoryBackend, payload: bytes) -> None:
    """U16: what is no workflow becomes a dead letter, or ends; it does not stop the others, and lists show both."""
    await backend.publisher.publish(Task(key=WORKFLOWS, id="w", payload=payload))
    await Queue(backend).workflows.put(steps("a"), id="w2")
    assert await run(backend) == ["w2.a", "w2.end"]
    ledger = await backend.control.ledger(WORKFLOWS)
    assert (ledger.waiting, ledger.in_flight, ledger.scheduled) == (0, 0, 0)
    listed = {each.id: each for each in (await Queue(backend).workflows.list()).workflows}
    assert (listed["w2"].state, listed["w2"].problem) == (WorkflowState.ENDED, None)
    assert listed["w"].problem is not None


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"a": ("b",), "b": ("a",)}, "steps.a.after"),
        ({"a": ("a",)}, "steps.a.after"),
        ({"a": ("missing",)}, "steps.a.after"),
        ({"a": (), "b": ("a", "a")}, "steps.b.after"),
    ],
    ids=["cycle", "itself", "unknown", "twice"],
)
async def test_wrong_graphs(
    backend: MemoryBackend, changes: dict[str, tuple[str, ...]], field: str
) -> None:
    """U15: a cycle, an unknown parent and a parent that is named twice are refused before anything is stored."""
    wrong = [WorkflowStep.of(name, "q", after=after) for name, after in changes.items()]
    with pytest.raises(InvalidWorkflow) as caught:
        await Queue(backend).workflows.put(wrong)
    assert caught.value.field == field
    assert await backend.control.queues() == ()


@pytest.mark.parametrize("size", [1, 1000])
async def test_the_cost_of_a_status(backend: MemoryBackend, size: int) -> None:
    """U15: the status of 1,000 steps takes five calls, whatever the size of their payloads.

    They are for the workflow and its steps, the steps in each of two queues, and the steps that these have added.
    """
    names = tuple(f"s{n}" for n in range(LIMITS.steps - 1))
    many = [WorkflowStep.of(name, f"q.{n % 2}", "x" * size) for n, name in enumerate(names)]
    last = WorkflowStep.of("end", "q.0", after=names, when="ended")
    await Queue(backend).workflows.put([*many, last], id="w")
    await Expander(backend).drain()
    counting = Counting(backend)
    found = await Queue(counting).workflows.get("w")  # type: ignore[arg-type] # it has what is used
    assert found is not None
    assert len(found.steps) == LIMITS.steps
    assert counting.calls == 5


async def test_a_list_of_large_workflows(
    backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """U15: a page of workflows ends once many steps were read for it; the pages together have each workflow once."""
    monkeypatch.setattr("taskqueue_core.workflow_list._STEPS", 20)
    workflows = Queue(backend).workflows
    for number in range(12):
        await workflows.put(steps("a", "b", "c"), id=f"w{number}")
    await Expander(backend).drain()
    found, after = list[list[str]](), None
    while not found or after is not None:
        listed = await workflows.list(after=after)
        found.append([each.id for each in listed.workflows])
        after = listed.next
    assert [len(page) for page in found] == [5, 5, 2]
    names = [name for page in found for name in page]
    assert sorted(names) == sorted(f"w{number}" for number in range(12))


def test_wrong_inputs() -> None:
    """U15: the inputs of a step are positions of its parents."""
    for step, field in (
        (WorkflowStep.of("b", "q", after=("a",), inputs=(1,)), "steps.b.inputs"),
        (WorkflowStep.of("b", "q", inputs=(0,)), "steps.b.inputs"),
        (WorkflowStep.of("b", "q", when="failed"), "steps.b.when"),
    ):
        with pytest.raises(InvalidWorkflow) as caught:
            checked_steps([WorkflowStep.of("a", "q"), step])
        assert caught.value.field == field
    with pytest.raises(InvalidInput, match="name: got"):
        WorkflowStep.of("a.b", "q")


def test_levels() -> None:
    """U15: a step is one level below the deepest of its parents."""
    found = levels(checked_steps(steps("a", "b")))
    assert [[step.name for step in level] for level in found] == [["a"], ["b"], ["end"]]


def test_results_in_payloads() -> None:
    """U15: references in a payload become results; text that looks like one stays."""
    payload = b'{"a":{"$input":1},"b":[{ "$input" : 0 }],"c":"{\\"$input\\":0}"}'
    assert with_inputs(payload, [b"7", None]) == b'{"a":null,"b":[7],"c":"{\\"$input\\":0}"}'
    with pytest.raises(InvalidInput, match="a reference to input 1"):
        with_inputs(payload, [b"7"])


def test_rights_of_the_internal_queue() -> None:
    """U15: no token permits to publish to the internal queue, or to consume from it."""
    everything = Identity(name="x", keys=("*", WORKFLOWS, "_taskqueue.*"))
    assert not everything.is_allowed("publish", WORKFLOWS)
    assert not everything.is_allowed("consume", WORKFLOWS)
    assert everything.is_allowed("admin", WORKFLOWS)
    assert is_internal(WORKFLOWS)


async def test_an_outage(backend: MemoryBackend) -> None:
    """U16: if the store is unavailable, the workflow stays stored, and is expanded later."""
    await Queue(backend).workflows.put(steps("a"), id="w")

    class Down(Counting):
        async def call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
            if function.__name__ == "publish":
                raise BackendUnavailable("down")
            return await function(*args, **kwargs)

    with pytest.raises(BackendUnavailable):
        await Expander(Down(backend)).drain()  # type: ignore[arg-type] # it has what is used
    assert await run(backend) == ["w.a", "w.end"]


async def test_a_queue_that_is_full_when_steps_are_published(backend: MemoryBackend) -> None:
    """U16: the queue of a step is full; the steps that wait for it are stored after it, and are not cancelled."""
    await backend.publisher.publish(Task(key="q.b", id="before"))
    await backend.control.configure("q.b", QueueSettings(capacity=1))
    await Queue(backend).workflows.put(steps("a", "b", "c"), id="w")
    assert await run(backend) == ["before"]
    await carry(backend.dependencies)
    await backend.control.reschedule(WORKFLOWS, "w", 0.0)
    assert await run(backend) == ["w.a", "w.b", "w.c", "w.end"]
