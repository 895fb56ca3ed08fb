"""``taskqueue tasks``: show the tasks of a registry, for publishers in other languages."""

from __future__ import annotations

from typing import Annotated

import typer

from taskqueue_cli.commands.apply import Target, loaded
from taskqueue_cli.output import AsJson, console, make_table, print_json


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

    A program in another language publishes JSON that fits the schema, with the printed headers, to the queue.
    """
    functions = loaded(target).functions
    if schema or as_json:
        print_json(
            [
                {"name": each.name, "queue": each.queue, "headers": each.headers}
                | ({"payload": each.schema()} if schema else {})
                for each in functions
            ]
        )
        return
    table = make_table("task", texts=("queue", "arguments"))
    for each in functions:
        described = each.schema()
        required = described.get("required", ())
        arguments = (
            name if name in required else f"{name}?" for name in described.get("properties", ())
        )
        table.add_row(each.name, each.queue, ", ".join(arguments))
    console.print(table)
