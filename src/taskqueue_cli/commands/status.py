"""``taskqueue status`` and ``taskqueue result``: show one task."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from msgspec import Raw

from taskqueue_cli.backends import ServerUrl, with_backend
from taskqueue_cli.output import AsJson, argument, print_fields, print_json
from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import control_of
from taskqueue_core.errors import TaskQueueError
from taskqueue_core.tasks import TaskStatus

Key = Annotated[str, argument("Key of the task, which is the name of its queue.", metavar="KEY")]
Id = Annotated[str, argument("Id of the task.", metavar="ID")]


class NoTask(TaskQueueError):
    """The task, or the dead letter, was not found."""

    code = "not_found"


class NoResult(TaskQueueError):
    """The task has no result: it is unknown, has not succeeded or returned nothing, or its result has expired."""

    code = "no_result"


def status(key: Key, task_id: Id, *, server: ServerUrl = None, as_json: AsJson = False) -> None:
    """Show the status of one task."""
    task_status, _ = with_backend(server, lambda backend: _read(backend, key, task_id))
    if task_status is None:
        raise NoTask(
            f"task {task_id!r} not found in queue {key!r}: its id is unknown, or its record has expired"
        )
    if as_json:
        print_json(task_status)
        return
    fields = {
        "state": task_status.state.value.replace("_", " "),
        "attempt": str(task_status.attempt),
        "losses": str(task_status.losses),
        "since": format_time(task_status.updated_at),
        "progress": "" if task_status.progress is None else str(task_status.progress),
        "error": task_status.error or "",
    }
    print_fields(fields)


def result(key: Key, task_id: Id, *, server: ServerUrl = None, as_json: AsJson = False) -> None:
    """Print the result of one task, as JSON."""
    task_status, text = with_backend(server, lambda backend: _read(backend, key, task_id))
    if text is None:
        why = f"state: {task_status.state.value}" if task_status else "the task was not found"
        raise NoResult(f"task {task_id!r} in queue {key!r} has no stored result ({why})")
    print_json({"key": key, "task_id": task_id, "result": Raw(text)} if as_json else Raw(text))


async def _read(backend: Backend, key: str, task_id: str) -> tuple[TaskStatus | None, bytes | None]:
    control = control_of(backend)
    (text,) = await control.results(key, task_id)
    (task_status,) = await control.statuses(key, task_id)
    return task_status, text


def format_time(at: float) -> str:
    """Format a time, given in Unix seconds, in the local time zone."""
    return datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M:%S")
