"""The steps of a workflow, as data, and the checks of a whole workflow."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import force_setattr as set_field
from msgspec.structs import replace

from taskqueue_core.after import ON_DEAD, WHEN, After, OnDead, TaskRef, When
from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import LIMITS, check_choice, check_headers, check_name, kind_of
from taskqueue_core.tasks import DEFAULT_PRIORITY, Task

__all__ = [
    "STEP_HEADER",
    "WORKFLOW_HEADER",
    "InvalidWorkflow",
    "UnknownWorkflow",
    "WorkflowStep",
    "added_name",
    "added_steps",
    "check_own_name",
    "check_step_name",
    "check_workflow_id",
    "checked_steps",
    "sorted_steps",
    "step_id",
    "workflow_of",
]

WORKFLOW_HEADER = "taskqueue-workflow"
"""header with the id of the workflow that a task is a step of"""
STEP_HEADER = "taskqueue-step"
"""header with the name of the step"""
_ADDED = ":"
"""character between the name of a step and the names of those that it adds"""
_NAMED = 5
"""maximum number of steps that an error names"""


class InvalidWorkflow(InvalidInput):
    """A workflow cannot be published. ``field`` names the step and what is wrong with it, as ``steps.resize.after``.

    >>> flow = Workflow()
    >>> try:
    ...     await flow.publish()
    ... except InvalidWorkflow as error:
    ...     print(error)
    steps: got no step; allowed: 1 to 1000 steps
    """

    code = "invalid_workflow"


class UnknownWorkflow(InvalidWorkflow):
    """There is no workflow with this id, or it was forgotten."""

    code = "unknown_workflow"


class WorkflowStep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One step of a workflow, as data. The constructor checks all fields. Raises `InvalidInput`.

    >>> first = WorkflowStep.of("first", "shop.resize", {"image": "cat.png"})
    >>> second = WorkflowStep.of("second", "mail", {"size": {"$input": 0}}, after=("first",), inputs=(0,))
    """

    name: str
    """name of the step, unique in its workflow, without dots; the id of its task is the workflow's, a dot and it

    A colon is only in the names of steps that other steps have added: ``split:resize`` was added by ``split``.
    """
    key: str
    """name of the queue"""
    payload: msgspec.Raw = msgspec.Raw(b"null")
    """the payload as JSON text; ``{"$input": 0}`` in it is a reference to the result of the first of ``inputs``"""
    headers: dict[str, str] = {}
    priority: int = DEFAULT_PRIORITY
    tenant: str | None = None
    ordering_key: str | None = None
    deadline: float | None = None
    not_before: float | None = None
    max_attempts: int | None = None
    tags: tuple[str, ...] = ()
    content_digest: bytes | None = None
    after: tuple[str | TaskRef, ...] = ()
    """the parents: names of steps of the same workflow, and other tasks"""
    when: When = "done"
    """as `After.when`"""
    on_dead: OnDead = "hold"
    """as `After.on_dead`"""
    inputs: tuple[int, ...] = ()
    """positions in ``after`` of the parents whose results the payload refers to"""

    def __post_init__(self) -> None:
        payload: object = self.payload
        if isinstance(payload, bytes):
            set_field(self, "payload", msgspec.Raw(payload))
        elif not isinstance(payload, msgspec.Raw):
            raise InvalidInput("payload", kind_of(payload), "JSON text, as bytes")
        check_step_name(self.name)
        after: object = self.after
        if not isinstance(after, tuple) or not all(isinstance(p, str | TaskRef) for p in after):
            raise InvalidInput("after", kind_of(after), "a tuple of names of steps, and of TaskRef")
        inputs: object = self.inputs
        if not isinstance(inputs, tuple):
            raise InvalidInput("inputs", kind_of(inputs), "a tuple of positions in after")
        check_choice("when", self.when, WHEN)
        check_choice("on_dead", self.on_dead, ON_DEAD)
        check_headers("headers", self.headers)
        self.task("x" * LIMITS.workflow_id)  # checks all other fields

    @staticmethod
    def of(name: str, key: str, payload: object = None, **fields: object) -> WorkflowStep:
        """Return a step whose payload is ``payload`` encoded as JSON. Raises `InvalidInput`."""
        task = Task.of(key, payload)
        return WorkflowStep(name=name, key=key, payload=msgspec.Raw(task.payload), **fields)  # type: ignore[arg-type] # checked by the constructor

    @property
    def others(self) -> tuple[TaskRef, ...]:
        """The parents that are not steps of the workflow."""
        return tuple(parent for parent in self.after if isinstance(parent, TaskRef))

    @property
    def needs_relay(self) -> bool:
        """Whether its parents may release the step before all steps are published."""
        others = len(self.others)
        return bool(others) and (
            self.when == "failed" or (self.when == "ended" and others == len(self.after))
        )

    def task(self, workflow: str, after: After | None = None) -> Task:
        """Return the task of the step in a workflow. Raises `InvalidInput`."""
        return Task(
            key=self.key,
            id=step_id(workflow, self.name),
            payload=bytes(self.payload),
            headers={**self.headers, WORKFLOW_HEADER: workflow, STEP_HEADER: self.name},
            priority=self.priority,
            tenant=self.tenant,
            ordering_key=self.ordering_key,
            deadline=self.deadline,
            not_before=self.not_before,
            max_attempts=self.max_attempts,
            tags=self.tags,
            content_digest=self.content_digest,
            after=after,
        )


