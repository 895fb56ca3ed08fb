"""``taskqueue tasks``: show the tasks of a registry, for publishers in other languages."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from taskqueue_cli.commands.apply import Target, loaded
from taskqueue_cli.output import AsJson, console, make_table, print_json
from taskqueue_core import TaskFunction
from taskqueue_core.application.encoding import CODEC_HEADER
from taskqueue_core.errors import ConfigurationError


def tasks(
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
