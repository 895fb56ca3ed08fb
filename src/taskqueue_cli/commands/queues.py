"""``taskqueue queue``: what limits and orders the flow through queues, and where copies go."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar

import msgspec
import typer
from rich import box
from rich.table import Table
from rich.text import Text

from taskqueue_cli.backends import REACH, ServerUrl, opened
from taskqueue_cli.commands.stats import check_known, count
from taskqueue_cli.limits import (
    NONE,
    limits_of,
    number_of,
    rate_of,
    rate_text,
    seconds_of,
    weighted,
)
from taskqueue_cli.output import AsJson, console, note, print_json
from taskqueue_core.capabilities import Control, Order, QueueSettings, control_of
from taskqueue_core.errors import InvalidInput
from taskqueue_core.queue_settings import (
    change_settings,
    pause_queue,
    read_settings,
    reset_settings,
)
from taskqueue_core.tasks import QueueStats

__all__ = ["add_to"]

T = TypeVar("T")
Key = Annotated[str, typer.Argument(metavar="KEY", help="The queue's name.", show_default=False)]
Others = Annotated[
    list[str], typer.Argument(metavar="OTHER...", help="Other queues.", show_default=False)
]
Intake = Annotated[
    bool, typer.Option("--intake", help="What publishers put in, not what workers take out.")
]
Version = Annotated[
    int | None,
    typer.Option(
        min=0,
        metavar="N",
        help="Only if this version is in force. Without it, what others change meanwhile is kept.",
        show_default=False,
    ),
]

_TEXT = "Look at what limits and orders queues, set it, pause, resume and bind them."
queue = typer.Typer(help=f"{_TEXT}\n\n{REACH}", short_help=_TEXT, no_args_is_help=True)


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(queue, name="queue")


@queue.command(name="list")
def listing(*, server: ServerUrl = None, as_json: AsJson = False) -> None:
    """List all queues with what limits them."""

    async def read(control: Control) -> list[tuple[QueueStats, QueueSettings]]:
        keys = await control.queues()
        return [(await control.stats(key), await control.settings(key)) for key in keys]

    matches = asyncio.run(_with(server, read))
    if as_json:
        print_json([_as_dict(stats.key, settings, stats) for stats, settings in matches])
        return
    if not matches:
        console.print("No queues yet. Publish something: taskqueue publish KEY PAYLOAD")
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("queue", style="bold", overflow="fold")
    table.add_column("waiting", justify="right")
    table.add_column("in flight", justify="right")
    table.add_column("limits", overflow="fold")
    for stats, settings in matches:
        numbers = (count(stats.ledger.waiting), count(stats.ledger.in_flight))
        table.add_row(stats.key, *numbers, ", ".join(limits_of(settings)))
    console.print(table)


@queue.command()
def show(key: Key, *, server: ServerUrl = None, as_json: AsJson = False) -> None:
    """Show the settings in force."""

    async def read(control: Control) -> QueueSettings:
        check_known([key], await control.queues())
        return await control.settings(key)

    settings = asyncio.run(_with(server, read))
    if as_json:
        print_json(_as_dict(key, settings))
        return
    table = Table.grid(padding=(0, 2))
    for name, value in settings.model_dump(mode="json").items():
        rate = getattr(settings, name) if name.endswith("rate_limit") else None
        shown = _shown(value) if rate is None else rate_text(rate)
        if name == "weights":
            shown = ", ".join(f"{tenant}={weight}" for tenant, weight in value.items()) or NONE
        table.add_row(Text(name.replace("_", " "), "dim"), Text(shown))
    console.print(table)


@queue.command(name="set")
def change(
    key: Key,
    *,
    capacity: Annotated[
        str | None,
        typer.Option(
            metavar=f"N|{NONE}",
            help="Refuse what is published beyond so many tasks that were never handed out.",
            show_default=False,
        ),
    ] = None,
    max_inflight: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="At most so many in flight, over all workers; 0 for any number.",
            show_default=False,
        ),
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(
            metavar=f"N/TIME|{NONE}",
            help="At most so many hand-outs in a time: 1000/1s, 100/1m, 15/1h.",
            show_default=False,
        ),
    ] = None,
    max_processing_time: Annotated[
        str | None,
        typer.Option(
            metavar=f"SECONDS|{NONE}",
            help="What runs for so long without progress counts as lost, and comes back.",
            show_default=False,
        ),
    ] = None,
    order: Annotated[
        Order | None,
        typer.Option(
            help="First in, first out; or tenants in turn, which the settings of tenants need.",
            show_default=False,
        ),
    ] = None,
    weight: Annotated[
        list[str] | None,
        typer.Option(
            metavar=f"TENANT=N|{NONE}",
            help=f"A tenant's turns for each turn of the others. May be repeated; TENANT={NONE} takes it away, "
            f"{NONE} all.",
            show_default=False,
        ),
    ] = None,
    tenant_capacity: Annotated[
        str | None,
        typer.Option(
            metavar=f"N|{NONE}", help="As --capacity, for each tenant.", show_default=False
        ),
    ] = None,
    tenant_max_inflight: Annotated[
        int | None,
        typer.Option(metavar="N", help="As --max-inflight, for each tenant.", show_default=False),
    ] = None,
    tenant_rate: Annotated[
        str | None,
        typer.Option(
            metavar=f"N/TIME|{NONE}", help="As --rate, for each tenant.", show_default=False
        ),
    ] = None,
    floor_share: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="Of all hand-outs, what the lowest priority has for sure: 0.1 is every tenth or so; 0 for none.",
            show_default=False,
        ),
    ] = None,
    shards: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Spread it over so many partitions of the store, which a queue with limits cannot be.",
            show_default=False,
        ),
    ] = None,
    journal: Annotated[
        bool | None,
        typer.Option(
            "--journal/--no-journal",
            help="Have the store write down every transition, for `taskqueue pipeline`.",
            show_default=False,
        ),
    ] = None,
    paused: Annotated[
        bool | None,
        typer.Option("--paused/--resumed", help="Hand nothing out.", show_default=False),
    ] = None,
    intake_paused: Annotated[
        bool | None,
        typer.Option(
            "--intake-paused/--intake-resumed", help="Take nothing in.", show_default=False
        ),
    ] = None,
    version: Version = None,
    server: ServerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Set some limits or the order, and leave the other settings as they are. They act at once."""
    flags = {
        "max_inflight": max_inflight,
        "paused": paused,
        "intake_paused": intake_paused,
        "order": order,
        "tenant_max_inflight": tenant_max_inflight,
        "floor_share": floor_share,
        "shards": shards,
        "journal": journal,
    }
    changes: dict[str, Any] = {name: value for name, value in flags.items() if value is not None}
    for name, number in (("capacity", capacity), ("tenant_capacity", tenant_capacity)):
        if number is not None:
            changes[name] = number_of(name, number)
    for name, limit in (("rate", rate), ("tenant_rate", tenant_rate)):
        if limit is not None:
            changes[f"{name}_limit"] = rate_of(name, limit)
    if max_processing_time is not None:
        changes["max_processing_time"] = seconds_of("max_processing_time", max_processing_time)
    if not (changes or weight):
        raise typer.BadParameter("nothing to set: give --capacity, --max-inflight, --rate ...")
    weighted({}, weight or [])  # what is no weight is told before anything is asked

    def edit(found: QueueSettings) -> dict[str, Any]:
        return changes | ({"weights": weighted(found.weights, weight)} if weight else {})

    _edit(key, edit, server, version=version, as_json=as_json)