def step_id(workflow: str, name: str) -> str:
    """Return the id of the task of a step."""
    return f"{workflow}.{name}"


def check_workflow_id(value: object) -> None:
    """Check the id of a workflow: a name of at most `Limits.workflow_id` characters that does not begin with ``<``."""
    check_name("id", value)
    if isinstance(value, str) and (len(value) > LIMITS.workflow_id or value.startswith("<")):
        allowed = f"1 to {LIMITS.workflow_id} characters, the first of them not <"
        raise InvalidInput("id", kind_of(value), allowed)


def check_step_name(value: object) -> None:
    """Check the name of a step: a name of at most `Limits.step_name` characters without dots."""
    check_name("name", value)
    if isinstance(value, str) and (len(value) > LIMITS.step_name or "." in value):
        got = f"{kind_of(value)} with a dot" if "." in value else kind_of(value)
        raise InvalidInput("name", got, f"1 to {LIMITS.step_name} characters without dots")


def check_own_name(value: str) -> None:
    """Check the name that the author of a workflow gives to a step. Raises `InvalidInput`."""
    check_step_name(value)
    if _ADDED in value:
        allowed = "a name without colons, which only the names of added steps have"
        raise InvalidWorkflow(f"steps.{value}.name", "a name with a colon", allowed)


def workflow_of(by: TaskRef) -> str:
    """Return the id of the workflow that a task is a step of, by the task's id. Raises `InvalidWorkflow`."""
    if not isinstance(by, TaskRef):
        raise InvalidWorkflow("by", kind_of(by), "the TaskRef of a step")
    workflow, dot, name = by.task_id.rpartition(".")
    if not (workflow and dot and name):
        raise InvalidWorkflow("by", "a task that is no step of a workflow", "a step of a workflow")
    return workflow


def added_name(by: str, name: str) -> str:
    """Return the whole name of a step that the step ``by`` adds. Raises `InvalidWorkflow` if it is too long."""
    whole = f"{by}{_ADDED}{name}"
    if len(whole) > LIMITS.step_name:
        got = f"{len(whole)} characters together with the names of the steps that added it"
        allowed = f"at most {LIMITS.step_name}: give shorter names"
        raise InvalidWorkflow(f"steps.{name}.name", got, allowed)
    return whole


def added_steps(by: TaskRef, steps: Sequence[WorkflowStep]) -> tuple[WorkflowStep, ...]:
    """Return steps that the step ``by`` adds with their whole names, each after its parents. Raises `InvalidWorkflow`.

    So no other step can have their names.
    """
    adding = by.task_id.removeprefix(f"{workflow_of(by)}.")

    def whole(parent: str | TaskRef) -> str | TaskRef:
        return added_name(adding, parent) if isinstance(parent, str) else parent

    return tuple(
        replace(
            step,
            name=added_name(adding, step.name),
            after=tuple([whole(each) for each in step.after]),
        )
        for step in checked_steps(steps)
    )


