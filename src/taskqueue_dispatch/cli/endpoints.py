"""Commands for models and their endpoints: ``register``, ``endpoints``, ``drain``, ``remove`` and ``config``."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Annotated, Any
from urllib.parse import quote

import msgspec
import typer
from rich import box
from rich.live import Live
from rich.table import Table
from rich.text import Text

from taskqueue_cli.output import AsJson, argument, console, option, print_json
from taskqueue_core.errors import InvalidInput
from taskqueue_dispatch.cli.server import (
    DispatchServer,
    Model,
    NotFound,
    Url,
    report,
    run_request,
)
from taskqueue_dispatch.models import ModelConfig
from taskqueue_dispatch.registry import endpoint_state

Server = Annotated[str, argument("Name of the server.", metavar="SERVER")]
_REFRESH_SECONDS = 1.0
_SLOTS_WIDTH = 14
"""width of the slots column in characters: narrow enough that each line shows the slots in one state"""
_COLOURS = {"ok": "green", "warn": "yellow", "paused": "yellow", "bad": "red"}
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
    endpoints: list[_Endpoint]


class _Page(msgspec.Struct, frozen=True, kw_only=True):
    models: list[_Model]
    next: str | None = None


def add_to(app: typer.Typer) -> None:
    """Add the commands for endpoints to ``app``."""
    app.command()(register)
    app.command(name="endpoints")(show)
    app.command()(drain)
    app.command()(remove)
    app.command()(config)


def register(
    model: Model,
    machine: Server,
    endpoint: Annotated[str, argument("URL to which jobs are sent by POST.", metavar="ENDPOINT")],
    *,
    slots: Annotated[
        int, typer.Option(min=1, help="Number of jobs of the model that the server runs at once.")
    ] = 1,
    priority: Annotated[
        int,
        typer.Option(min=0, max=9, help="Priority; slots with a higher priority are used first."),
    ] = 5,
    together: Annotated[
        int | None,
        option(
            "Maximum number of jobs that the server runs at once, for all its models together.",
            min=1,
        ),
    ] = None,
    no_reports: Annotated[
        bool,
        typer.Option(
            "--no-reports",
            help="The server does not report its running jobs, so do not check its health.",
        ),
    ] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Register an endpoint (a model on a server), or change it. A drained or removed endpoint is used again."""
    values = (model, machine, endpoint, slots, priority, not no_reports, together)
    body = dict(zip(_REGISTERED, values, strict=True))
    info = run_request(url, lambda server: _register(server, body))
    slots_text = f"{info.slots:,} slot{'' if info.slots == 1 else 's'}"
    report(info, f"{info.model} on {info.server}: {slots_text}", as_json=as_json)


async def _register(server: DispatchServer, body: dict[str, Any]) -> _Endpoint:
    return await server.ask("POST", "/admin/register", _Endpoint, body=body)


