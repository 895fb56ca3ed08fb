"""``taskqueue audit``: show what operators have done."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from taskqueue_cli.backends import ServerUrl, with_backend
from taskqueue_cli.commands.status import format_time
from taskqueue_cli.output import AsJson, console, make_table, print_json
from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import AuditEntry, audit_of
from taskqueue_core.capabilities.audit import AUDIT_KEPT
from taskqueue_core.limits import LIMITS


def audit(
    *,
    limit: Annotated[
        int, typer.Option(min=1, max=AUDIT_KEPT, help="Maximum number of entries, newest first.")
    ] = 50,
    server: ServerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Show what operators have done, newest first: who, what, to which queue, and how many tasks."""

    async def read(backend: Backend) -> list[AuditEntry]:
        found: list[AuditEntry] = []
        while len(found) < limit:
            after = found[-1].id if found else None
            size = min(LIMITS.batch, limit - len(found))
            page = await audit_of(backend).entries(after=after, limit=size)
            found += page
            if len(page) < size:
                break
        return found

    entries = with_backend(server, read)
    if as_json:
        print_json(entries)
        return
    if not entries:
        console.print("No action has been recorded yet.")
        return
    table = make_table("time", texts=("who", "action", "queue", "details"), numbers=("tasks",))
    for entry in entries:
        tasks = "" if entry.tasks is None else f"{entry.tasks:,}"
        words = (entry.actor, entry.action, entry.key or "", entry.details)
        table.add_row(format_time(entry.at), tasks, *map(Text, words))
    console.print(table)
