"""``taskqueue status``, ``result``, ``reschedule`` and ``cancel``: one task. ``taskqueue purge``: those of a queue."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any

import msgspec
import typer
from msgspec import Raw
from rich.markup import escape

from taskqueue_cli.backends import ServerUrl, record_action, with_backend
from taskqueue_cli.commands.stats import check_known, missing_queue
from taskqueue_cli.output import AsJson, argument, console, note, option, print_fields, print_json
from taskqueue_core.after import TaskRef
from taskqueue_core.application.encoding import (
    Encoding,
    decoded_result,
    readable_error,
    shown_in_place,
)
from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import TaskDetail, control_of, listing_of
from taskqueue_core.errors import ConfigurationError, InvalidInput, TaskQueueError
from taskqueue_core.protocol.frames import to_wire_task
from taskqueue_core.retry import RetryPolicy
from taskqueue_core.tasks import Failure, State, TaskStatus
from taskqueue_worker import load_worker

Key = Annotated[str, argument("Key of the task, which is the name of its queue.", metavar="KEY")]
Id = Annotated[str, argument("Id of the task.", metavar="ID")]
_POLLS = RetryPolicy(base=0.05, cap=1, jitter=0)


class NoTask(TaskQueueError):
    """The task, or the dead letter, was not found."""

    code = "not_found"


class NoResult(TaskQueueError):
    """The task has no result: it is unknown, has not succeeded or returned nothing, or its result has expired."""

    code = "no_result"


class NotCancelled(TaskQueueError):
    """The task cannot be cancelled, because it has already ended."""

    code = "not_cancelled"


class NotRescheduled(TaskQueueError):
    """The task cannot be rescheduled, because it runs, has ended, or its attempt was delivered before."""

    code = "not_rescheduled"


def status(
    key: Key,
    task_id: Id,
    *,
    detail: Annotated[
        bool,
        typer.Option("--detail", help="Show its fields, its times, its worker and its failures."),
    ] = False,
    server: ServerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Show the status of one task."""

    async def read(backend: Backend) -> TaskStatus | TaskDetail:
        found = (
            await listing_of(backend).task(key, task_id)
            if detail
            else (await _read(backend, key, task_id))[0]
        )
        if found is None:
            raise await _unknown(backend, key, task_id)
        return found

    found = with_backend(server, read)
    if isinstance(found, TaskStatus):
        if as_json:
            print_json(found)
        else:
            print_fields(_fields(found))
    elif as_json:
        print_json(_as_dict(found))
    else:
        print_fields(_detailed(found))


def _fields(task_status: TaskStatus) -> dict[str, str]:
    fields = {
        "state": task_status.state.value.replace("_", " "),
        "attempt": str(task_status.attempt),
        "losses": str(task_status.losses),
        "since": format_time(task_status.updated_at),
        "due": "" if task_status.due_at is None else format_time(task_status.due_at),
        "held by": _names(task_status.held_by, len(task_status.held_by)),
        "waits for": _names(task_status.waits_for, task_status.waits_for_total),
        "progress": "" if task_status.progress is None else str(task_status.progress),
        "reason" if task_status.state is State.DEAD else "error": readable_error(
            None, task_status.error or ""
        ),
    }
    if (last := task_status.last_failure) is not None:
        error = readable_error(None, last.error)
        fields["last failure"] = f"{format_time(last.at)}  attempt {last.attempt}: {error}"
    return fields


def _detailed(detail: TaskDetail) -> dict[str, str]:
    """Return what the store knows of a task, for people."""
    task, fields = detail.task, _fields(detail.status)
    fields.pop("last failure", None)
    fields |= {
        "priority": str(task.priority),
        "tenant": task.tenant or "",
        "ordering key": task.ordering_key or "",
        "tags": " ".join(task.tags),
        "published": _time(detail.published_at),
        "delivered": _time(detail.delivered_at),
        "worker": detail.worker_id or "",
        "not before": _time(task.not_before),
        "deadline": _time(task.deadline),
        "history": "\n".join(map(describe_failure, detail.history)),
    }
    if detail.history and (traceback := detail.history[-1].traceback):
        fields["traceback"] = traceback.rstrip()
    if _has_contents(detail):
        fields["payload"] = shown_in_place(task.payload, task.headers) or (
            msgspec.json.format(task.payload, indent=2).decode()
        )
    return fields


