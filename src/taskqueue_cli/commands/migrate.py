"""``taskqueue migrate``: migrate from one backend to another."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated

import typer
from rich.table import Table

from taskqueue_cli.commands.stats import count
from taskqueue_cli.output import AsJson, console, make_table, print_json
from taskqueue_core.assembly import open_backend
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

_TEXT = "Migrate from one backend to another without downtime."
_DETAILS = (
    "TASKQUEUE_BACKEND names the new backend and TASKQUEUE_MIGRATE_FROM the old one, here and in every server, worker "
    "and publisher. Each command can be repeated after an interruption."
)
migrate = typer.Typer(
    name="migrate", help=f"{_TEXT}\n\n{_DETAILS}", short_help=_TEXT, no_args_is_help=True
)
_PHASE_TEXTS = {
    MigrationPhase.IDLE: "not started: all tasks are in the old backend",
    MigrationPhase.STARTED: "started: new tasks go to the new backend; the old one is drained",
    MigrationPhase.FINISHED: "finished: new tasks go to the new backend; the old one is closed",
    MigrationPhase.ROLLED_BACK: "rolled back: new tasks go to the old backend; the new one is drained",
    MigrationPhase.INTERRUPTED: "a start or a rollback was interrupted: run the same command again",
}


@migrate.command(name="start")
def begin(*, as_json: AsJson = False) -> None:
    """Switch publishing from the old backend to the new one, queue by queue. Queue settings are copied."""
    _act(start, as_json=as_json)


@migrate.command(name="status")
def show_status(*, as_json: AsJson = False) -> None:
    """Show how many tasks of each queue are left in the backend that is being drained."""
    _act(status, as_json=as_json)


@migrate.command(name="finish")
def end(
    *,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Finish even if tasks are left in the backend that is being drained."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Finish the migration. Fails if tasks are left in the backend that is being drained."""
    _act(lambda backend: finish(backend, force=force), as_json=as_json)


@migrate.command(name="rollback")
def back(
    *,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Reopen the old backend without contacting the new one. Use this if the new one is permanently lost.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Switch publishing from the new backend back to the old one, queue by queue."""
    _act(lambda backend: rollback(backend, force=force), as_json=as_json)


def _act(step: Callable[[MigratingBackend], Awaitable[MigrationStatus]], *, as_json: bool) -> None:
    result = asyncio.run(_run(step))
    if as_json:
        print_json(result)
        return
    console.print(f"[bold]{_PHASE_TEXTS[result.phase]}[/]")
    if result.queues:
        console.print(_table(result))
    if result.uncarried:
        console.print(
            f"[dim]The {result.leaves} backend has reports for tasks that wait for others."
        )
    if result.phase is not MigrationPhase.IDLE and not (result.unfinished or result.uncarried):
        console.print(
            f"[dim]Keep the {result.leaves} backend for {result.remembered:g} s more, to detect duplicate ids."
        )


async def _run(step: Callable[[MigratingBackend], Awaitable[MigrationStatus]]) -> MigrationStatus:
    settings = load_settings(Settings)
    if settings.migrate_from is None:
        raise ConfigurationError(
            "TASKQUEUE_MIGRATE_FROM is not set: set it to the old backend, in the same form as TASKQUEUE_BACKEND"
        )
    opened = open_backend(settings=settings)
    try:
        backend = opened.inner
        if not isinstance(backend, MigratingBackend):
            raise ConfigurationError(
                "TASKQUEUE_BACKEND names a server, which cannot be migrated: set it to the backend of the server"
            )
        for side in backend.members:
            capabilities = side.backend.capabilities
            if not (capabilities.shared or capabilities.durable):
                raise ConfigurationError(
                    f"the backend {side.name!r} exists in one process only, so its tasks cannot be migrated"
                )
        return await step(backend)
    finally:
        await opened.aclose()


def _table(result: MigrationStatus) -> Table:
    counts = ("blocked", "waiting", "scheduled", "in flight", "dead")
    numbers = [*(f"{name}, {result.leaves}" for name in counts), "moved"]
    table = make_table("queue", numbers=numbers, texts=("publishes to",))
    for queue in result.queues:
        live = (queue.blocked, queue.waiting, queue.scheduled, queue.in_flight)
        row = (*live, queue.dead, queue.moved)
        table.add_row(queue.key, *map(count, row), queue.takes_in or "none")
    return table