@queue.command()
def bind(
    key: Key,
    others: Others,
    *,
    topic: Annotated[
        bool, typer.Option("--topic", help="KEY keeps no copy of its own: it only hands on.")
    ] = False,
    version: Version = None,
    server: ServerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Put a copy of what is published to KEY into other queues too. What is there already stays."""

    def edit(found: QueueSettings) -> dict[str, Any]:
        own = [] if topic else [key]
        there = [item for item in found.bound_to or own if not (topic and item == key)]
        return _bound(key, [*there, *others])

    _edit(key, edit, server, version=version, as_json=as_json)


@queue.command()
def unbind(
    key: Key,
    others: Others,
    *,
    version: Version = None,
    server: ServerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Put no more copies into other queues. Without any left KEY keeps what is published to it, as ever."""

    def edit(found: QueueSettings) -> dict[str, Any]:
        for other in others:
            if other not in found.bound_to:
                known = ", ".join(found.bound_to) or f"none: {key} is not bound"
                raise InvalidInput("OTHER", "a queue that gets no copies", known)
        return _bound(key, [item for item in found.bound_to if item not in others])

    _edit(key, edit, server, version=version, as_json=as_json)


@queue.command()
def pause(
    key: Key, *, intake: Intake = False, server: ServerUrl = None, as_json: AsJson = False
) -> None:
    """Hand nothing out any more. What runs is left alone, and publishing goes on."""
    _pause(key, server, intake=intake, paused=True, as_json=as_json)


@queue.command()
def resume(
    key: Key, *, intake: Intake = False, server: ServerUrl = None, as_json: AsJson = False
) -> None:
    """Hand out again."""
    _pause(key, server, intake=intake, paused=False, as_json=as_json)


@queue.command()
def reset(
    key: Key, *, version: Version = None, server: ServerUrl = None, as_json: AsJson = False
) -> None:
    """Return all settings to their defaults, those that are no limits too."""

    def call(control: Control) -> Awaitable[QueueSettings]:
        return reset_settings(control, key, version=version)

    _change(key, call, server, as_json=as_json)


def _bound(key: str, names: list[str]) -> dict[str, Any]:
    unique = list(dict.fromkeys(names))
    return {"bound_to": [] if unique == [key] else unique}


def _edit(
    key: str,
    edit: Callable[[QueueSettings], dict[str, Any]],
    server: str | None,
    *,
    version: int | None,
    as_json: bool,
) -> None:
    """Change some of the settings to what ``edit`` makes of those in force."""

    def edited(found: QueueSettings) -> QueueSettings:
        return read_settings(msgspec.json.encode(found.model_dump(mode="json") | edit(found)))

    def call(control: Control) -> Awaitable[QueueSettings]:
        return change_settings(control, key, edited, version=version)

    _change(key, call, server, as_json=as_json)


def _pause(key: str, server: str | None, *, intake: bool, paused: bool, as_json: bool) -> None:
    def call(control: Control) -> Awaitable[QueueSettings]:
        return pause_queue(control, key, intake=intake, paused=paused)

    _change(key, call, server, as_json=as_json)


def _change(
    key: str,
    call: Callable[[Control], Awaitable[QueueSettings]],
    server: str | None,
    *,
    as_json: bool,
) -> None:
    async def act(control: Control) -> tuple[QueueSettings, bool]:
        settings = await call(control)
        return settings, bool((await control.ledger(key)).published)

    settings, used = asyncio.run(_with(server, act))
    if not used:  # perhaps the name is mistyped
        note(f"so far no task was published to {key!r}", "yellow")
    if as_json:
        print_json(_as_dict(key, settings))
        return
    limits = ", ".join(limits_of(settings)) or "no limits"
    console.print(f"[green]✔[/] [bold]{key}[/]: {limits}  [dim]version {settings.version}")


async def _with(server: str | None, act: Callable[[Control], Awaitable[T]]) -> T:
    async with opened(server) as backend:
        return await act(control_of(backend))


def _as_dict(key: str, settings: QueueSettings, stats: QueueStats | None = None) -> dict[str, Any]:
    figures = {} if stats is None else {"ledger": stats.ledger}
    return {"key": key, **figures, **settings.model_dump(mode="json")}


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name.replace('_', ' ')} {_shown(item)}" for name, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value)) or NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    return NONE if value is None else str(value)