def checked_steps(steps: Sequence[WorkflowStep]) -> tuple[WorkflowStep, ...]:
    """Return the steps of a workflow in an order in which each comes after its parents. Raises `InvalidWorkflow`."""
    if not 1 <= len(steps) <= LIMITS.steps:
        got = f"{len(steps)} steps" if steps else "no step"
        raise InvalidWorkflow("steps", got, f"1 to {LIMITS.steps} steps")
    by_name: dict[str, WorkflowStep] = {}
    for step in steps:
        check_own_name(step.name)
        if step.name in by_name:
            raise InvalidWorkflow(
                f"steps.{step.name}.name", "the name of two steps", "another name"
            )
        by_name[step.name] = step
    for step in steps:
        _check_parents(step, by_name)
    return sorted_steps(by_name)


def _check_parents(step: WorkflowStep, by_name: dict[str, WorkflowStep]) -> None:
    field = f"steps.{step.name}"
    for parent in step.after:
        if isinstance(parent, str) and parent not in by_name:
            raise InvalidWorkflow(
                f"{field}.after", "the name of a step that does not exist", "names of steps"
            )
    if step.needs_relay and step.inputs:
        got = f"results for a step that waits for other tasks with {step.when!r}"
        raise InvalidWorkflow(
            f"{field}.inputs", got, "none, or only steps of the workflow in after"
        )
    if not step.after:
        if step.inputs:
            raise InvalidWorkflow(f"{field}.inputs", "inputs without parents", "none")
        if step.when != "done":
            raise InvalidWorkflow(f"{field}.when", f"{step.when!r} without parents", "'done'")
        return
    if len(step.after) >= LIMITS.parents and step.others:
        allowed = f"at most {LIMITS.parents - 1} if one of them is not a step"
        raise InvalidWorkflow(f"{field}.after", f"{len(step.after)} parents", allowed)
    try:  # the queues are not important here
        refs = tuple([TaskRef("x", p) if isinstance(p, str) else p for p in step.after])
        After(tasks=refs, when=step.when, on_dead=step.on_dead, inputs=step.inputs)
    except InvalidInput as error:
        part = error.field.removeprefix("after.")
        path = field + ".after" * (part == "tasks") + f".{part}" * (part != "tasks")
        raise InvalidWorkflow(path, error.got, error.allowed) from None


def sorted_steps(by_name: dict[str, WorkflowStep]) -> tuple[WorkflowStep, ...]:
    """Return steps so that each comes after its parents. Raises `InvalidWorkflow` for a cycle."""
    missing = {
        name: {parent for parent in step.after if isinstance(parent, str)}
        for name, step in by_name.items()
    }
    children: dict[str, list[str]] = {}
    for name, parents in missing.items():
        for parent in parents:
            children.setdefault(parent, []).append(name)
    order = [name for name, parents in missing.items() if not parents]
    for name in order:
        for child in children.get(name, ()):
            missing[child].discard(name)
            if not missing[child]:
                order.append(child)
    if len(order) < len(by_name):
        circle = _cycle({name: parents for name, parents in missing.items() if parents})
        more = f", ... ({len(circle)} in all)" if len(circle) > _NAMED else ""
        raise InvalidWorkflow(
            f"steps.{circle[0]}.after",
            f"a cycle of steps: {', '.join(circle[:_NAMED])}{more}",
            "steps that do not wait for themselves",
        )
    return tuple(by_name[name] for name in order)


def _cycle(missing: dict[str, set[str]]) -> list[str]:
    """Return the names of the steps of a cycle."""
    name = next(iter(missing))
    path: dict[str, None] = {}
    while name not in path:
        path[name] = None
        name = min(missing[name] & missing.keys())
    names = list(path)
    return names[names.index(name) :]