def show(
    model: Annotated[str | None, argument("Show only this model.", metavar="MODEL")] = None,
    *,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Refresh every second until Ctrl-C.")
    ] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Show all endpoints, with the number of slots in each state."""
    if watch and as_json:
        raise typer.BadParameter(
            "--json cannot be combined with --watch, because --json prints a single value",
            param_hint="--watch",
        )
    if watch:
        with contextlib.suppress(KeyboardInterrupt):
            run_request(url, lambda server: _watch(server, model))
        return
    endpoints = run_request(url, lambda server: _list(server, model))
    if as_json:
        print_json(endpoints)
    elif endpoints:
        console.print(_table(endpoints))
    else:
        console.print("No endpoints. Register one: taskqueue dispatch register MODEL SERVER URL")


async def _watch(server: DispatchServer, model: str | None) -> None:
    """Refresh the table every second. If the output is not a terminal, print the table only when it has changed."""
    shown: list[_Endpoint] | None = None
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            endpoints = await _list(server, model)
            if console.is_terminal:
                live.update(_table(endpoints), refresh=True)
            elif endpoints != shown:
                console.print(_table(endpoints))
            shown = endpoints
            await asyncio.sleep(_REFRESH_SECONDS)


async def _list(server: DispatchServer, model: str | None) -> list[_Endpoint]:
    endpoints: list[_Endpoint] = []
    query: dict[str, str | int] = {} if model is None else {"model": model}
    while True:
        page = await server.ask("GET", "/admin/endpoints", _Page, query=query)
        endpoints += [endpoint for item in page.models for endpoint in item.endpoints]
        if page.next is None:
            return endpoints
        query["after"] = page.next


def _table(endpoints: list[_Endpoint]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("model", style="bold", overflow="fold")
    table.add_column("server", overflow="fold")
    table.add_column("state", no_wrap=True)
    table.add_column("slots", overflow="fold", max_width=_SLOTS_WIDTH)
    table.add_column("endpoint", style="dim", overflow="fold")
    for info in endpoints:
        model, server, url = map(Text, (info.model, info.server, info.endpoint))
        table.add_row(model, server, _state(info), _slots(info), url)
    return table


def _slots(info: _Endpoint) -> str:
    states = ("free", "unassigned", "assigned", "detached", "overdue")
    return ", ".join(f"{n:,} {state}" for state in states if (n := getattr(info, state))) or "none"


def _state(info: _Endpoint) -> Text:
    # The server leaves out a rest that is over, by its store's clock; the clock of this machine may be wrong.
    text, state = endpoint_state(info, 0.0)
    return Text(text, _COLOURS[state])


def drain(
    model: Model,
    machine: Server,
    *,
    undo: Annotated[
        bool, typer.Option("--undo", help="End draining: send jobs to the server again.")
    ] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Stop sending jobs to an endpoint. Running jobs continue."""

    async def work(server: DispatchServer) -> _Endpoint:
        if not undo:
            body = {"model": model, "server": machine}
            return await server.ask("POST", "/admin/drain", _Endpoint, body=body)
        for info in await _list(server, model):
            if info.server == machine and not info.removed:
                return await _register(server, {name: getattr(info, name) for name in _REGISTERED})
        raise _not_found(model, machine)

    info = run_request(url, work)
    running = info.assigned + info.detached
    draining = f"draining, {running:,} job{'' if running == 1 else 's'} still running"
    text = "in use again" if undo else draining
    report(info, f"{info.model} on {info.server}: {text}", as_json=as_json)


def remove(model: Model, machine: Server, *, url: Url = None, as_json: AsJson = False) -> None:
    """Remove an endpoint. Running jobs continue, and queued jobs stay in the model's queue."""
    body = {"model": model, "server": machine}
    done = run_request(
        url, lambda server: server.ask("POST", "/admin/remove", dict[str, bool], body=body)
    )
    if not done["removed"]:
        raise _not_found(model, machine)
    report(done, f"{model} on {machine}: removed", as_json=as_json)


def _not_found(model: str, machine: str) -> NotFound:
    return NotFound(f"model {model!r} has no endpoint on server {machine!r}")


def config(
    model: Model,
    *,
    changes: Annotated[
        list[str] | None,
        option(
            "Field to change; may be repeated. The value is JSON or plain text.",
            "--set",
            metavar="FIELD=VALUE",
        ),
    ] = None,
    reset: Annotated[
        bool, typer.Option("--reset", help="Reset all fields to their defaults.")
    ] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Show or change the configuration of a model. A change takes effect at once, without a restart."""
    if reset and changes:
        raise typer.BadParameter("give either --set or --reset, not both", param_hint="--reset")
    changed = dict(map(_read_change, changes or []))
    path = f"/admin/model-configs/{quote(model, safe='')}"

    async def work(server: DispatchServer) -> dict[str, Any]:
        current = await server.ask("DELETE" if reset else "GET", path, dict[str, Any])
        if not changed:
            return current
        # Do not send fields whose value is the default, so that they follow the defaults of later versions.
        defaults = ModelConfig().model_dump(mode="json")
        body = {name: value for name, value in current.items() if value != defaults.get(name)}
        return await server.ask("PUT", path, dict[str, Any], body=body | changed)

    fields = run_request(url, work)
    if as_json:
        print_json(fields)
        return
    table = Table.grid(padding=(0, 2))
    for name, value in fields.items():
        text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
        table.add_row(Text(name, "dim"), Text(text, "bold" if name in changed else ""))
    console.print(table)


def _read_change(text: str) -> tuple[str, Any]:
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise InvalidInput(
            "--set", "text that does not begin with a field name and '='", "FIELD=VALUE"
        )
    try:
        return name.strip(), msgspec.json.decode(value)
    except msgspec.DecodeError:
        return name.strip(), value
