"""``taskqueue tasks``: list the tasks of a queue, and show the tasks that a registry declares."""

from __future__ import annotations

import shlex
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.text import Text

from taskqueue_cli.backends import BACKEND_HELP, ServerUrl, with_backend
from taskqueue_cli.commands.apply import Target, loaded
from taskqueue_cli.commands.stats import missing_queue
from taskqueue_cli.commands.status import NoTask
from taskqueue_cli.output import (
    AsJson,
    argument,
    console,
    make_table,
    note,
    option,
    print_json,
)
from taskqueue_core import TaskFunction
from taskqueue_core.application.encoding import CODEC_HEADER, readable_error
from taskqueue_core.authoring.listings import Query
from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import TaskPage, TaskSummary, listing_of
from taskqueue_core.errors import ConfigurationError
from taskqueue_core.limits import LIMITS, escape_controls
from taskqueue_core.tasks import State
from taskqueue_core.times import RECENT, parse_time

_MOST = 100_000
"""maximum number of tasks that one call shows, and of records that it reads without ``--all``"""
_ID = 40
"""width up to which an id is shown on one line"""
_DAY = 86_400
_UNITS = (("d", _DAY), ("h", 3600), ("min", 60), ("s", 1))
_TEXT = "List the tasks of a queue, or show those that a registry declares."
tasks = typer.Typer(
    name="tasks", help=f"{_TEXT}\n\n{BACKEND_HELP}", short_help=_TEXT, no_args_is_help=True
)


