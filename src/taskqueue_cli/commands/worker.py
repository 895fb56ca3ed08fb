"""``taskqueue worker``: run a worker."""

from __future__ import annotations

import os
from typing import Annotated

import typer
from rich.markup import escape

from taskqueue_cli.backends import BackendName
from taskqueue_cli.output import (
    AsJson,
    LogFormatOption,
    LogLevelOption,
    argument,
    configure_logging,
    console,
    option,
    print_json,
)
from taskqueue_core.config import Settings, load_settings
from taskqueue_core.errors import ConfigurationError
from taskqueue_worker import BaseWorker, LocalWorker, Worker, load_worker


def run(
    target: Annotated[
        str, argument("Worker to run, for example package.module:worker.", metavar="MODULE:ATTR")
    ],
    *,
    url: Annotated[
        str | None,
        option(
            "URL of the server. Default: as defined by the worker, otherwise TASKQUEUE_SERVER_URL."
        ),
    ] = None,
    concurrency: Annotated[
        int | None,
        option(
            "Maximum number of tasks that run at the same time. Default: as defined by the worker.",
            min=1,
        ),
    ] = None,
    local: Annotated[
        bool, typer.Option("--local", help="Connect directly to the store, without a server.")
    ] = False,
    backend: BackendName = None,
    worker_id: Annotated[
        str | None,
        option(
            "Worker id. Default: as defined by the worker, otherwise host name, process id and a random suffix."
        ),
    ] = None,
    log_level: LogLevelOption = None,
    log_format: LogFormatOption = None,
    as_json: AsJson = False,
) -> None:
    """Run a worker until Ctrl-C or SIGTERM; a second signal releases the running tasks at once.

    With --local or --backend, the worker connects directly to the store, without a server. A LocalWorker always
    connects directly.

    Prints the keys once the server has welcomed the worker, or the store has answered; with --json, one object with
    target, keys and pid.

    The exit code is 3 if too many attempts fail in a row, and 4 if the server refuses the worker.
    """
    loaded = load_worker(target)
    settings = load_settings(Settings)
    # If the application has configured logging when it was imported, that stays.
    configure_logging(
        log_level or settings.log_level, log_format or settings.log_format, everything=True
    )
    worker = _configured(loaded, url, backend, local=local)
    worker.configure(worker_id=worker_id, concurrency=concurrency)
    if not worker.keys:
        raise ConfigurationError(f"{target} has no handlers: register some with @worker.task")

    def ready() -> None:
        if as_json:
            print_json({"target": target, "keys": worker.keys, "pid": os.getpid()})
        else:
            keys = escape(", ".join(worker.keys))
            console.print(f"[green]●[/] working for [bold]{keys}[/]  [dim]Ctrl-C stops it")

    if not as_json:
        console.print(f"[yellow]○[/] connecting to {escape(worker.source)}", soft_wrap=True)
    worker.run(on_ready=ready)


def _configured(
    worker: BaseWorker, url: str | None, backend: str | None, *, local: bool
) -> BaseWorker:
    if isinstance(worker, Worker):
        if not local and backend is None:
            worker.configure(url=url)
            return worker
        worker = LocalWorker.of(worker)
    if url is not None:
        raise ConfigurationError(
            "--url cannot be used with a local worker, which connects directly to the store: remove --url"
        )
    if isinstance(worker, LocalWorker):
        worker.configure(backend=backend)
    return worker