def _as_dict(detail: TaskDetail) -> dict[str, Any]:
    """Return the same object as the HTTP API."""
    fields = msgspec.structs.asdict(detail) | {"task": to_wire_task(detail.task)}
    return msgspec.structs.asdict(fields.pop("status")) | {"detail": fields}


def _has_contents(detail: TaskDetail) -> bool:
    return detail.status.state.live or detail.status.state is State.DEAD


def _time(at: float | None) -> str:
    return "" if at is None else format_time(at)


def describe_failure(failure: Failure) -> str:
    """Return a failed attempt on one line, with its time, its worker and its error."""
    where = f" on {failure.worker}" if failure.worker else ""
    error = readable_error(None, failure.error)
    return f"{format_time(failure.at)}  attempt {failure.attempt}{where}: {error}"


def _names(refs: Sequence[TaskRef], total: int) -> str:
    names = ", ".join(f"{ref.key}/{ref.task_id}" for ref in refs)
    return f"{names} and {total - len(refs):,} more" if total > len(refs) else names


def result(
    key: Key,
    task_id: Id,
    *,
    wait: Annotated[
        float,
        typer.Option(min=0, metavar="SECONDS", help="Maximum time to wait for the task to end."),
    ] = 0,
    codec: Annotated[
        str | None,
        option(
            "Registry of tasks, or worker, whose codec decodes the result, for example shop.tasks:tasks.",
            metavar="MODULE:ATTR",
        ),
    ] = None,
    server: ServerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Print the result of one task, as JSON. A task that is still running is an error, unless it ends within --wait."""

    async def read(backend: Backend) -> tuple[TaskStatus, bytes | None]:
        task_status, text = await _read(backend, key, task_id, wait)
        if task_status is None:
            raise await _unknown(backend, key, task_id, NoResult)
        return task_status, text

    encoding = None if codec is None else _encoding(codec, key)
    task_status, text = with_backend(server, read)
    if text is None:
        why = f"state: {task_status.state.value}"
        if task_status.state.live:
            why += f", still after {wait:g} s" if wait else "; wait for its end with --wait SECONDS"
        if task_status.error:
            why += f", error: {readable_error(encoding, task_status.error)}"
        raise NoResult(f"task {task_id!r} in queue {key!r} has no stored result ({why})")
    if codec is not None:
        text = decoded_result(encoding, text)
    elif (encoded := shown_in_place(text)) is not None:
        note(f"the result is {encoded}: decode it with --codec MODULE:ATTR")
    print_json({"key": key, "task_id": task_id, "result": Raw(text)} if as_json else Raw(text))


def _encoding(target: str, key: str) -> Encoding | None:
    """Return what encodes the results of a queue, by a registry or a worker. Raises `ConfigurationError`."""
    functions = [each for each in load_worker(target).functions if each.queue == key]
    if not functions:
        raise ConfigurationError(f"--codec: {target} has no task of the queue {key!r}")
    return next((each.encoding for each in functions if each.encoding is not None), None)


def reschedule(
    key: Key,
    task_id: Id,
    *,
    delay: Annotated[
        float,
        typer.Option(min=0, metavar="SECONDS", help="Seconds before the task may be delivered."),
    ],
    server: ServerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Let one blocked, waiting or scheduled task run at another time. Its attempt does not change."""

    async def act(backend: Backend) -> tuple[bool, float, TaskStatus]:
        await backend.health()  # a backend elsewhere learns the store's time with its first answer
        at = backend.now() + delay
        moved = await control_of(backend).reschedule(key, task_id, at)
        task_status, _ = await _read(backend, key, task_id)
        if task_status is None:
            raise await _unknown(backend, key, task_id)
        return moved, at, task_status

    moved, at, task_status = with_backend(server, act)
    if not moved:
        raise NotRescheduled(
            f"task {task_id!r} in queue {key!r} keeps its time (state: {task_status.state.value}): it runs, has ended, "
            "or its attempt was delivered before"
        )
    if as_json:
        print_json({"key": key, "task_id": task_id, "at": at})
    else:
        console.print(
            f"[green]✔[/] task [bold]{escape(task_id)}[/] in queue [bold]{escape(key)}[/] "
            f"is due at {format_time(at)}"
        )


def cancel(key: Key, task_id: Id, *, server: ServerUrl = None, as_json: AsJson = False) -> None:
    """Cancel one task. If it is running, its worker is informed, and its outcome is ignored."""

    async def act(backend: Backend) -> tuple[bool, TaskStatus | None]:
        cancelled = await control_of(backend).cancel(key, task_id)
        if cancelled:
            await record_action(backend, "cancel", key, tasks=1, details=f"id={task_id}")
        task_status, _ = await _read(backend, key, task_id)
        if task_status is None and not cancelled:
            raise await _unknown(backend, key, task_id)
        return cancelled, task_status

    cancelled, task_status = with_backend(server, act)
    state = State.CANCELLED if task_status is None else task_status.state
    if not cancelled and state is not State.CANCELLED:
        raise NotCancelled(
            f"task {task_id!r} in queue {key!r} has already ended (state: {state.value})"
        )
    if as_json:
        print_json({"key": key, "task_id": task_id, "cancelled": cancelled})
    else:
        mark = "[green]✔[/] cancelled" if cancelled else "was cancelled before"
        console.print(f"{mark}: task [bold]{escape(task_id)}[/] in queue [bold]{escape(key)}")


def purge(
    key: Key,
    *,
    confirm: Annotated[
        str, option("The name of the queue again, as a confirmation.", metavar="KEY")
    ],
    server: ServerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Cancel all blocked, waiting and scheduled tasks of a queue. Running tasks and dead letters are kept."""
    if confirm != key:
        raise InvalidInput("--confirm", "another name", "the name of the queue, which is KEY")

    async def act(backend: Backend) -> int:
        control = control_of(backend)
        check_known([key], await control.queues())
        number = await control.purge(key)
        await record_action(backend, "purge", key, tasks=number)
        return number

    number = with_backend(server, act)
    if as_json:
        print_json({"key": key, "count": number})
    else:
        tasks = "task" if number == 1 else "tasks"
        console.print(f"[green]✔[/] {number:,} {tasks} cancelled in queue [bold]{escape(key)}")


async def _read(
    backend: Backend, key: str, task_id: str, wait: float = 0
) -> tuple[TaskStatus | None, bytes | None]:
    """Return the status and the result of a task, after waiting up to ``wait`` seconds for its end."""
    control = control_of(backend)
    until, polls = time.monotonic() + wait, 0
    while True:
        (task_status,) = await control.statuses(key, task_id)
        left = until - time.monotonic()
        if task_status is None or not task_status.state.live or left <= 0:
            break
        polls += 1
        await asyncio.sleep(min(_POLLS.delay(polls), left))
    (text,) = await control.results(key, task_id)
    return task_status, text


async def _unknown(
    backend: Backend, key: str, task_id: str, kind: type[TaskQueueError] = NoTask
) -> TaskQueueError:
    """Return the error for a task that was not found."""
    if missing := await missing_queue(backend, key):
        return kind(f"task {task_id!r} not found: {missing}")
    return kind(
        f"task {task_id!r} not found in queue {key!r}: its id is unknown, or its record has expired"
    )


def format_time(at: float) -> str:
    """Format a time, given in Unix seconds, in the local time zone."""
    return datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M:%S")
