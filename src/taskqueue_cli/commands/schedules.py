"""``taskqueue schedule``: schedules in the store, which publish tasks at given times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Annotated, Literal, TypeVar, cast

import typer
from msgspec import Raw
from rich.markup import escape

from taskqueue_cli.backends import BACKEND_HELP, ServerUrl, with_backend
from taskqueue_cli.commands.dead_letters import Yes, confirm
from taskqueue_cli.commands.publish import headers_of, payload_of
from taskqueue_cli.commands.status import format_time
from taskqueue_cli.output import (
    AsJson,
    argument,
    console,
    make_table,
    note,
    option,
    print_fields,
    print_json,
)
from taskqueue_core.application.encoding import shown_in_place
from taskqueue_core.backend import Backend
from taskqueue_core.confirmations import stored
from taskqueue_core.errors import UnknownKey
from taskqueue_core.limits import LIMITS
from taskqueue_core.queue import Queue
from taskqueue_core.queue_schedules import QueueSchedules
from taskqueue_core.schedule_status import ScheduleStatus
from taskqueue_core.schedules import Cron, Every, InstantForm, Overlap, Schedule, TaskTemplate
from taskqueue_core.tasks import DEFAULT_PRIORITY, Confirmation, Published
from taskqueue_core.times import ZONED, parse_moment

T = TypeVar("T")
CatchUp = Literal["none", "last", "all"]
Name = Annotated[str, argument("Name of the schedule.", metavar="NAME")]
OverlapOption = Annotated[
    Overlap | None,
    option("What happens if an earlier task has not ended; overrides the setting of the schedule."),
]
Version = Annotated[
    int | None,
    option("Change the schedule only if its current version is N.", min=0, metavar="N"),
]
_TEXT = "Put, show, pause, run and delete schedules, which publish tasks at given times."
schedule = typer.Typer(
    name="schedule", help=f"{_TEXT}\n\n{BACKEND_HELP}", short_help=_TEXT, no_args_is_help=True
)


def _with(server: str | None, act: Callable[[QueueSchedules], Awaitable[T]]) -> T:
    async def run(backend: Backend) -> T:
        return await act(Queue(backend).schedules)

    return with_backend(server, run)


@schedule.command(name="list")
def listing(
    *,
    limit: Annotated[
        int, typer.Option(min=1, max=10_000, help="Maximum number of schedules to list.")
    ] = 1000,
    server: ServerUrl = None,
    as_json: AsJson = False,
) -> None:
    """List schedules by name, with their next instants and what became of the last ones."""

    async def read(schedules: QueueSchedules) -> list[ScheduleStatus]:
        found: list[ScheduleStatus] = []
        after = None
        while len(found) < limit:
            size = min(limit - len(found), LIMITS.batch)
            page = await schedules.list(after=after, limit=size)
            if not page:
                break
            found += page
            after = page[-1].name
        return found

    found = _with(server, read)
    if as_json:
        print_json(found)
        return
    if not found:
        console.print(
            "No schedules yet. Put one: taskqueue schedule put NAME --key KEY --cron '@daily'"
        )
        return
    table = make_table("schedule", texts=("queue", "when", "next", "last"))
    for status in found:
        last = status.recent[-1] if status.recent else None
        result = "" if last is None else f"{format_time(last.instant)} {last.result}"
        table.add_row(*map(escape, (status.name, status.key, _when(status), _next(status), result)))
    console.print(table)


@schedule.command()
def show(name: Name, *, server: ServerUrl = None, as_json: AsJson = False) -> None:
    """Show a schedule: what it publishes, when, and what became of its last instants."""

    async def read(schedules: QueueSchedules) -> ScheduleStatus:
        found = await schedules.get(name)
        if found is None:
            raise UnknownKey("NAME", "a schedule that does not exist", "the name of a schedule")
        return found

    _print(_with(server, read), as_json=as_json)


@schedule.command()
def put(
    name: Name,
    payload: Annotated[
        str | None,
        argument(
            "JSON text; - reads stdin, @FILE reads a file. Default: null.",
            metavar="PAYLOAD|-|@FILE",
        ),
    ] = None,
    *,
    key: Annotated[str, option("Key of the tasks, which is the name of their queue.")],
    cron: Annotated[
        str | None,
        option("Cron expression with five fields, such as '0 9 * * MON-FRI', or @daily."),
    ] = None,
    timezone: Annotated[
        str | None,
        option("Time zone of the expression, such as Europe/Berlin. Default: UTC.", metavar="ZONE"),
    ] = None,
    every: Annotated[
        float | None, option("Seconds between two instants, instead of --cron.", metavar="SECONDS")
    ] = None,
    since: Annotated[
        str | None, option(f"First instant of --every: {ZONED}.", metavar="TIME")
    ] = None,
    catch_up: Annotated[
        CatchUp, typer.Option(help="Which of the missed instants are made up for.")
    ] = "last",
    late: Annotated[
        float, typer.Option(metavar="SECONDS", help="Age at which an instant is skipped.")
    ] = 3600,
    overlap: Annotated[
        Overlap, typer.Option(help="What happens if an earlier task has not ended.")
    ] = "skip",
    jitter: Annotated[
        float, typer.Option(metavar="SECONDS", help="Maximum delay of a task, to spread the load.")
    ] = 0,
    starts: Annotated[
        str | None, option(f"Time before which there are no instants: {ZONED}.", metavar="TIME")
    ] = None,
    ends: Annotated[
        str | None, option(f"Time from which on there are none: {ZONED}.", metavar="TIME")
    ] = None,
    paused: Annotated[
        bool, typer.Option("--paused", help="Pause the schedule when it is created.")
    ] = False,
    instant: Annotated[
        list[str] | None,
        option(
            "Member of the payload that becomes the instant, as text or as seconds. May be repeated.",
            metavar="MEMBER[=text|seconds]",
        ),
    ] = None,
    priority: Annotated[
        int, typer.Option(min=0, max=9, help="Priority of the tasks.")
    ] = DEFAULT_PRIORITY,
    expires_in: Annotated[
        float | None, option("Seconds after which a task is no longer delivered.")
    ] = None,
    tenant: Annotated[str | None, option("Tenant that the tasks belong to.")] = None,
    ordering_key: Annotated[
        str | None, option("Tasks with the same ordering key run one after another.")
    ] = None,
    max_attempts: Annotated[
        int | None, option("Maximum number of attempts.", min=1, max=1000)
    ] = None,
    tag: Annotated[list[str] | None, option("Tag of the tasks. May be repeated.")] = None,
    header: Annotated[
        list[str] | None, option("Header of the tasks. May be repeated.", metavar="NAME=VALUE")
    ] = None,
    version: Version = None,
    server: ServerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Create a schedule, or replace the one with this name. A pause stays in force."""
    template = TaskTemplate(
        key=key,
        payload=Raw(payload_of(payload)),
        headers=headers_of(header or []),
        priority=priority,
        tenant=tenant,
        ordering_key=ordering_key,
        max_attempts=max_attempts,
        tags=tuple(tag or ()),
        expires_in=expires_in,
        instants=dict(map(_instant, instant or [])),
    )
    wanted = Schedule(
        name,
        _times(cron, timezone, every, since),
        template,
        catch_up=catch_up,
        late=late,
        overlap=overlap,
        jitter=jitter,
        starts=_time("starts", starts),
        ends=_time("ends", ends),
        paused=paused,
    )
    _print(_with(server, lambda it: it.put(wanted, version=version)), as_json=as_json)


