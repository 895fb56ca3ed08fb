"""``taskqueue dispatch register``, ``endpoints``, ``drain`` and ``remove``."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Annotated, Any

import msgspec
import typer
from rich import box
from rich.live import Live
from rich.table import Table
from rich.text import Text

from taskqueue_cli.output import AsJson, console, print_json
from taskqueue_dispatch.cli.server import DispatchServer, NotFound, Url, run_request

Model = Annotated[str, typer.Argument(metavar="MODEL", show_default=False)]
Machine = Annotated[
    str, typer.Argument(metavar="SERVER", help="Name of the server.", show_default=False)
]
_EVERY = 1.0
_SLOTS = 14
"""characters: two words of states do not stand in one line"""
_REGISTERED = ("model", "server", "endpoint", "slots", "priority", "reports", "together")


class _Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    server: str
    endpoint: str
    slots: int
    priority: int = 5
    reports: bool = True
    together: int | None = None
    healthy: bool
    draining: bool
    removed: bool
    resting_until: float | None = None
    free: int
    unassigned: int
    assigned: int
    detached: int
    overdue: int


class _Model(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    endpoints: list[_Endpoint]


class _Models(msgspec.Struct, frozen=True, kw_only=True):
    models: list[_Model]
    next: str | None = None


class _Removed(msgspec.Struct, frozen=True):
    removed: bool


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(register)
    app.command(name="endpoints")(listing)
    app.command()(drain)
    app.command()(remove)


def register(
    model: Model,
    machine: Machine,
    endpoint: Annotated[
        str,
        typer.Argument(
            metavar="ENDPOINT", help="URL that jobs are sent to by POST.", show_default=False
        ),
    ],
    *,
    slots: Annotated[
        int, typer.Option(min=1, help="Number of jobs of the model that it runs at once.")
    ] = 1,
    priority: Annotated[
        int, typer.Option(min=0, max=9, help="Priority: slots of a higher priority are used first.")
    ] = 5,
    together: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Maximum number of jobs at once, over all models of the server.",
            show_default=False,
        ),
    ] = None,
    no_reports: Annotated[
        bool,
        typer.Option("--no-reports", help="The server has no health endpoint that lists its jobs."),
    ] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Register an endpoint, a model on a server, or change one. One that was drained is in use again."""
    body: dict[str, Any] = {
        "model": model,
        "server": machine,
        "endpoint": endpoint,
        "slots": slots,
        "priority": priority,
        "reports": not no_reports,
        "together": together,
    }
    made = run_request(
        url, lambda server: server.ask("POST", "/admin/register", _Endpoint, body=body)
    )
    if as_json:
        print_json(made)
    else:
        _say(made, f"{made.slots:,} slot{'' if made.slots == 1 else 's'}")


def listing(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Only this model.", show_default=False)
    ] = None,
    *,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Refresh every second until Ctrl-C.")
    ] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Show all endpoints with their slots by state."""
    if watch and as_json:
        raise typer.BadParameter(
            "--json cannot be combined with --watch: it prints one value", param_hint="--watch"
        )
    if watch:
        with contextlib.suppress(KeyboardInterrupt):
            run_request(url, lambda server: _watch(server, model))
        return
    matches = run_request(url, lambda server: _all(server, model))
    if as_json:
        print_json(matches)
    elif matches:
        console.print(_table(matches))
    else:
        console.print("No endpoints. Register one: taskqueue dispatch register MODEL SERVER URL")


async def _watch(server: DispatchServer, model: str | None) -> None:
    """Show the table anew each second; where lines cannot be taken back, only when it has changed."""
    shown: list[_Endpoint] | None = None
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            matches = await _all(server, model)
            if console.is_terminal:
                live.update(_table(matches), refresh=True)
            elif matches != shown:
                console.print(_table(matches))
            shown = matches
            await asyncio.sleep(_EVERY)


async def _all(server: DispatchServer, model: str | None) -> list[_Endpoint]:
    matches: list[_Endpoint] = []
    query: dict[str, str | int] = {} if model is None else {"model": model}
    while True:
        page = await server.ask("GET", "/admin/endpoints", _Models, query=query)
        matches += [endpoint for model in page.models for endpoint in model.endpoints]
        if page.next is None:
            return matches
        query["after"] = page.next


def _table(matches: list[_Endpoint]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("model", style="bold", overflow="fold")
    table.add_column("server", overflow="fold")
    table.add_column("state", no_wrap=True)
    table.add_column("slots", overflow="fold", max_width=_SLOTS)
    table.add_column("endpoint", style="dim", overflow="fold")
    for item in matches:
        table.add_row(item.model, item.server, _state(item), _slots(item), item.endpoint)
    return table


def _slots(item: _Endpoint) -> str:
    """Say how many are in each state, but for those without any."""
    counts = {
        "free": item.free,
        "unassigned": item.unassigned,
        "assigned": item.assigned,
        "detached": item.detached,
        "overdue": item.overdue,
    }
    return ", ".join(f"{count:,} {name}" for name, count in counts.items() if count) or "none"


def _state(item: _Endpoint) -> Text:
    if item.removed:
        return Text("removed", "yellow")
    if item.draining:
        return Text("draining", "yellow")
    if not item.healthy:
        return Text("not healthy", "red")
    resting = item.resting_until is not None and item.resting_until > time.time()
    return Text("resting", "yellow") if resting else Text("ready", "green")


def drain(
    model: Model,
    machine: Machine,
    *,
    undo: Annotated[
        bool, typer.Option("--undo", help="End draining: send jobs to the server again.")
    ] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Give an endpoint no more jobs. What runs there goes on."""

    async def work(server: DispatchServer) -> _Endpoint:
        if not undo:
            named = {"model": model, "server": machine}
            return await server.ask("POST", "/admin/drain", _Endpoint, body=named)
        for item in await _all(server, model):
            if item.server == machine and not item.removed:
                body = {name: getattr(item, name) for name in _REGISTERED}
                return await server.ask("POST", "/admin/register", _Endpoint, body=body)
        raise NotFound("the model has no such server")

    done = run_request(url, work)
    if as_json:
        print_json(done)
    else:
        _say(done, "in use again" if undo else f"draining, {_running(done)}")


def remove(model: Model, machine: Machine, *, url: Url = None, as_json: AsJson = False) -> None:
    """Take an endpoint away. What runs there goes on, and what waits in the model's queue stays."""
    body = {"model": model, "server": machine}
    done = run_request(url, lambda server: server.ask("POST", "/admin/remove", _Removed, body=body))
    if not done.removed:
        raise NotFound("the model has no such server")
    if as_json:
        print_json(done)
    else:
        console.print(Text.assemble(("✔ ", "green"), f"{model} on {machine}: removed"))


def _say(item: _Endpoint, names: str) -> None:
    console.print(Text.assemble(("✔ ", "green"), f"{item.model} on {item.server}: {names}"))


def _running(item: _Endpoint) -> str:
    held = item.assigned + item.detached
    return f"{held:,} job{'' if held == 1 else 's'} running there"
