"""``taskqueue migrate``: move everything from one backend to another."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from taskqueue_cli.commands.stats import count
from taskqueue_cli.output import AsJson, console, print_json
from taskqueue_core.config import Settings, load_settings
from taskqueue_core.errors import ConfigurationError
from taskqueue_core.migration import (
    MigratingBackend,
    MigrationPhase,
    MigrationStatus,
    finish,
    rollback,
    start,
    status,
)
from taskqueue_core.queue import open_backend

__all__ = ["add_to"]

_TEXT = "Move from one backend to another while everything runs."
_MORE = (
    "TASKQUEUE_BACKEND names the new one and TASKQUEUE_MIGRATE_FROM the old one, here and in every server, worker and "
    "publisher. Each command may be given again, by anybody, after whatever interruption."
)
migrate = typer.Typer(help=f"{_TEXT}\n\n{_MORE}", short_help=_TEXT, no_args_is_help=True)
_WORDS = {
    MigrationPhase.IDLE: "not started: the old side has everything",
    MigrationPhase.STARTED: "started: the new side takes in, the old one runs empty",
    MigrationPhase.FINISHED: "finished: nothing is left on the old side",
    MigrationPhase.ROLLED_BACK: "rolled back: the old side takes in, the new one runs empty",
    MigrationPhase.INTERRUPTED: "interrupted: give the command again",
}


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(migrate, name="migrate")


@migrate.command(name="start")
def begin(*, as_json: AsJson = False) -> None:
    """Close the old side's intake, queue by queue, and have the new side take in. Settings are copied."""
    _act(start, as_json=as_json)


@migrate.command(name="status")
def show_status(*, as_json: AsJson = False) -> None:
    """Say what is left where."""
    _act(status, as_json=as_json)


@migrate.command(name="finish")
def end(
    *,
    force: Annotated[
        bool, typer.Option("--force", help="Though there are tasks on the side that is left.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Note that nothing is left behind. Fails while there is."""
    _act(lambda backend: finish(backend, force=force), as_json=as_json)


@migrate.command(name="rollback")
def back(
    *,
    force: Annotated[
        bool, typer.Option("--force", help="Only open the old side: the new one is lost.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Close the new side's intake, queue by queue, and have the old side take in again."""
    _act(lambda backend: rollback(backend, force=force), as_json=as_json)


def _act(step: Callable[[MigratingBackend], Awaitable[MigrationStatus]], *, as_json: bool) -> None:
    result = asyncio.run(_run(step))
    if as_json:
        print_json(result)
        return
    console.print(f"[bold]{_WORDS[result.phase]}[/]")
    if result.queues:
        console.print(_table(result))
    if result.phase is not MigrationPhase.IDLE and not result.unfinished:
        console.print(
            f"[dim]Keep the {result.leaves} side for {result.remembered:g} s more: it knows ids that may be sent again."
        )


async def _run(step: Callable[[MigratingBackend], Awaitable[MigrationStatus]]) -> MigrationStatus:
    settings = load_settings(Settings)
    if settings.migrate_from is None:
        raise ConfigurationError(
            "TASKQUEUE_MIGRATE_FROM: not set; allowed: the backend to migrate from, named like TASKQUEUE_BACKEND"
        )
    opened = open_backend(settings=settings)
    try:
        backend = opened.inner
        if not isinstance(backend, MigratingBackend):
            raise ConfigurationError("TASKQUEUE_BACKEND: a server is no store; name its backend")
        for side in backend.members:
            capabilities = side.backend.capabilities
            if not (capabilities.shared or capabilities.durable):
                raise ConfigurationError(
                    f"the backend {side.name!r} lives in one process, and ends with it: there is nothing to migrate"
                )
        return await step(backend)
    finally:
        await opened.aclose()


def _table(result: MigrationStatus) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("queue", style="bold", overflow="fold")
    table.add_column("takes in")
    for name in ("waiting", "scheduled", "in flight", "dead"):
        table.add_column(f"{name}, {result.leaves}", justify="right")
    table.add_column("moved", justify="right")
    for queue in result.queues:
        remaining = (queue.waiting, queue.scheduled, queue.in_flight, queue.dead)
        table.add_row(
            queue.key, queue.takes_in or "none", *map(count, remaining), count(queue.moved)
        )
    return table
