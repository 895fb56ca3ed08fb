"""Declared tasks for the steps of workflows: those with the will ``add`` add steps. Child processes import this module.

Whoever stores the steps of a handler, the worker or a child process, records them as published, and comes to the points
``before add`` and ``after add``; a child process comes to ``in handler``, too.
"""

from __future__ import annotations

import multiprocessing
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, cast

from taskqueue_core import Context, Reject, Retry, Tasks
from taskqueue_core.after import TaskRef
from taskqueue_core.queue_workflows import QueueWorkflows
from taskqueue_core.tasks import Confirmation
from taskqueue_core.workflows import WorkflowStep, added_steps, step_id, workflow_of
from tests.chaos.history import Log, What
from tests.chaos.points import Points

FOLDER = "CHAOS_FOLDER"
"""variable with the folder of the run"""
NAME = "CHAOS_NAME"
"""variable with the name of the worker"""
_KEYS = ("alpha", "beta", "gamma")
_RETRY_SECONDS = 0.1


def folder() -> Path:
    """Return the folder of the run."""
    return Path(os.environ[FOLDER])


def first(name: str) -> bool:
    """Return whether no process has left a mark of this name before, and leave it."""
    try:
        (folder() / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _declare(run: Literal["auto", "process"]) -> Tasks:
    tasks = Tasks()

    async def handle(context: Context, will: str, padding: str) -> str:
        """Execute a step and end it as it asks: success, after it has added two steps, retry or reject."""
        del padding
        if _child is not None:
            points, log = _child
            await points.come("in handler", log)
        if will == "add":
            place = zlib.crc32(context.task_id.encode())
            some, last = (tasks.functions[_KEYS[(place + n) % len(_KEYS)]] for n in range(2))
            small = context.workflow.add(some.call(will="ack", padding="x"), name="a")
            context.workflow.add(last.call(will="ack", padding="x"), after=small, name="b")
        if will == "retry" and context.attempt == 1:
            raise Retry(_RETRY_SECONDS)
        if will == "bury once" and first(f"buried-{context.task_id}"):
            raise Reject("on purpose")
        return context.task_id

    for key in _KEYS:
        tasks.task(key, run=run)(handle)
    return tasks


_child: tuple[Points, Log] | None = None
"""the points and the log of this process, if it is a child process of a worker"""
threaded, isolated = _declare("auto"), _declare("process")


def record(name: str) -> tuple[Points, Log]:
    """Record the steps that this process adds, with ``name`` as that of the process; return its points and its log."""
    log = Log(folder() / f"{name}.jsonl", name)
    points, add = Points(folder()), QueueWorkflows.add

    async def added(
        self: QueueWorkflows, steps: Sequence[WorkflowStep], *, by: TaskRef
    ) -> Confirmation:
        await points.come("before add", log)
        call, workflow, outcome = log.next_call(), workflow_of(by), "unconfirmed"
        whole = added_steps(by, steps)
        keys = {step.name: step.key for step in whole}
        told = [
            {"call": call, "key": step.key, "task": step_id(workflow, step.name)} for step in whole
        ]
        for step, fields in zip(whole, told, strict=True):
            parents = [f"{keys[str(one)]}/{step_id(workflow, str(one))}" for one in step.after]
            log.note(
                What.PUBLISH,
                payload=f"{zlib.crc32(step.payload):08x}",
                origin="step",
                after=tuple(parents or [f"{by.key}/{by.task_id}"]),
                when=step.when,
                **fields,
            )
        try:
            confirmation = await add(self, steps, by=by)
            outcome = confirmation.status.value
        finally:
            for fields in told:
                log.note(What.PUBLISHED, outcome=outcome, **fields)
        await points.come("after add", log)
        return confirmation

    cast("Any", QueueWorkflows).add = added
    return points, log


if NAME in os.environ and multiprocessing.parent_process() is None:  # a child process of a worker
    _child = record(f"{os.environ[NAME]}.{os.getpid()}")
