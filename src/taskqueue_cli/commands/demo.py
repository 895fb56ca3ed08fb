"""``taskqueue demo``: run the demo."""

from __future__ import annotations

import sysconfig
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from taskqueue_cli.backends import BackendName, embedded_store
from taskqueue_cli.output import AsJson, argument, option
from taskqueue_core.config import Settings, load_settings


def run(
    path: Annotated[
        Path | None,
        argument("Folder or file to process. Default: Python's standard library.", metavar="PATH"),
    ] = None,
    *,
    backend: BackendName = None,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Number of worker processes.")] = 2,
    limit: Annotated[int | None, option("Maximum number of files to process.", min=1)] = None,
    journal: Annotated[
        Path | None,
        option(
            "Write the journal of the run to FILE, for `taskqueue pipeline report --journal FILE`.",
            metavar="FILE",
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
    """Run a real job: hash and compress the files under PATH and count their lines, with deliberate failures.

    Starts a server and worker processes, and publishes one task per file. About one task in a hundred
    fails once, one task (the poison task) always fails, and halfway through, a worker is killed (SIGKILL)
    while it holds deliveries. At the end the ledger must balance and every result must equal that of a direct
    computation; otherwise the exit code is 1.

    If the backend needs a store and its settings name none, the command starts one for the run.
    """
    from taskqueue_cli.demo.plan import DemoOptions  # noqa: PLC0415 - slow to import
    from taskqueue_cli.demo.run import run_demo  # noqa: PLC0415 - slow to import
    from taskqueue_cli.demo_frame.run import run_command  # noqa: PLC0415 - slow to import

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
    run_command(partial(run_demo, options), as_json=as_json)
