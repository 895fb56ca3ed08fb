"""``taskqueue dispatch config``."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import quote

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from taskqueue_cli.output import AsJson, console, print_json
from taskqueue_core.errors import InvalidInput
from taskqueue_dispatch.cli.server import DispatchServer, Url, run_request

_PATH = "/admin/model-configs/"


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command(name="config")(config)


def config(
    model: Annotated[str, typer.Argument(metavar="MODEL", show_default=False)],
    *,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="FIELD=VALUE",
            help="Field to change; may be repeated. The value is JSON or plain text.",
            show_default=False,
        ),
    ] = None,
    reset: Annotated[
        bool, typer.Option("--reset", help="Reset all fields to their defaults.")
    ] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Show how a model's jobs are done, or change it. A change acts at once; nothing has to be restarted."""
    if reset and changes:
        raise typer.BadParameter("either --set or --reset", param_hint="--reset")
    wanted = dict(map(_read, changes or []))
    where = _PATH + quote(model, safe="")

    async def work(server: DispatchServer) -> dict[str, Any]:
        kind = dict[str, Any]
        if reset:
            return await server.ask("DELETE", where, kind)
        matches = await server.ask("GET", where, kind)
        if not wanted:
            return matches
        defaults = _defaults()
        # What is as by default stays out of the document: it follows the defaults of later versions.
        body = {name: value for name, value in matches.items() if value != defaults.get(name)}
        return await server.ask("PUT", where, kind, body=body | wanted)

    matches = run_request(url, work)
    if as_json:
        print_json(matches)
        return
    table = Table.grid(padding=(0, 2))
    for name, value in matches.items():
        table.add_row(Text(name, "dim"), Text(_shown(value), "bold" if name in wanted else ""))
    console.print(table)


def _defaults() -> dict[str, Any]:
    from taskqueue_dispatch.models import ModelConfig  # noqa: PLC0415 - pydantic takes its time

    return ModelConfig().model_dump(mode="json")


def _read(token: str) -> tuple[str, Any]:
    name, sign, value = token.partition("=")
    if not sign or not name:
        raise InvalidInput("--set", "text without '='", "FIELD=VALUE")
    try:
        return name.strip(), msgspec.json.decode(value)
    except msgspec.DecodeError:
        return name.strip(), value


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