@tasks.command(name="list")
def listing(
    key: Annotated[str, argument("Name of the queue.", metavar="KEY")],
    *,
    state: Annotated[State | None, option("Tasks in this state. Required without --tag.")] = None,
    tag: Annotated[
        str | None,
        option(
            "Tasks with this tag, in the order of their publishes. The queue's setting index must name it: see "
            "`taskqueue queue set --index`.",
        ),
    ] = None,
    tenant: Annotated[str | None, option("Tasks of this tenant.")] = None,
    worker: Annotated[
        str | None,
        option(
            "Tasks of this worker: in flight, dead, or ended in a queue with the setting keep_ended.",
            metavar="ID",
        ),
    ] = None,
    since: Annotated[
        str | None,
        option(
            "Tasks that ended, became dead letters or become available at this time or later. "
            f"{RECENT}.",
            metavar="TIME",
        ),
    ] = None,
    until: Annotated[
        str | None, option("Tasks of which this was before this time.", metavar="TIME")
    ] = None,
    newest: Annotated[bool, typer.Option("--newest", help="List the newest first.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=_MOST, help="Maximum number of tasks.")] = 50,
    everything: Annotated[
        bool, typer.Option("--all", help=f"List all tasks, at most {_MOST:,}.")
    ] = False,
    after: Annotated[
        str | None,
        option("Continue after a list that had more tasks, which printed this.", metavar="CURSOR"),
    ] = None,
    server: ServerUrl = None,
    as_json: AsJson = False,
) -> None:
    """List the tasks of a queue in a state, or with a tag. `taskqueue status KEY ID --detail` shows one of them.

    With --tenant or --worker, the other tasks of the state are read and skipped. After 100,000 of them the list ends,
    and says how to continue; with --all it does not.
    """
    times = {"since": since, "until": until}
    given: dict[str, float] = {}

    async def read(backend: Backend) -> tuple[Query, TaskPage, float]:
        if any(times.values()):
            await (
                backend.health()
            )  # a backend learns the clock of its store from the first response
        for name, text in times.items():
            if text is not None:
                given[name] = parse_time(name, text, backend.now())
        query = Query(
            key=key, state=state, tenant=tenant, tag=tag, worker=worker, newest=newest, **given
        )
        page = await _read(backend, query, after, limit, everything=everything)
        if not page.tasks and (missing := await missing_queue(backend, key)):
            raise NoTask(missing)
        return query, page, backend.now()

    query, page, now = with_backend(server, read)
    if as_json:
        print_json({"tasks": page.tasks, "next": page.next} | given)
        return
    if page.tasks:
        asked = (query.worker, query.since, query.until)
        _print(page.tasks, now, starts=any(each is not None for each in asked))
    elif page.next is None:
        console.print(f"No such tasks in queue [bold]{key}[/].")
    if page.next is not None:
        note(f"There are more tasks: {_continued(query, limit, page.next)}")


async def _read(
    backend: Backend, query: Query, after: str | None, limit: int, *, everything: bool
) -> TaskPage:
    """Return one page of up to ``limit`` tasks, from as many pages of the store as that takes."""
    found: list[TaskSummary] = []
    looked_at, most = 0, _MOST if everything else limit
    filters = {name: getattr(query, name) for name in query.__struct_fields__}
    while True:
        size = min(LIMITS.batch, most - len(found))
        page = await listing_of(backend).tasks(**filters, after=after, limit=size)
        found += page.tasks
        looked_at += page.looked_at
        after = page.next
        if after is None or len(found) == most or (looked_at >= _MOST and not everything):
            return TaskPage(tasks=tuple(found), next=after, looked_at=looked_at)


def _print(tasks: tuple[TaskSummary, ...], now: float, *, starts: bool) -> None:
    """Print a table that fits in 80 characters, and in which ids of usual length are on one line.

    ``starts``: whether it shows when the last attempt of each task was delivered.
    """
    scheduled = all(task.due_at is not None for task in tasks)
    table = make_table("task", numbers=("attempt", "due in" if scheduled else "for"))
    table.columns[0].min_width = min(_ID, max(len(task.task_id) for task in tasks))
    same = len({task.state for task in tasks}) == 1
    delivered = [task.delivered_at for task in tasks if task.delivered_at is not None]
    form = "%H:%M:%S" if all(now - _DAY < at for at in delivered) else "%m-%d %H:%M"
    if starts:
        table.add_column("started (UTC)", no_wrap=True)
    for title in ("details",) if same else ("state", "details"):
        table.add_column(title, overflow="fold")
    for task in tasks:
        age = now - task.updated_at if task.due_at is None or not scheduled else task.due_at - now
        at = task.delivered_at
        cells = (
            ["" if at is None else f"{datetime.fromtimestamp(at, UTC):{form}}"] if starts else []
        )
        cells += [] if same else [task.state.value.replace("_", " ")]
        cells.append(escape_controls(_details(task)))
        table.add_row(Text(task.task_id), str(task.attempt), _duration(age), *map(Text, cells))
    console.print(table)


def _details(task: TaskSummary) -> str:
    """Return what distinguishes a task from others, in short."""
    parts = {
        "tenant ": task.tenant,
        "worker ": task.worker_id,
        "": " ".join(task.tags) or None,
        "error ": readable_error(None, task.error or "") or None,
    }
    return ", ".join(f"{name}{text}" for name, text in parts.items() if text is not None)


def _duration(seconds: float) -> str:
    """Return a duration in its largest unit, for example ``5 min``."""
    for unit, size in _UNITS:
        if seconds >= size:
            return f"{seconds / size:,.0f} {unit}"
    return "0 s"


def _continued(query: Query, limit: int, cursor: str) -> str:
    """Return the command that continues a list."""
    words = ["taskqueue", "tasks", "list", query.key]
    for name in ("state", "tag", "tenant", "worker"):
        if (value := getattr(query, name)) is not None:
            words += [f"--{name}", str(value)]
    for name in ("since", "until"):
        if (at := getattr(query, name)) is not None:
            words += [f"--{name}", f"{at:.9f}"]
    words += ["--newest"] if query.newest else []
    return shlex.join([*words, "--limit", str(limit), "--after", cursor])


@tasks.command()
def declared(
    target: Target = None,
    *,
    schema: Annotated[
        bool,
        typer.Option("--schema", help="Print JSON with the JSON Schema of each task's payload."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the tasks of a registry or a worker, with their queues and arguments.

    A program in another language publishes JSON that fits the schema, with the printed headers, to the queue. If a
    codec is printed, the program may encode the JSON, and adds the header taskqueue-codec then.
    """
    functions = loaded(target).functions
    if schema or as_json:
        print_json(
            [
                {"name": each.name, "queue": each.queue, **_headers(each)}
                | ({"payload": each.schema()} if schema else {})
                for each in functions
            ]
        )
        return
    table = make_table("task", texts=("queue", "arguments"))
    for each in functions:
        table.add_row(each.name, each.queue, ", ".join(_arguments(each)))
    console.print(table)


def _headers(function: TaskFunction[..., Any]) -> dict[str, Any]:
    headers = dict(function.headers)
    codec = headers.pop(CODEC_HEADER, None)
    return {"headers": headers} if codec is None else {"headers": headers, "codec": codec}


def _arguments(function: TaskFunction[..., Any]) -> list[str]:
    try:
        described = function.schema()
    except ConfigurationError:  # a type without a JSON Schema
        return list(function.arguments.fields)
    required = described.get("required", ())
    return [name if name in required else f"{name}?" for name in described.get("properties", ())]