@schedule.command()
def pause(name: Name, *, server: ServerUrl = None, as_json: AsJson = False) -> None:
    """Let a schedule publish no more tasks, until it is resumed. Its instants until then are not made up for."""
    _print(_with(server, lambda it: it.pause(name)), as_json=as_json)


@schedule.command()
def resume(name: Name, *, server: ServerUrl = None, as_json: AsJson = False) -> None:
    """Let a paused schedule continue with its first instant after now."""
    _print(_with(server, lambda it: it.resume(name)), as_json=as_json)


@schedule.command()
def delete(
    name: Name,
    *,
    yes: Yes = False,
    version: Version = None,
    server: ServerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Delete a schedule. Tasks that it has published stay."""
    if not yes:
        confirm(f"Delete the schedule {name}?", as_json=as_json)
    deleted = _with(server, lambda it: it.delete(name, version=version))
    if as_json:
        print_json({"name": name, "deleted": deleted})
    elif deleted:
        console.print(f"[green]✔[/] [bold]{escape(name)}[/] deleted")
    else:
        note(f"there is no schedule {name!r}; nothing was deleted", "yellow")


@schedule.command()
def run(
    name: Name,
    *,
    overlap: OverlapOption = None,
    server: ServerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Publish the task of a schedule now, even if the schedule is paused."""
    confirmation = _with(server, lambda it: it.trigger(name, overlap=overlap))
    if as_json:
        print_json(confirmation)
    elif confirmation.status is Published.DUPLICATE:
        console.print(
            f"not published: {confirmation.existing_id or confirmation.task_id} has not ended"
        )
    else:
        console.print(f"[green]✔[/] {confirmation.status.value}  {escape(confirmation.task_id)}")


@schedule.command(name="next")
def following(
    name: Name,
    *,
    count: Annotated[
        int, typer.Option("--count", "-n", min=1, max=1000, help="Maximum number of instants.")
    ] = 5,
    server: ServerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Show the instants that come next; those of a paused schedule, as if it were not paused."""
    instants = _with(server, lambda it: it.next(name, count))
    if as_json:
        print_json(instants)
        return
    for instant in instants:
        console.print(format_time(instant))


@schedule.command()
def backfill(
    name: Name,
    since: Annotated[str, argument(f"Time of the first instant: {ZONED}.", metavar="SINCE")],
    until: Annotated[str, argument("Time before which the last instant is.", metavar="UNTIL")],
    *,
    overlap: Annotated[
        Overlap, typer.Option(help="What happens if an earlier task has not ended.")
    ] = "allow",
    server: ServerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Publish the tasks of past instants, from SINCE to before UNTIL. Those that were published are duplicates."""
    times = _time("SINCE", since), _time("UNTIL", until)
    start, end = cast("tuple[datetime, datetime]", times)
    found = _with(server, lambda it: it.backfill(name, start, end, overlap=overlap))
    if as_json:
        print_json(found)
    else:
        _print_counts(found)
    if found and found[-1].status is Published.REFUSED:
        stored(found[-1])  # raises the error of the refusal


def _print_counts(found: tuple[Confirmation, ...]) -> None:
    counts = Counter(confirmation.status.value for confirmation in found)
    results = ", ".join(f"{status} {count:,}" for status, count in sorted(counts.items()))
    console.print(f"instants: {len(found):,}" + (f" ({results})" if results else ""))


def _times(
    cron: str | None, timezone: str | None, every: float | None, since: str | None
) -> Cron | Every:
    if (cron is None) == (every is None):
        raise typer.BadParameter("give one of --cron and --every", param_hint="--cron")
    if cron is not None:
        if since is not None:
            raise typer.BadParameter("needs --every", param_hint="--since")
        return Cron(cron, timezone or "UTC")
    if timezone is not None:
        raise typer.BadParameter("needs --cron", param_hint="--timezone")
    return Every(cast("float", every), _time("since", since))


def _time(field: str, text: str | None) -> datetime | None:
    """Return a time that is given as ISO 8601, or as Unix seconds. Raises `InvalidInput`."""
    return None if text is None else parse_moment(field, text)


def _instant(text: str) -> tuple[str, InstantForm]:
    member, _, form = text.partition("=")
    return member, cast("InstantForm", form or "text")


def _when(status: ScheduleStatus) -> str:
    if status.schedule is None:
        return "cannot be read"
    when = status.schedule.when
    if isinstance(when, Cron):
        return f"{when.expression} ({when.timezone})"
    return f"every {when.seconds:g} s"


def _next(status: ScheduleStatus) -> str:
    if status.next_at is not None:
        return format_time(status.next_at)
    return "paused" if status.paused else "none"


def _print(status: ScheduleStatus, *, as_json: bool) -> None:
    if as_json:
        print_json(status)
        return
    fields = {"name": status.name, "queue": status.key, "when": _when(status)}
    fields |= {"next": _next(status), "version": str(status.version)}
    found = status.schedule
    if found is not None:
        fields["catch-up"] = f"{found.catch_up}, at most {found.late:g} s late"
        fields["overlap"] = found.overlap
        fields["jitter"] = f"{found.jitter:g} s" if found.jitter else ""
        fields["starts"] = "" if found.starts is None else format_time(found.starts.timestamp())
        fields["ends"] = "" if found.ends is None else format_time(found.ends.timestamp())
        payload = bytes(found.task.payload)
        fields["payload"] = shown_in_place(payload, found.task.headers) or payload.decode()
    fields["declared by"] = "" if status.declared_by is None else f"registry {status.declared_by!r}"
    fields["problem"] = status.problem or ""
    refused = status.refused
    if refused is not None:
        fields["refused"] = f"{format_time(refused.at)} {refused.result}: tried again"
    fields["last"] = "\n".join(
        f"{format_time(each.instant)} {each.result}" + (f" x{each.count}" if each.count > 1 else "")
        for each in status.recent
    )
    print_fields(fields)
