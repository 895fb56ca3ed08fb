"""``taskqueue demo``."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sysconfig
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console

from taskqueue_cli.backends import embedded_store
from taskqueue_cli.output import FAILED, INTERRUPTED, AsJson, console, note, paragraphs, print_json
from taskqueue_core.config import Settings, load_settings

T = TypeVar("T")


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command(name="demo", help=paragraphs(run.__doc__))(run)


def run(
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="PATH",
            help="Folder or file to process. Default: Python's standard library.",
            show_default=False,
        ),
    ] = None,
    *,
    backend: Annotated[
        str | None,
        typer.Option(
            metavar="BACKEND",
            help="Backend of the server: a name, a module path or module:attr. Default: TASKQUEUE_BACKEND.",
            show_default=False,
        ),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Number of worker processes.")] = 2,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum number of files to process.", show_default=False),
    ] = None,
    journal: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the journal of the run to this new file, for `taskqueue pipeline report --journal FILE`.",
            show_default=False,
        ),
    ] = None,
    keep_going: Annotated[
        bool,
        typer.Option(
            "--keep-going",
            help="Keep the server and the workers running after the report, until Ctrl-C.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run a real job: hash, count and compress every file under PATH, with deliberate failures.

    Starts a server and worker processes, and publishes one task per file. About one task in a hundred
    fails once, one task (the poison task) always fails, and halfway through a worker is killed (SIGKILL)
    while it holds deliveries. At the end the ledger must balance and every result must equal a direct
    computation; otherwise the exit code is 1.

    If the backend needs a store and its settings name none, the command starts one for the run.
    """
    from taskqueue_cli.demo import (  # noqa: PLC0415 - no other command needs it
        DemoFailed,
        DemoOptions,
        Report,
        run_demo,
        view_for,
    )

    name = backend or load_settings(Settings).backend
    store = embedded_store(name)
    embedded = store is not None and store.wanted()
    options = DemoOptions(
        path=path or Path(sysconfig.get_path("stdlib")),
        backend=name,
        embedded=embedded,
        workers=workers,
        limit=limit,
        journal=journal,
        keep_going=keep_going,
    )
    shown = Console(stderr=True, highlight=False) if as_json else console
    reports: list[Report] = []

    def reported(report: Report) -> None:
        reports.append(report)
        if as_json:
            print_json(report.to_dict())

    try:
        asyncio.run(interruptible(run_demo(options, view_for(shown), reported)))
    except DemoFailed as error:
        if error.logs:
            note(error.logs, "dim")
        raise
    except (asyncio.CancelledError, KeyboardInterrupt):
        if not reports:
            raise typer.Exit(INTERRUPTED) from None
    if not all(report.ok for report in reports):
        raise typer.Exit(FAILED)


async def interruptible(work: Coroutine[Any, Any, T]) -> T:
    """Have SIGTERM and SIGHUP end the work as Ctrl-C does: in order."""
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGHUP):
        with contextlib.suppress(NotImplementedError):
            loop.add_signal_handler(number, task.cancel)
    return await task
