"""``taskqueue publish``: publish one task, or a file of tasks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from taskqueue_cli.backends import ServerUrl, with_backend
from taskqueue_cli.commands.batch import TaskFields, publish_file
from taskqueue_cli.output import AsJson, argument, console, option, print_json
from taskqueue_core.after import After, TaskRef, When
from taskqueue_core.backend import Backend
from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import LIMITS
from taskqueue_core.queue import Queue
from taskqueue_core.tasks import DEFAULT_PRIORITY, Confirmation
from taskqueue_core.uniqueness import UniqueKey


def publish(
    key: Annotated[
        str | None,
        argument(
            "Key of the task, which is the name of its queue. With --batch: the key for lines without a key.",
            metavar="KEY",
        ),
    ] = None,
    payload: Annotated[
        str | None,
        argument(
            "JSON text; - reads stdin, @FILE reads a file. Default: null.",
            metavar="PAYLOAD|-|@FILE",
        ),
    ] = None,
    *,
    task_id: Annotated[
        str | None,
        option(
            "Id of the task. Publishing the same id again has no effect. Default: a random id.",
            "--id",
        ),
    ] = None,
    priority: Annotated[
        int,
        typer.Option(
            min=0, max=9, help="Priority; tasks with a higher priority are delivered first."
        ),
    ] = DEFAULT_PRIORITY,
    delay: Annotated[float | None, option("Seconds before the task may be delivered.")] = None,
    expires_in: Annotated[
        float | None, option("Seconds after which the task is no longer delivered.")
    ] = None,
    tenant: Annotated[str | None, option("Tenant that the task belongs to.")] = None,
    ordering_key: Annotated[
        str | None, option("Tasks with the same ordering key run one after another.")
    ] = None,
    max_attempts: Annotated[
        int | None,
        option("Maximum number of attempts; overrides the setting of the queue.", min=1, max=1000),
    ] = None,
    unique_key: Annotated[
        str | None,
        option("Key that at most one live task of the queue holds. Another one is kept out."),
    ] = None,
    on_conflict: Annotated[
        Literal["keep", "replace", "refuse"],
        typer.Option(help="What to do if a task holds the unique key."),
    ] = "keep",
    after: Annotated[
        list[str] | None,
        option("Task that this one waits for. May be repeated.", metavar="KEY/ID"),
    ] = None,
    when: Annotated[
        When,
        typer.Option(
            help="What --after waits for: all tasks are done, all have ended, or one has failed."
        ),
    ] = "done",
    tag: Annotated[
        list[str] | None,
        option("Tag by which the task can be found, such as user:42. May be repeated."),
    ] = None,
    header: Annotated[
        list[str] | None, option("Header of the task. May be repeated.", metavar="NAME=VALUE")
    ] = None,
    wait: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="Seconds to keep retrying while the queue is full or its intake is paused.",
        ),
    ] = 0,
    batch: Annotated[
        Path | None,
        option(
            "Publish each line of FILE (- for stdin) as a task. A line is a JSON object with key, payload, id, "
            "priority, delay, expires_in, unique, after ...",
            metavar="FILE",
        ),
    ] = None,
    server: ServerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Publish one task, or all tasks of a file with --batch."""
    if batch is not None:
        own = (
            *(payload, task_id, delay, expires_in, tenant, ordering_key, max_attempts, header),
            *(unique_key, after, tag),
        )
        if any(value is not None for value in own) or priority != DEFAULT_PRIORITY:
            raise typer.BadParameter(
                "PAYLOAD and the fields of a task cannot be given with a file: put them into the lines of the file",
                param_hint="--batch",
            )
        publish_file(batch, key, server, wait=wait, as_json=as_json)
        return
    if unique_key is None and on_conflict != "keep":
        raise typer.BadParameter("give --unique-key as well", param_hint="--on-conflict")
    if not after and when != "done":
        raise typer.BadParameter("give --after as well", param_hint="--when")
    if key is None:
        raise typer.BadParameter("give a key, or --batch FILE", param_hint="KEY")
    task = TaskFields(
        key=key,
        payload=msgspec.Raw(payload_of(payload)),
        id=task_id,
        priority=priority,
        delay=delay,
        expires_in=expires_in,
        tenant=tenant,
        ordering_key=ordering_key,
        max_attempts=max_attempts,
        tags=tuple(tag or ()),
        unique=None if unique_key is None else UniqueKey(key=unique_key, on_conflict=on_conflict),
        after=After(tasks=refs_of(after), when=when) if after else None,
        headers=headers_of(header or []),
    )
    confirmation = with_backend(server, lambda backend: _publish(backend, task, wait))
    if as_json:
        print_json(confirmation)
    else:
        _print(confirmation)


async def _publish(backend: Backend, fields: TaskFields, wait: float) -> Confirmation:
    if fields.delay is not None or fields.expires_in is not None:
        await backend.health()  # a remote backend learns the server's time from its first response
    task = fields.to_task(backend.now())
    return await Queue(backend).publish_task(task, wait=wait)


def payload_of(argument: str | None) -> bytes:
    """Return the JSON text of a PAYLOAD argument, read from stdin for ``-`` or from a file for ``@FILE``.

    Raises `InvalidInput` if the file cannot be read, or if the text is not JSON.
    """
    if argument is None:
        return b"null"
    text = _read(argument).strip()
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        allowed = """JSON; a string needs its own quotes: '"hello"'"""
        raise InvalidInput("payload", "text that is not JSON", allowed) from None
    return text


def _read(text: str) -> bytes:
    if text == "-":
        return sys.stdin.buffer.read(LIMITS.payload + 1)
    if not text.startswith("@"):
        return text.encode("utf-8", "surrogateescape")
    try:
        with Path(text[1:]).open("rb") as file:
            return file.read(LIMITS.payload + 1)
    except OSError as error:
        got = f"a file that cannot be read ({error.strerror})"
        raise InvalidInput("payload", got, "@ before the path of a readable file") from None


def refs_of(texts: list[str]) -> tuple[TaskRef, ...]:
    """Return the tasks of ``KEY/ID`` options. Raises `InvalidInput`."""
    refs = []
    for text in texts:
        key, sign, task_id = text.partition("/")
        if not sign:
            raise InvalidInput("after", "text without a '/'", "KEY/ID")
        refs.append(TaskRef(key, task_id))
    return tuple(refs)


def headers_of(texts: list[str]) -> dict[str, str]:
    """Return the headers of ``NAME=VALUE`` options. Raises `InvalidInput`."""
    headers = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign or not name:
            raise InvalidInput(
                "header", "text that does not begin with a name and '='", "NAME=VALUE"
            )
        headers[name] = value
    return headers


def _print(confirmation: Confirmation) -> None:
    text = f"[green]✔[/] {confirmation.status.value}  {confirmation.task_id}"
    if confirmation.existing_id is not None:
        text += f"  [dim]the unique key is held by {confirmation.existing_id}"
    elif confirmation.position:
        text += f"  [dim]tasks already waiting in the queue: {confirmation.position:,}"
    console.print(text)
