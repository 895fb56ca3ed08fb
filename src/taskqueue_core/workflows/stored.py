"""The stored form of a workflow: tasks of an internal queue, whose payloads servers and local workers read.

The steps of a workflow are one task, whose id is that of the workflow. If they are longer than a payload may be, their
JSON text is cut into parts. Each part is a task of its own, whose result is its payload, and the task of the workflow
waits for all of them.

The steps that a step of the workflow adds are one more task, which waits for that step. Its id follows from the name of
the step, so there is at most one for each step.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec.structs import replace

from taskqueue_core.after import After, TaskRef
from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import LIMITS
from taskqueue_core.tasks import Task, encoded_task
from taskqueue_core.uniqueness import sha256
from taskqueue_core.workflows.steps import InvalidWorkflow, WorkflowStep, workflow_of

__all__ = [
    "RELAY",
    "WORKFLOWS",
    "Stored",
    "addition_id",
    "cancel_id",
    "cancel_task",
    "graph_of",
    "is_part",
    "is_workflow",
    "manifest_tasks",
    "part_ids",
    "read_stored",
    "relay_id",
    "steps_in",
]

WORKFLOWS = "_taskqueue.workflows"
"""name of the internal queue"""
_PART = 3 * 64_000
"""number of bytes of the text in a part; in base64 and with quotation marks, they fit into a payload"""
_DIGITS = 40
"""number of hexadecimal digits in the id of an addition, which the whole id of the step would make too long"""
_NOTHING = msgspec.Raw(b"null")
RELAY = b'""'
"""payload of a relay"""


class Stored(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The payload of a task of the internal queue, and the result of a task that holds steps."""

    v: Literal[1] = 1
    """version of the form; another one is refused, because it may mean what this program does not know"""
    workflow: str
    """id of the workflow"""
    by: TaskRef | None = None
    """the step that added the steps; ``None`` for those with which the workflow was published"""
    steps: tuple[WorkflowStep, ...] = ()
    """the steps, each after its parents; in a result, without their payloads"""
    parts: int = 0
    """number of the parts that have the steps"""
    cancel: bool = False
    """whether this is the order to cancel the workflow"""


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Stored)


def manifest_tasks(
    workflow: str, steps: Sequence[WorkflowStep], by: TaskRef | None = None
) -> list[Task]:
    """Return the tasks that store checked steps: the parts, if there are any, and then the one that holds the steps.

    ``by``: the step that adds them. Raises `InvalidWorkflow` if the steps are too large.
    """
    stored = Stored(workflow=workflow, by=by, steps=tuple(steps))
    task_id = workflow if by is None else addition_id(by)
    waits_for = () if by is None else (by,)
    text, digest = _encoder.encode(stored), _digest_of(steps)
    if len(text) <= LIMITS.payload:
        after = After(tasks=waits_for) if waits_for else None
        return [encoded_task(WORKFLOWS, text, id=task_id, content_digest=digest, after=after)]
    if len(text) > LIMITS.workflow:
        allowed = f"at most {LIMITS.workflow} bytes of JSON for all steps (limit workflow)"
        raise InvalidWorkflow("steps", f"{len(text)} bytes", allowed)
    pieces = [text[start : start + _PART] for start in range(0, len(text), _PART)]
    parts = [
        Task(
            key=WORKFLOWS,
            id=part_id,
            payload=b'"' + base64.b64encode(piece) + b'"',
            content_digest=digest,
        )
        for part_id, piece in zip(part_ids(task_id, len(pieces)), pieces, strict=True)
    ]
    after = After(tasks=(*waits_for, *[TaskRef(WORKFLOWS, part.id) for part in parts]))
    short = _encoder.encode(replace(stored, steps=(), parts=len(parts)))
    main = Task(key=WORKFLOWS, id=task_id, payload=short, after=after, content_digest=digest)
    return [*parts, main]


def _digest_of(steps: Sequence[WorkflowStep]) -> bytes | None:
    """Return the digest of steps whose payloads may differ if they are encoded again; ``None`` if there is none."""
    if all(step.content_digest is None for step in steps):
        return None
    plain = [
        step if step.content_digest is None else replace(step, payload=_NOTHING) for step in steps
    ]
    return sha256(_encoder.encode(plain))


def part_ids(task_id: str, number: int) -> list[str]:
    """Return the ids of the parts of a task that holds steps."""
    return [f"<part-{place}>{task_id}" for place in range(number)]


def addition_id(by: TaskRef) -> str:
    """Return the id of the task with the steps that a step adds."""
    workflow = workflow_of(by)
    return f"<add-{sha256(by.task_id.encode()).hex()[:_DIGITS]}>{workflow}"


def cancel_id(workflow: str) -> str:
    """Return the id of the order to cancel a workflow."""
    return f"<cancel>{workflow}"


def cancel_task(workflow: str) -> Task:
    """Return the order to cancel a workflow. It waits until the steps are published, or cannot be."""
    after = After(tasks=(TaskRef(WORKFLOWS, workflow),), when="ended")
    text = _encoder.encode(Stored(workflow=workflow, cancel=True))
    return Task(key=WORKFLOWS, id=cancel_id(workflow), payload=text, after=after)


def relay_id(workflow: str, step: str) -> str:
    """Return the id of the task that waits for the parents of a step; see `tasks_of`."""
    return f"<relay-{sha256(step.encode()).hex()[:_DIGITS]}>{workflow}"


def is_workflow(task_id: str) -> bool:
    """Return whether a task of the internal queue is that of a workflow, and not one that belongs to it."""
    return not task_id.startswith("<")


def is_part(payload: bytes) -> bool:
    """Return whether a payload is a part, or that of a relay: nothing is to be done for the task."""
    return payload[:1] == b'"'


def read_stored(text: bytes) -> Stored:
    """Read a payload, or the result of the task of a workflow. Raises `InvalidInput`."""
    try:
        return _decoder.decode(text)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, InvalidInput):
            raise error.__cause__ from None
        raise InvalidInput("workflow", str(error), "a workflow that this version reads") from None
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise InvalidInput("workflow", "text that is no JSON", "JSON text") from None


def steps_in(parts: Sequence[bytes]) -> tuple[WorkflowStep, ...]:
    """Read the steps in parts. Raises `InvalidInput`."""
    try:
        text = b"".join(base64.b64decode(part[1:-1], validate=True) for part in parts)
    except ValueError:
        raise InvalidInput("workflow", "a part that is no base64", "base64") from None
    return read_stored(text).steps


def graph_of(stored: Stored, steps: Sequence[WorkflowStep]) -> bytes:
    """Return the result of a task that holds steps: these without what only their publish needs.

    It has no parts, so that what asks for the state of a workflow again and again reads no payloads; but steps with
    very many parents may be too large for a result, and stay in the parts.
    """
    short = tuple(
        replace(step, payload=_NOTHING, headers={}, tags=(), inputs=(), content_digest=None)
        for step in steps
    )
    text = _encoder.encode(replace(stored, steps=short, parts=0))
    return text if len(text) <= LIMITS.result else _encoder.encode(stored)
